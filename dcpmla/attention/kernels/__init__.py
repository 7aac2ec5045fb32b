"""Triton kernels of attention, each file with its launcher; `attention/reference.py` specifies them."""
