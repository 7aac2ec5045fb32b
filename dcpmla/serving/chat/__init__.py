"""Conversations: answers of models -> reasoning, content and tool calls; messages -> prompts without a template."""
