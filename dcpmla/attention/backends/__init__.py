"""One call of attention, and the backends that run it."""
