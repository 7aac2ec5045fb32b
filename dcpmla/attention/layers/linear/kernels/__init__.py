"""Triton kernels of linear attention, and the call of flash-linear-attention's."""
