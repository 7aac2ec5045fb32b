"""Measure what the next turn of a long conversation costs besides the model, part by part, on CPUs: from the body of a
request of /v1/chat/completions to blocks of the cache.

Usage: `python benchmarks/long_turns.py --json OUT.json`

The conversation is an agent's, with this package's sources as results of its tool. All but the last two messages were a
turn before, whose blocks the cache has.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from dcpmla.attention.step.table import pad_table  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, write_results  # noqa: E402
from dcpmla.cache.blocks import BlockAllocator  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402
from dcpmla.runtime.prompts import check_prompt, whole_numbers  # noqa: E402
from dcpmla.runtime.request import Prompt, Request  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402
from dcpmla.runtime.scheduler import Scheduler  # noqa: E402
from dcpmla.serving.background import Background, Prepared  # noqa: E402
from dcpmla.serving.chat_body import ChatBody  # noqa: E402
from dcpmla.serving.chats import Chats  # noqa: E402
from dcpmla.serving.known_prompts import KnownPrompts  # noqa: E402
from dcpmla.serving.messages import Started, Submit, pack, pack_tokens, unpack_commands, unpack_tokens  # noqa: E402
from dcpmla.serving.protocol import parse  # noqa: E402
from dcpmla.serving.worker import Allowance, Worker  # noqa: E402

_ANSWER, _RESULT, _FIRST = 616, 1664, 20_000  # tokens of an answer, of a tool's result and of the first message
_WORDS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
Value = TypeVar("Value")


class Times(defaultdict[str, list[float]]):
    """Milliseconds of each part, of all repeats."""

    def __init__(self) -> None:
        super().__init__(list)

    def of(self, part: str, function: Callable[[], Value]) -> Value:
        """Return what a function returns, and note its time."""
        started = time.perf_counter()
        value = function()
        self[part].append((time.perf_counter() - started) * 1e3)
        return value


class TimedBackground(Background):
    """A background that notes the time of each function."""

    def __init__(self, prepared: Prepared, worker: Worker, times: Times) -> None:
        super().__init__(prepared, worker)
        self._times = times

    async def run(self, size: int, allowance: Allowance, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        value = await super().run(size, allowance, function, *args)
        self._times[function.__name__.removeprefix("_")].append((time.perf_counter() - started) * 1e3)
        return value


def large_tokenizer(chat: Any, texts: Sequence[str], num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on texts, with a chat tokenizer's template and control tokens."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    control = [token.content for _, token in sorted(chat.added_tokens_decoder.items())]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = chat.chat_template
    return tokenizer


def conversation(source: str, num_tokens: int, characters: float) -> list[dict[str, Any]]:
    """Return messages of about so many tokens, of so many characters each."""
    chooser = random.Random(num_tokens)

    def text(length: int) -> str:
        start = chooser.randrange(max(1, len(source) - int(length * characters)))
        return source[start : start + int(length * characters)]

    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(min(_FIRST, num_tokens // 2))}]
    for _ in range(1 + max(0, num_tokens - _FIRST) // (_ANSWER + _RESULT)):
        messages.append({"role": "assistant", "content": text(_ANSWER), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "c", "content": text(_RESULT)})
    return messages


async def in_http_process(tokenizer: Any, messages: Sequence[Any], repeats: int, times: Times) -> Sequence[int]:
    """Time the parts of the HTTP process; return the turn's tokens."""

    def prepare(model: Started) -> Prepared:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        prepared = Prepared(model, tokenizer)
        prepared.template(None).compile()
        return prepared

    longest = 1 << 22
    model = Started("", len(tokenizer), longest, 4, longest, no_grammars="not measured")
    background = TimedBackground(Prepared(model, tokenizer), Worker(prepare), times)
    token_ids: Sequence[int] = ()
    for _ in range(repeats):
        chats = Chats(background.prepared, background=background)  # It knows no pieces.
        before = parse(ChatBody, json.dumps({"messages": messages[: -2 or None]}).encode())
        await chats.prompt(before.conversation())
        first = {name: each.pop() for name, each in times.items() if name in ("render", "encode_each")}
        times["encode_first"].append(first.get("encode_each", 0.0))
        content = json.dumps({"messages": messages}).encode()
        body = times.of("parse", lambda content=content: parse(ChatBody, content))
        asked = times.of("conversation", body.conversation)
        started = time.perf_counter()
        prompt = await chats.prompt(asked)
        times["prompt"].append((time.perf_counter() - started) * 1e3)
        token_ids = prompt.token_ids
    return token_ids


def on_rank(token_ids: Sequence[int], vocab_size: int, block_tokens: int, repeats: int, times: Times) -> None:
    """Time the parts of a rank: from a packed prompt to its table of blocks."""
    params, length = SamplingParams(max_new_tokens=200), len(token_ids)
    for _ in range(repeats):
        packed = times.of("pack", lambda: pack(Submit([0], [0], pack_tokens(token_ids), params)))
        (command,) = times.of("unpack", lambda packed=packed: [*unpack_commands(packed)])
        assert isinstance(command, Submit)
        tokens = times.of("tokens", lambda command=command: whole_numbers(unpack_tokens(command.prompt)))
        times.of("check", lambda tokens=tokens: check_prompt("prompt", tokens, vocab_size, length + 2))
        known = KnownPrompts(block_tokens)
        allocator = BlockAllocator(2 * length // block_tokens + 2, block_tokens)
        scheduler = Scheduler(allocator, 8192, 4)
        before = Prompt(tokens[: max(1, length - _ANSWER - _RESULT)], "", [])
        known.add(before)
        earlier = Request(before.token_ids, params, prompt_keys=before.block_keys)
        times.of("hash_first", lambda scheduler=scheduler, earlier=earlier: scheduler.reuse.add(earlier))
        blocks = allocator.allocate(len(before.block_keys))
        for block, key in zip(blocks, before.block_keys, strict=True):
            allocator.remember(block, key)
        allocator.free(blocks)
        prompt = Prompt(tokens, "", [])
        times.of("find_known", lambda known=known, prompt=prompt: known.add(prompt))
        request = Request(prompt.token_ids, params, prompt_keys=prompt.block_keys)
        times.of("hash", lambda scheduler=scheduler, request=request: scheduler.reuse.add(request))
        scheduler.waiting.append(request)
        times.of("schedule", lambda scheduler=scheduler: scheduler.schedule(0.0))
        tables = [request.block_ids], [request.num_tokens], block_tokens
        times.of("block_table", lambda tables=tables: pad_table(*tables))
        times.of("free", lambda scheduler=scheduler, request=request: scheduler.remove(request))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--context", type=positive_list, default=[65_536, 262_144, 1_048_576], metavar="N,N", help="tokens of the turn")
    add("--block-tokens", type=positive, default=512, metavar="N", help="tokens of a block, over all DCP ranks")
    add("--vocabulary", type=positive, default=65_536, metavar="N", help="tokens that the large tokenizer may have")
    add("--repeats", type=positive, default=5, metavar="N", help="repeats, of which the fastest counts")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add_commit_argument(parser)
    args = parser.parse_args()
    chat = AutoTokenizer.from_pretrained(ROOT / "examples" / "chat" / "model")
    texts = [path.read_text() for path in sorted(ROOT.glob("dcpmla/**/*.py"))]
    tokenizers = {"chat": chat, "large": large_tokenizer(chat, texts, args.vocabulary)}
    rows: list[Row] = []
    for name, tokenizer in tokenizers.items():
        sample = texts[0] + texts[-1]
        characters = len(sample) / len(tokenizer(sample)["input_ids"])
        for context in args.context:
            times, messages = Times(), conversation("".join(texts), context, characters)
            tokens = asyncio.run(in_http_process(tokenizer, messages, args.repeats, times))
            on_rank(tokens, len(tokenizer), args.block_tokens, args.repeats, times)
            fields = {"model": name, "tokens": len(tokens), "block_size": args.block_tokens}
            rows += [{**fields, "part": part, "fastest_us": 1e3 * min(each)} for part, each in times.items()]
            print(f"{name}, {len(tokens):,} tokens, {len(messages)} messages:")
            print("".join(f"  {part:14}{min(each):10.2f} ms\n" for part, each in times.items()), flush=True)
    if args.json is not None:
        write_results(args.json, rows, 1, torch.device("cpu"), args.commit)


if __name__ == "__main__":
    main()
