"""From requests to steps to tokens."""
