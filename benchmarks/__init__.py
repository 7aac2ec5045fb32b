"""Scripts and adapters for benchmarks that need a checkout."""
