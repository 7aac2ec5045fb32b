"""Sparse MLA (DeepSeek Sparse Attention): an indexer selects the tokens that each token attends to."""
