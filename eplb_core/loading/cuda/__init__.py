"""CUDA's runtime and driver by their C interfaces."""
