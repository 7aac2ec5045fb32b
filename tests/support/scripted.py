"""An HTTP process over a model that follows a script, so that clients' conversations have exact results."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.serving.frontend import listen
from dcpmla.serving.http import serve_http
from dcpmla.serving.messages import (
    LENGTH,
    Close,
    Message,
    Opened,
    Output,
    Report,
    Started,
    Stopped,
    Submit,
    pack,
    unpack_commands,
)
from dcpmla.serving.settings import Settings
from tests.support.ranks import start_process
from tests.support.servers import KEY, wait_until_healthy
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


class ScriptedModel:
    """A thread that plays the ranks.

    Args:
        script: Function that answers prompts; it runs in the thread.
        directory: Folder for the tokenizer's files, which the server reads.
        step: Number of tokens of an output.
    """

    def __init__(
        self, tokenizer: Any, script: Script, connection: socket.socket, directory: str, step: int = 1
    ) -> None:
        self._tokenizer, self._script, self._socket, self.step = tokenizer, script, connection, step
        self._eos = frozenset([tokenizer.convert_tokens_to_ids(EOS)])
        self._num_bytes = 0
        self.is_mute = False
        self.prompts: list[str] = []
        self.submitted: list[Submit] = []
        tokenizer.save_pretrained(directory)
        ends = [tokenizer.eos_token_id]
        self._send(Opened(directory))
        self._send(Started(directory, len(tokenizer), 100_000, 4, 100_000, "scripted", eos_token_ids=ends))
        threading.Thread(target=self._read, daemon=True).start()

    def stop(self) -> None:
        """End the HTTP process."""
        with suppress(OSError):
            self._send(Stopped())

    def _send(self, message: Message) -> None:
        self._socket.sendall(pack(message))

    def _report(self, *outputs: Output) -> None:
        self._send(Report([*outputs], self._num_bytes, 0, 0, 0.0, {}))

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as stream:
            while head := stream.read(LENGTH.size):
                body = stream.read(LENGTH.unpack(head)[0])
                self._num_bytes += len(body) and len(head + body)
                self._report()  # A sign of life, too.
                for message in unpack_commands(head + body) if body else ():
                    match message:
                        case Submit():
                            self.submitted.append(message)
                            self.prompts.append(self._tokenizer.decode(message.prompt_token_ids))
                            for request_id in () if self.is_mute else message.request_ids:
                                self._answer(request_id, message)
                        case Close():
                            return

    def _answer(self, request_id: int, submit: Submit) -> None:
        request = Request(submit.prompt_token_ids, submit.params)
        tokens = self._tokenizer.encode(self._script(self.prompts[-1]), add_special_tokens=False) + [*self._eos]
        num_sent = 0
        for token in tokens:
            request.append(token, self._eos)
            if request.finish_reason or len(request.token_ids) - num_sent >= self.step:
                new = tuple(request.token_ids[num_sent:])
                logprobs = tuple(TokenLogprobs(each, -0.5, ((each, -0.5),)) for each in new)
                if submit.params.logprobs is None:
                    logprobs = ()
                self._report(Output(request_id, "", new, logprobs, request.finish_reason))
                num_sent = len(request.token_ids)
            if request.finish_reason:
                return


class RunningScript:
    """A server whose model follows a script."""

    def __init__(self, url: str, model: ScriptedModel) -> None:
        self.url, self.model = url, model


@contextmanager
def serve_script(tokenizer: Any, script: Script, **settings: Any) -> Iterator[RunningScript]:
    """Serve a script; yield once the server is healthy."""
    ours, other_end = socket.socketpair()
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    options = {"name": "scripted", "api_key": KEY, "request_timeout": 60, "max_waiting": 16, "drain_seconds": 1}
    process = start_process(serve_http, (other_end, listener, Settings(**{**options, **settings})))
    other_end.close()
    listener.close()
    with TemporaryDirectory() as directory:
        model = ScriptedModel(tokenizer, script, ours, directory)
        try:
            wait_until_healthy(url, 60, process.is_alive)
            yield RunningScript(url, model)
        finally:
            model.stop()
            process.join(10)
            process.kill()
            process.join()
