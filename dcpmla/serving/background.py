"""Work on what clients send, off the event loop: small work in a thread, large work in a child of a process.

A thread cannot be ended. So it does only what takes little whatever the content is, and all else is done in a child,
within limits, which ends with its client (`worker.py`).
"""

import asyncio
from collections.abc import Callable
from typing import Any

from dcpmla.extras import missing
from dcpmla.serving.messages import Started
from dcpmla.serving.template import Template
from dcpmla.serving.worker import Allowance, Worker

_SMALL = 1 << 16  # characters, or tokens, of the work of a thread


class Prepared:
    """A model as functions of the worker get it.

    Attributes:
        model: The model, with its tokenizer.
        vocabulary: Vocabulary of the tokenizer as grammars need it; None where requests may have none.
    """

    def __init__(self, model: Started, vocabulary: Any = None) -> None:
        self.model, self.vocabulary = model, vocabulary
        self._templates = dict[str | None, Template]()

    def template(self, given: str | None) -> Template:
        """Return the template of conversations; `given` is a text in place of the tokenizer's."""
        if given not in self._templates:
            self._templates[given] = Template(self.model, given)
        return self._templates[given]


def prepare(model: Started) -> Prepared:
    """Return a model with its vocabulary, in the process that works for this one."""
    if missing("structured") or model.no_grammars or model.tokenizer is None:
        return Prepared(model)
    from dcpmla.runtime.grammar_check import closing_tokens
    from dcpmla.runtime.grammar_text import read_vocabulary

    vocabulary = read_vocabulary(model.tokenizer, model.vocab_size, model.eos_token_ids)
    closing_tokens(vocabulary)  # Functions find it made.
    return Prepared(model, vocabulary)


class Background:
    """Work on what the clients of a model send, off the event loop.

    Args:
        worker: Process whose model is `prepare` of this one.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Started, worker: Worker) -> None:
        self.model, self._worker, self._prepared = model, worker, Prepared(model)

    async def run(self, size: int, allowance: Allowance, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of a module returns for the prepared model and arguments: something that JSON has.

        Args:
            size: Bound of the work, in characters or tokens.
            allowance: Limits of work that is not small.
        Raises:
            LimitError: The function has passed a limit, or failed in a child.
        """
        if size <= _SMALL:
            return await asyncio.to_thread(function, self._prepared, *args)
        return await self._worker.call(self.model, function, *args, allowance=allowance)
