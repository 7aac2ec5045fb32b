"""Sparse MLA that selects pools of tokens, beside linear attention (GLM-5-Next)."""
