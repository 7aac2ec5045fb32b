"""Triton kernels of DeepSeek-V4's attention with their launchers."""
