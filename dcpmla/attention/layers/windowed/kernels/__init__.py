"""Triton kernels of windows."""
