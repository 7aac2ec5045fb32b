"""Prompts into requests of an engine: checked, then queued until they arrive."""

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, index
from typing import Annotated

from dcpmla.fields import Flag, Rule, check_fields, is_number, is_whole, option_label, optional, rules_of, whole
from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.handoffs import Handoffs
from dcpmla.runtime.request import Prompt, Request
from dcpmla.runtime.runner import Model
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.stops import StopStrings
from dcpmla.text.token_bytes import Tokenizer

_NOW = -math.inf  # arrival time of a request that arrives at the next step
_arrival_time = attrgetter("arrival_time")
_Params = Annotated[
    SamplingParams | None, optional(Rule("SamplingParams", lambda value: isinstance(value, SamplingParams)))
]
_Name = Annotated[str | int, Rule("text or a whole number", lambda value: isinstance(value, str) or is_whole(value))]
_Seconds = Annotated[float | None, optional(Rule("a finite number of seconds", is_number))]
_Handoff = Annotated[str, Rule("a name", lambda value: isinstance(value, str))]
_Source = Annotated[
    tuple[str, str] | None,
    optional(Rule("two names", lambda value: isinstance(value, tuple) and [*map(type, value)] == [str, str])),
]
_Salt = Annotated[str, Rule("text", lambda value: isinstance(value, str))]


class Admission:
    """The part of an engine that takes requests.

    Args:
        scheduler: Scheduler over the cache's blocks.
        max_model_len: Longest sequence, prompt and new tokens.
        tokenizer: Tokenizer of prompts, texts and stop strings; None serves token ids only.
        is_first: Whether this is the first rank, which compiles grammars.
    Attributes:
        handoffs: Transfers with other jobs; None without.
        stops: Search for stop strings; None where a front searches, which is in another process (`Engine.stop`).
        has_forms: Whether the tokens of requests have forms (`Request.has_forms`).
    Raises:
        ValueError: max_model_len is below 2.
    """

    def __init__(
        self, model: Model, scheduler: Scheduler, max_model_len: int, tokenizer: Tokenizer | None, is_first: bool
    ) -> None:
        check_fields({"max_model_len": whole(2)}, {"max_model_len": max_model_len}, option_label)
        self.model, self.scheduler, self.allocator = model, scheduler, scheduler.allocator
        self.max_model_len, self.tokenizer = max_model_len, tokenizer
        self.grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids, is_first)
        self.handoffs: Handoffs | None = None
        self.stops = None if tokenizer is None else StopStrings(tokenizer)
        self.has_forms = False
        self.now = 0.0  # seconds on this rank's clock when the last step ended
        self._coming: list[Request] = []  # not yet due, by arrival time, then in the order of `add`

    def prompt(self, content: str | Sequence[int], cache_salt: _Salt = "") -> Prompt:
        """Check a prompt, a text or token ids, that several requests may share.

        Args:
            cache_salt: Salt of its blocks: requests with different salts never reuse each other's; "" is no salt.
        Raises:
            ValueError: The model cannot continue the prompt, a text has no tokenizer, or cache_salt is no text.
        """
        check_fields(rules_of(Admission.prompt), locals())
        if not isinstance(content, str):
            token_ids = _whole_numbers(content)
        elif self.tokenizer is None:
            raise ValueError("prompt is a text, but the engine has no tokenizer; give token ids")
        else:
            token_ids = list(self.tokenizer(content)["input_ids"])
        check_prompt("prompt", token_ids, self.model.vocab_size, self.max_model_len)
        return Prompt(token_ids, cache_salt, [])

    def add(
        self,
        prompt: str | Sequence[int] | Prompt,
        params: _Params = None,
        *,
        request_id: _Name = 0,
        arrival_time: _Seconds = None,
        keep_logits: Flag = False,
        keep_logprobs: Flag = True,
        handoff: _Handoff = "",
        reader: _Handoff = "",
        source: _Source = None,
    ) -> Request:
        """Queue a prompt: a text, token ids, or what `prompt` returned. Requests are served in the order of their
        arrival, then of the calls.

        Args:
            params: Sampling parameters, by default greedy, 16 tokens; max_model_len bounds max_new_tokens.
            arrival_time: Seconds on the engine's clock before which the request is ignored; default now.
            keep_logits: Whether to keep the logits that each token was chosen from.
            keep_logprobs: Whether this rank keeps the log probabilities that params ask for.
            handoff: Name under which another job reads its blocks; it ends with its first token. Empty for none.
            reader: Name of that job, which alone may read them; empty for the first one that asks.
            source: Name of a job that has prefilled it, and its handoff there; None if it is prefilled here, or a
                job that `StepEvents.wanted` asks for prefills it.
        Raises:
            ValueError: An argument has another type, the model cannot continue the prompt, the whole cache has no room
                for it, a text, a stop string or a grammar has no tokenizer, the extra of grammars is not installed,
                arrival_time is not finite, or this job sends or receives no blocks. A grammar that cannot be compiled
                ends the request with an error.
        """
        check_fields(rules_of(Admission.add), locals())
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ValueError("stop has strings, but the engine has no tokenizer; give stop_token_ids")
        token_ids, cache_salt, keys = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        params.check_vocabulary(self.model.vocab_size)
        if params.grammar is not None:
            self.grammars.check()
        if handoff:
            params = replace(params, max_new_tokens=1, min_tokens=min(1, params.min_tokens), stop=())
        request = Request(
            prompt_token_ids=token_ids,
            params=params.at_most(self.max_model_len - len(token_ids)),
            request_id=request_id,
            arrival_time=_NOW if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
            prompt_keys=keys,
            has_forms=self.has_forms,
            keep_logits=keep_logits,
            keep_logprobs=keep_logprobs,
            tokenizer=self.tokenizer,
            num_seen_tokens=0 if params.stop and self.stops is None else None,
        )
        self.scheduler.check_fits(request)
        if handoff or source is not None:
            self._exchange(request, handoff, reader, source)
        if params.grammar is None:
            insort(self._coming, request, key=_arrival_time)
        else:
            self.grammars.add(request)
        self.scheduler.reuse.add(request)
        return request

    def _exchange(self, request: Request, handoff: str, reader: str, source: tuple[str, str] | None) -> None:
        if self.handoffs is None:
            raise ValueError(f"handoff is {handoff!r} and source {source}, but this job exchanges no blocks (--role)")
        if handoff:
            self.handoffs.begin(request, handoff, reader)
        if source is not None:
            self.handoffs.await_room(request, source)

    def abort(self, request: Request) -> None:
        """End a request that is not finished: its tokens so far stay, its blocks are freed."""
        if request.finish_reason:
            return
        self.withdraw(request)
        request.finish_reason, request.finish_time = "abort", self.now

    def withdraw(self, request: Request) -> None:
        """Forget a request, whatever it waits for, and free its blocks."""
        if request.sending is not None:
            request.sending.cancel()
        if self.handoffs is not None:
            self.handoffs.decline(request)
        if request in self._coming:
            self._coming.remove(request)
            self.scheduler.reuse.remove(request)
        elif self.grammars.holds(request):
            self.scheduler.reuse.remove(request)
        else:
            self.scheduler.remove(request)

    def admit_compiled(self, num_compiled: int) -> None:
        """Admit the requests whose grammars the first rank has compiled, num_compiled in all."""
        for request in self.grammars.take(num_compiled):
            insort(self._coming, request, key=_arrival_time)

    def admit_due(self, now: float) -> None:
        """Hand the requests that are due to the scheduler, in order."""
        num_due = bisect_right(self._coming, now, key=_arrival_time)
        for request in self._coming[:num_due]:
            request.arrival_time = now if request.arrival_time == _NOW else request.arrival_time
        self.scheduler.waiting += self._coming[:num_due]
        del self._coming[:num_due]


def check_prompt(name: str, token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError, with the prompt's name, unless a model can continue it."""
    if not token_ids:
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"{name} has token id {outside[0]}; the model's vocabulary is [0, {vocab_size})")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"{name} has {len(token_ids)} tokens; with --max-model-len {max_model_len} at most {max_model_len - 1} "
            "leave room for a new one"
        )


def _whole_numbers(prompt: Sequence[int]) -> list[int]:
    """Return a prompt's token ids as ints; ValueError for anything else."""
    try:
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError("'bool' object is no token id")
        return [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(f"prompt must be a text or token ids, whole numbers ({error})") from error
