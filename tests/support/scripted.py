"""An HTTP process over a model that follows a script, so that clients' conversations have exact results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.serving.messages import Output, Started, Submit
from dcpmla.serving.settings import Settings
from tests.support.fake_ranks import FakeRanks
from tests.support.servers import KEY
from tests.support.small_tokenizers import byte_level

MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
ROLES = ["<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|pad|>"]
EOS = "<|end|>"
Script = Callable[[str], str]  # prompt -> answer, without its end


def scripted_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with markup (no special tokens) and roles (special ones)."""
    backend = byte_level().backend_tokenizer
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    backend.add_special_tokens(ROLES)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, chat_template=template)


class RunningScript:
    """A server whose model follows a script.

    Args:
        step: Number of tokens of an output.
        is_mute: Whether requests get no answer.
    """

    def __init__(self, tokenizer: Any, script: Script, directory: str, settings: Settings, is_mute: bool) -> None:
        self.tokenizer, self._script, self.is_mute, self.step = tokenizer, script, is_mute, 1
        self._eos = frozenset([tokenizer.eos_token_id])
        tokenizer.save_pretrained(directory)
        started = Started(directory, len(tokenizer), 100_000, 4, 100_000, "scripted", eos_token_ids=[*self._eos])
        self._ranks = FakeRanks(self._answer, started, settings)
        self.url, self.close = self._ranks.url, self._ranks.close

    @property
    def submitted(self) -> Submit:
        """Return the latest prompt that has come."""
        return self._ranks.submitted[-1]

    @property
    def prompt(self) -> str:
        """Return the text of the latest prompt that has come."""
        return str(self.tokenizer.decode(self.submitted.prompt_token_ids))

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def _answer(self, submit: Submit, request_id: int) -> Iterator[Output]:
        request, num_sent = Request(submit.prompt_token_ids, submit.params), 0
        text = "" if self.is_mute else self._script(self.tokenizer.decode(submit.prompt_token_ids))
        tokens = self.tokenizer.encode(text, add_special_tokens=False) + [*self._eos]
        for token in () if self.is_mute else tokens:
            request.append(token, self._eos)
            if request.finish_reason or len(request.token_ids) - num_sent >= self.step:
                new = tuple(request.token_ids[num_sent:])
                logprobs = tuple(TokenLogprobs(each, -0.5, ((each, -0.5),)) for each in new)
                if submit.params.logprobs is None:
                    logprobs = ()
                yield Output(request_id, "", new, logprobs, request.finish_reason)
                num_sent = len(request.token_ids)
            if request.finish_reason:
                return


@contextmanager
def serve_script(tokenizer: Any, script: Script, is_mute: bool = False, **settings: Any) -> Iterator[RunningScript]:
    """Serve a script; yield once the server is healthy."""
    options = {"name": "scripted", "api_key": KEY, "request_timeout": 60, "max_waiting": 16, "drain_seconds": 1}
    with TemporaryDirectory() as directory:
        running = RunningScript(tokenizer, script, directory, Settings(**{**options, **settings}), is_mute)
        try:
            yield running
        finally:
            running.close()
