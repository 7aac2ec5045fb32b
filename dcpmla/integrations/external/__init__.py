"""Attention layers over an engine's own projections and weights (docs/plugging_in.md)."""
