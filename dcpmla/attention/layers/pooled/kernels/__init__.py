"""Triton kernels of the selection of pools."""
