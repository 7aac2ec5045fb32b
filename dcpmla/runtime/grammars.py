"""Grammars of requests: the first rank compiles them in threads of its own and follows them, and all ranks know which
are compiled.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from dcpmla.extras import install, missing
from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 16  # latest grammars whose matchers are kept, for the next request with the same one
_MAX_THREADS = 4
Bits = np.ndarray[Any, np.dtype[np.uint32]]  # [words], a bit for each token, the lowest first


class Follower:
    """The position of a request in its grammar, on the first rank.

    Args:
        matcher: Matcher at the beginning of the grammar; None if it could not be compiled, for the reason `error`.
        eos_token_ids: End-of-sequence tokens.
        starts_after: Tokens after which the grammar begins (`Grammar.starts_after`).

    Attributes:
        error: Reason why the grammar cannot be followed; empty if it can.
    """

    def __init__(
        self, matcher: "LLMatcher | None", error: str, eos_token_ids: Sequence[int], starts_after: Sequence[int]
    ) -> None:
        self.matcher, self.error = matcher, error
        self._eos_token_ids, self._starts_after = list(eos_token_ids), list(starts_after)
        self._num_seen = 0  # new tokens that are known here
        self._has_begun = not starts_after

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow a request's new tokens. Tokens that it has followed before are skipped."""
        if not self._has_begun:
            start = self._begins(token_ids, self._num_seen)
            self._num_seen, self._has_begun = (len(token_ids), False) if start is None else (start, True)
        new = list(token_ids[self._num_seen :])
        self._num_seen = len(token_ids)
        if new and self.matcher is not None:
            self.matcher.consume_tokens(new)
            self.check()

    def check(self) -> None:
        """Set the error if the matcher has failed: it then goes on as if the grammar were complete."""
        if self.matcher is not None and self.matcher.is_error():
            self.error = self.error or self.matcher.get_error()

    def num_free(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of a step's choices come before the grammar begins: one follows the known tokens, and one
        each draft.
        """
        if self._has_begun:
            return 0
        start = self._begins([*token_ids, *drafts], len(token_ids))
        return 1 + len(drafts) if start is None else start - len(token_ids)

    def finish(self, bits: Bits, stop_token_ids: Sequence[int], is_free: bool, is_short: bool) -> None:
        """Complete the mask of a choice: tokens that end the request are allowed where the grammar may end.

        Args:
            bits: Tokens that the grammar allows, in place; all before it begins.
            is_free: Whether the choice comes before the grammar begins. No token may end the request there.
            is_short: Whether the request must not end yet. It ends where nothing else is left.
        """
        may_end = not is_free and any(_has(bits, token) for token in self._eos_token_ids)
        ends = [token for token in {*self._eos_token_ids, *stop_token_ids} if token < 32 * len(bits)]
        before = bits.copy()
        for token in ends:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        if may_end and not (is_short and bits.any()):
            for token in ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        elif not bits.any():
            bits[:] = before  # nothing but a stop token goes on with the text
        if not bits.any():
            self.error = self.error or "no token of the vocabulary continues it"

    def _begins(self, token_ids: Sequence[int], first: int) -> int | None:
        """Return the number of tokens before the grammar's first one, None if it has not begun.

        Args:
            first: Number of tokens in which it is known not to have begun.
        """
        length = len(self._starts_after)
        for end in range(max(first + 1, length), len(token_ids) + 1):
            if list(token_ids[end - length : end]) == self._starts_after:
                return end
        return None


def _has(bits: Bits, token: int) -> bool:
    return token < 32 * len(bits) and bool(bits[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


class Grammars:
    """The grammars of an engine's requests.

    A request waits outside the scheduler until its grammar is compiled, so others are not delayed. Each step's message
    has the first rank's number of compiled grammars, in the order of the requests; so they are admitted alike.

    Args:
        tokenizer: Tokenizer of transformers, a fast one; None if there is none.
        is_first: Whether this is the first rank, which alone has matchers: its tokens are all ranks' tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int], is_first: bool) -> None:
        self._tokenizer, self._vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self._is_first = is_first
        self._waiting: deque[Request] = deque()  # on every rank
        self._num_taken = self._num_compiled = 0
        self._compiling: deque[Future[Follower]] = deque()
        self._followers: WeakKeyDictionary[Request, Future[Follower]] = WeakKeyDictionary()
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: LLTokenizer | None = None

    @property
    def num_words(self) -> int:
        """Return the width of masks in words of 32 tokens."""
        return -(-self._num_tokens // 32)

    @property
    def is_pending(self) -> bool:
        """Return whether any request waits for its grammar."""
        return bool(self._waiting)

    @property
    def _num_tokens(self) -> int:
        return max(self._vocab_size, len(self._tokenizer))

    def holds(self, request: Request) -> bool:
        """Return whether a request waits for its grammar."""
        return request in self._waiting

    @property
    def num_compiled(self) -> int:
        """Return the number of grammars that this rank has compiled, up to the first one that is not ready."""
        while self._compiling and self._compiling[0].done():
            self._compiling.popleft()
            self._num_compiled += 1
        return self._num_compiled

    def check(self) -> None:
        """Raise ValueError if no request may have a grammar: no extra is installed, or the engine has no tokenizer."""
        check_extra()
        if self._tokenizer is None:
            raise ValueError("grammar needs a tokenizer, and the engine has none")

    def add(self, request: Request) -> None:
        """Compile a request's grammar, in a thread of the first rank."""
        assert request.params.grammar is not None
        self._waiting.append(request)
        if self._is_first:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MAX_THREADS, "grammar")
            future = self._threads.submit(self._compile, request.params.grammar)
            self._followers[request] = future
            self._compiling.append(future)

    def take(self, num_compiled: int) -> list[Request]:
        """Return the unfinished requests whose grammars are ready, once.

        Args:
            num_compiled: The first rank's number, as all ranks have agreed on it.
        """
        requests = [self._waiting.popleft() for _ in range(num_compiled - self._num_taken)]
        self._num_taken = num_compiled
        return [request for request in requests if not request.finish_reason]

    def wait(self, seconds: float) -> None:
        """Wait for the next grammar. Only the first rank waits; others meet it at the next step."""
        if self._compiling:
            wait([self._compiling[0]], seconds)

    def follower(self, request: Request) -> Follower | None:
        """Return a request's position in its grammar, advanced past all of its known tokens; None on other ranks."""
        future = self._followers.get(request)
        if future is None:
            return None
        follower = future.result()
        follower.advance(request.token_ids)
        return follower

    def failure(self, request: Request) -> ValueError:
        """Return the reason for which a request cannot go on."""
        future = self._followers.get(request)
        words = "the first rank says why" if future is None else future.result().error
        return ValueError(f"the grammar cannot be followed after {len(request.token_ids)} new tokens: {words}")

    def load(self) -> str:
        """Read the tokenizer's vocabulary on the first rank, so that the first request with a grammar does not wait for
        it. No other thread runs meanwhile, for about a second.

        Returns:
            The reason why no request may have a grammar; empty if requests may.
        """
        try:
            check_extra()
            if self._tokenizer is None:
                return "the model has no tokenizer"
            self._read_vocabulary()
        except ValueError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Follower:
        try:
            with self._lock:
                vocabulary = self._read_vocabulary()
            matcher = self._matcher(vocabulary, grammar.kind, grammar.text)
        except Exception as error:  # whatever it is, it ends this request alone
            return Follower(None, str(error), self.eos_token_ids, grammar.starts_after)
        return Follower(matcher, "", self.eos_token_ids, grammar.starts_after)

    def _matcher(self, vocabulary: "LLTokenizer", kind: str, text: str) -> "LLMatcher":
        from dcpmla.runtime.grammar_text import compile_grammar

        with self._lock:
            kept = self._kept.get((kind, text))
            if kept is not None:
                self._kept.move_to_end((kind, text))
                return kept.deep_copy()
        matcher = compile_grammar(vocabulary, kind, text)
        with self._lock:
            self._kept[kind, text] = matcher.deep_copy()
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _read_vocabulary(self) -> "LLTokenizer":
        if self._vocabulary is None:
            from dcpmla.runtime.grammar_text import read_vocabulary

            self._vocabulary = read_vocabulary(self._tokenizer, self._vocab_size, self.eos_token_ids)
        return self._vocabulary


def check_extra() -> None:
    """Raise ValueError unless the extra of grammars is installed."""
    if missing("structured"):
        raise ValueError(f"grammar needs the extra structured: {install('structured')}")
