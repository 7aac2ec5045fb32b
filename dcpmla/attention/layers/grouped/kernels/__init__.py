"""Triton kernels of attention with keys and values of each head, with their launchers."""
