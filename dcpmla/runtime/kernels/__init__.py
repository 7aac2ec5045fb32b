"""Triton kernels between logits and tokens, with their launchers."""
