"""MLA attention: the tensor-parallel layer, its metadata, and attention over sharded latents."""
