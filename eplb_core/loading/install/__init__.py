"""Staged bytes into live slots, on the host or by one or two GPU kernels."""
