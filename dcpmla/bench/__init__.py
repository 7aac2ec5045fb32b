"""Benchmarks, one file each."""
