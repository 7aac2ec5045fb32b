"""Triton kernels of the exchange."""
