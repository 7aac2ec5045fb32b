"""A load driven over HTTP against any server with OpenAI's API: streams of completions, and when their tokens came."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load import Load
from dcpmla.bench.results import Row

_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0
_NUM_REASONS = 3  # in a message about lost requests


@dataclass
class Answer:
    """One request's answer; times are seconds after the load's beginning.

    Attributes:
        first_token_time: Time of the first token, or None.
        token_times: Times of tokens whose ids or number the server shows while they come (`return_token_ids`,
            `continuous_usage_stats`).
        num_tokens, num_prompt_tokens: New tokens and those of the prompt, as the server counts them.
        token_ids, text: New tokens, if the server shows their ids, and the text of a chat's answer.
        error: Reason why it is lost; "" for a whole answer.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str = ""
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


def drive(url: str, load: Load, api_key: str | None, fields: Mapping[str, Any] | None = None) -> list[Answer]:
    """Send each request of a load at its time, greedy and of exact length, and read its stream to the end.

    Args:
        fields: Further fields of the requests' bodies.
    """
    return asyncio.run(_drive(url, load, api_key, fields or {}))


def describe_lost(answers: Sequence[Answer]) -> str:
    """Return how many answers are lost and the most frequent reasons, in one line; empty if none is lost."""
    reasons = Counter(" ".join(answer.error.split()) for answer in answers if answer.error)
    common = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_NUM_REASONS))
    return f"{reasons.total()} of {len(answers)} are lost: {common}" if reasons else ""


async def _drive(url: str, load: Load, api_key: str | None, fields: Mapping[str, Any]) -> list[Answer]:
    started = time.perf_counter()
    numbered = zip(load.arrival_times, load.prompts, load.output_lens, strict=True)
    tasks = [asyncio.create_task(_ask(url, api_key, fields, started, *request)) for request in numbered]
    return list(await asyncio.gather(*tasks))


async def _ask(
    url: str,
    api_key: str | None,
    fields: Mapping[str, Any],
    started: float,
    arrival_time: float,
    prompt: list[int],
    num_tokens: int,
) -> Answer:
    """Wait for a request's time, send it and return its answer."""
    await asyncio.sleep(arrival_time - (time.perf_counter() - started))
    answer = Answer(arrival_time)
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "stream_options": {"include_usage": True}, **fields}).encode()
    await read_answer(answer, f"{url}/v1/completions", api_key, content, started)
    if not answer.error and answer.num_tokens != num_tokens:
        answer.error = f"{answer.num_tokens} of {num_tokens} tokens"
    return answer


async def read_answer(answer: Answer, url: str, api_key: str | None, content: bytes, started: float) -> None:
    """Send a body whose answer is streamed, and read the answer to its end.

    Args:
        url: Address of the route.
        started: Clock's reading (`time.perf_counter`) at the load's beginning.
    """
    try:
        async for line in _lines(url, api_key, content):
            now = time.perf_counter() - started  # A first event may have a long prompt, which is parsed afterwards.
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]), now)
    except (OSError, ValueError, EOFError) as error:
        answer.error = str(error) or type(error).__name__
    answer.finish_time = time.perf_counter() - started


def _take(answer: Answer, event: Row, now: float) -> None:
    """Take an event of a stream."""
    if error := event.get("error"):
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
    usage = event.get("usage") or {}
    for choice in event.get("choices") or ():
        delta = choice.get("delta")  # A chat's first one may have its role alone.
        has_token = delta is None or any(value for name, value in delta.items() if name != "role")
        if answer.first_token_time is None and (has_token or usage.get("completion_tokens")):
            answer.first_token_time = now
        answer.token_ids += choice.get("token_ids") or ()
        answer.text += (delta or {}).get("content") or ""
        num_tokens = usage.get("completion_tokens", len(answer.token_ids))
        answer.token_times += [now] * (num_tokens - len(answer.token_times))
    if usage:
        answer.num_tokens, answer.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


async def _lines(url: str, api_key: str | None, content: bytes) -> AsyncIterator[bytes]:
    """Yield the lines of the answer to a body, read with the standard library alone.

    Raises:
        ValueError: A status that is not 200, with the body.
        EOFError: The connection ends early.
    """
    address = urlsplit(url)
    opening = asyncio.open_connection(address.hostname, address.port or 80)
    reader, writer = await asyncio.wait_for(opening, _CONNECT_SECONDS)
    try:
        head = [f"POST {address.path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        head += [] if api_key is None else [f"Authorization: Bearer {api_key}"]
        writer.writelines(["\r\n".join([*head, "", ""]).encode(), content])
        status, is_chunked, line_start = int((await reader.readuntil(b"\r\n")).split()[1]), False, b""
        while header := (await reader.readuntil(b"\r\n")).strip().lower():
            is_chunked |= header.startswith(b"transfer-encoding:") and b"chunked" in header
        async for part in _parts(reader, is_chunked):
            *lines, line_start = (line_start + part).split(b"\n")
            for line in lines if status == 200 else ():
                yield line
        if status != 200:
            raise ValueError(f"status {status}: {line_start.decode(errors='replace')[:200]}")
    finally:
        writer.close()


async def _parts(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """Yield the parts of a body, which ends with its last chunk, or with the connection."""
    while is_chunked and (size := int(await reader.readuntil(b"\r\n"), 16)):
        yield (await reader.readexactly(size + 2))[:-2]
    while not is_chunked and (part := await reader.read(_READ_BYTES)):
        yield part
