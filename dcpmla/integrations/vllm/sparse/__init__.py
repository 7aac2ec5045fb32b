"""Sparse MLA inside vLLM (DeepSeek-V3.2, GLM-5): this package's selection of tokens, and attention to them."""
