"""Work on what clients send, off the event loop: small work in a thread, large work in a child of a process.

A thread cannot be ended, so it does only what takes a fraction of a second whatever the content is, and keeps its
permit to the end. All else is done in a child, within limits, which ends with its client (`worker.py`). Starting a
child takes time that short prompts would notice.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcpmla.extras import missing
from dcpmla.serving.messages import Started
from dcpmla.serving.template import Template
from dcpmla.serving.worker import Allowance, Permits, Worker

_NUM_THREADS = 16  # that work at a time
_SMALL, _SMALL_IN_PYTHON = 1 << 20, 1 << 16  # characters, or tokens, of the work of a thread; of slow tokenizers


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
    from dcpmla.runtime.grammar_text import closing_tokens, read_vocabulary

    vocabulary = read_vocabulary(model.tokenizer, model.vocab_size, model.eos_token_ids)
    closing_tokens(vocabulary)  # Functions find it made.
    return Prepared(model, vocabulary)


class Background:
    """Work on what the clients of a model send, off the event loop.

    Args:
        worker: Process whose model is `prepare` of this one.

    Attributes:
        model: The model.
        worker: The process.
        prepared: The model as functions in threads get it.
    """

    def __init__(self, model: Started, worker: Worker) -> None:
        self.model, self.worker, self.prepared = model, worker, Prepared(model)
        self._small = _SMALL if getattr(model.tokenizer, "is_fast", True) else _SMALL_IN_PYTHON
        self._threads, self._permits = ThreadPoolExecutor(_NUM_THREADS), Permits(_NUM_THREADS)

    async def run(self, size: int, allowance: Allowance, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of a module returns for the prepared model and arguments: something that JSON has.

        Args:
            size: Bound of the work, in characters or tokens.
            allowance: Limits of work that is not small.
        Raises:
            LimitError: The function has passed a limit, or failed in a child.
        """
        if size <= self._small:
            give_back = await self._permits.take()
            running = asyncio.get_running_loop().run_in_executor(self._threads, function, self.prepared, *args)
            running.add_done_callback(lambda _: give_back())  # also where the client has left meanwhile
            return await asyncio.shield(running)
        return await self.worker.call(self.model, function, *args, allowance=allowance)
