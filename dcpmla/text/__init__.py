"""Text of token ids: bytes of tokens, texts as tokens arrive, stop strings, offsets."""
