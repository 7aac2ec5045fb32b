"""Dense MLA: the layer over a sharded latent cache, its decode and its prefill."""
