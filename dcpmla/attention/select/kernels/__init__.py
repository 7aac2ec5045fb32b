"""Triton kernels of sparse attention with their launchers."""
