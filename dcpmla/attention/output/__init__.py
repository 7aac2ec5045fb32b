"""Attention outputs quantized for the projection that takes them."""
