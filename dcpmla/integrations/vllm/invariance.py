"""vLLM's mode whose results do not depend on the batch."""

import os


def is_batch_invariant() -> bool:
    """Return whether VLLM_BATCH_INVARIANT is set."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"
