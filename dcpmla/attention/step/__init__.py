"""One step of a batch, as one table: numbers of requests from the host, and numbers of tokens that follow from them."""
