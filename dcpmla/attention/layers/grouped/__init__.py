"""Attention with keys and values of each head, or of each group of heads: the layer of dense EAGLE3 heads."""
