"""CUDA's runtime and driver, called by ctypes: streams, copies, and memory that processes share."""
