"""Triton kernels of quantized linear layers."""
