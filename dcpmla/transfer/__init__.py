"""Blocks and states of requests on their way between two jobs."""
