"""Triton kernels of decoder blocks, with their launchers."""
