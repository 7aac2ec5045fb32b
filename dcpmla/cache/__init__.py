"""The paged latent cache and its blocks."""
