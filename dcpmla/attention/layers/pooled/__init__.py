"""Sparse MLA that selects pools of tokens, in models with linear attention (GLM-5-Next)."""
