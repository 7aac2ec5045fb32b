"""Sparse MLA over pools inside vLLM (GLM-5-Next): this package's selection of pools, and attention to their tokens."""
