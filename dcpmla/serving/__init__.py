"""The OpenAI-compatible server: a process that speaks HTTP, and the loop of the ranks that serve its requests."""
