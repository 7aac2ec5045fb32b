"""DeepSeek-V4's attention: a sliding window and compressed entries, over one shared key and value head."""
