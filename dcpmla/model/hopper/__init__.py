"""Experts on Hopper GPUs: grouped products of many rows."""
