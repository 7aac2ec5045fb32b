"""Work on what clients send, off the event loop: small work in a thread, large work in a child of a process.

A thread cannot be ended, so it does only what takes a fraction of a second whatever the content is, and keeps its
permit to the end. All else is done in a child, within limits, which ends with its client (`worker.py`). Starting a
child takes time that short prompts would notice.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from dcpmla.extras import missing
from dcpmla.integrations.tokenizer import load_tokenizer
from dcpmla.serving.messages import Started
from dcpmla.serving.pieces import Borders
from dcpmla.serving.template import Template
from dcpmla.serving.worker import Allowance, Permits, Worker

_NUM_THREADS = 16  # at a time
_SMALL, _SMALL_IN_PYTHON = 1 << 20, 1 << 16  # characters, or tokens, of the work of a thread; of slow tokenizers


class Prepared:
    """A model with its tokenizer, as the HTTP process and functions of the worker have it.

    Attributes:
        tokenizer: Tokenizer of transformers; None where it does not load, for the reason no_tokenizer.
        borders: Control tokens at which texts are divided.
        vocabulary: Vocabulary of the tokenizer as grammars need it; None until it is read, in the worker alone.
    """

    def __init__(self, model: Started, tokenizer: Any, no_tokenizer: str = "") -> None:
        self.model, self.tokenizer, self.no_tokenizer = model, tokenizer, no_tokenizer
        self.vocabulary: Any = None
        self._templates = dict[str | None, Template]()
        self.borders = Borders(tokenizer)

    def template(self, given: str | None) -> Template:
        """Return the template of conversations; `given` is a text in place of the tokenizer's."""
        if given not in self._templates:
            self._templates[given] = Template(self.model, self.tokenizer, given)
        return self._templates[given]

    def read_vocabulary(self) -> Self:
        """Read the vocabulary, unless requests may have no grammars."""
        if not (missing("structured") or self.model.no_grammars or self.tokenizer is None):
            from dcpmla.runtime.grammar_text import closing_tokens, read_vocabulary

            self.vocabulary = read_vocabulary(self.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
            closing_tokens(self.vocabulary)  # Functions find it made.
        return self


def prepare(model: Started) -> Prepared:
    """Load a model's tokenizer, and read its vocabulary, in the process that works for this one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Its children are forks, which threads do not survive.
    prepared = Prepared(model, *load_tokenizer(Path(model.directory))).read_vocabulary()
    prepared.template(None).compile()
    return prepared


class Background:
    """Work on what the clients of a model send, off the event loop.

    Attributes:
        prepared: The model as functions in threads get it.
        worker: Process whose model is `prepare` of this one.
    """

    def __init__(self, prepared: Prepared, worker: Worker) -> None:
        self.prepared, self.worker = prepared, worker
        self._small = _SMALL if getattr(prepared.tokenizer, "is_fast", True) else _SMALL_IN_PYTHON
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
        return await self.worker.call(self.prepared.model, function, *args, allowance=allowance)
