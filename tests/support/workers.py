"""Processes that work for an HTTP process, with tokenizers that no directory has."""

from typing import Any

from dcpmla.serving.background import Prepared
from dcpmla.serving.messages import Started
from dcpmla.serving.worker import Worker


def worker_of(tokenizer: Any) -> Worker:
    """Return a worker that has a tokenizer from this process, of which it is a fork."""

    def prepare(model: Started) -> Prepared:
        return Prepared(model, tokenizer).read_vocabulary()

    return Worker(prepare)
