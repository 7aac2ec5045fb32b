"""Measure the cost of grammars: the time between tokens of streams without grammars, with a JSON schema on half of the
streams, and with one on all.

Usage: `python benchmarks/structured.py --json OUT.json`

The model has the sizes of DeepSeek-V2-Lite and random weights. The tokenizer is one of byte-level BPE with random words
and as many tokens as the model; the time of a mask grows with both. All streams begin together, and the loads take
turns, so that a slow moment of the machine delays each load.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.load import summarize  # noqa: E402
from benchmarks.offloading import print_row, random_prompts, write_config, write_rows  # noqa: E402
from dcpmla.bench.geometries import GEOMETRIES, config_of  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, dtype_name  # noqa: E402
from dcpmla.cli.options import positive  # noqa: E402
from dcpmla.llm import LLM  # noqa: E402
from dcpmla.runtime.grammar import Grammar  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402

# An answer that is longer than any that is measured.
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "kind": {"enum": ["person", "place", "event"]},
            "year": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["name", "kind", "year", "tags", "note"],
        "additionalProperties": False,
    },
}
LOADS = {"none": 0.0, "half": 0.5, "all": 1.0}  # share of streams with the schema


def random_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of random words, each joined from two tokens before it."""
    chooser, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = list("etaoinshrdlucmfwypvbgkjqxz") + ["Ġ"]
    tokens, merges = dict.fromkeys(alphabet), list[tuple[str, str]]()
    words = letters * 20
    while len(tokens) < num_tokens - 1:
        pair = chooser.choice(words), chooser.choice(words)
        word = "".join(pair)
        if word not in tokens and len(word) <= 12 and "Ġ" not in word[1:]:
            tokens[word] = None
            merges.append(pair)
            words.append(word)
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def new_llm(args: argparse.Namespace) -> LLM:
    """Return an engine over random weights, with a tokenizer."""
    config = config_of(args.geometry, max_position_embeddings=args.input_len + args.output_len + 64, dtype="bfloat16")
    config.vocab_size = max(config.vocab_size, 1024)  # the tiny model's has fewer tokens than there are bytes
    config.eos_token_id = config.vocab_size - 1
    directory = write_config(config)
    if not (directory / "tokenizer.json").exists():
        random_tokenizer(config.vocab_size).save_pretrained(directory)
    return LLM(
        directory,
        device=args.device,
        load_format="dummy",
        max_num_seqs=args.num_requests,
        enable_prefix_caching=False,
        enforce_eager=args.enforce_eager,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )


def serve(args: argparse.Namespace, llm: LLM, share: float, seed: int) -> tuple[list[float], float]:
    """Serve streams that begin together.

    Args:
        share: Share of streams with the schema.
    Returns:
        Seconds between the tokens that all streams have, and seconds to their first tokens.
    Raises:
        RuntimeError: A stream has ended early.
    """
    engine, grammar = llm.engine, Grammar("json_schema", json.dumps(SCHEMA))
    prompts = random_prompts(args.num_requests, args.input_len, engine.model.vocab_size - 1, seed)
    num_held = round(share * args.num_requests)
    started = time.perf_counter()
    requests = [
        engine.add(
            prompt,
            SamplingParams(
                max_new_tokens=args.output_len,
                temperature=1.0,
                seed=seed + number,
                ignore_eos=number >= num_held,
                grammar=grammar if number < num_held else None,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    times = list[float]()
    while engine.has_requests:
        if len(engine.step().changed) == args.num_requests:
            times.append(time.perf_counter())
    wrong = next((request for request in requests if len(request.token_ids) < args.output_len), None)
    if wrong is not None:
        raise RuntimeError(f"a stream ended after {len(wrong.token_ids)} tokens: {wrong.finish_reason} {wrong.error}")
    return [after - before for before, after in zip(times, times[1:], strict=False)], times[0] - started


def measure(args: argparse.Namespace, llm: LLM) -> Iterator[Row]:
    """Yield a row for each load."""
    for share in (0.0, 1.0):
        serve(args, llm, share, 0)  # kernels are compiled, and the vocabulary is read
    gaps: dict[str, list[float]] = {name: [] for name in LOADS}
    firsts: dict[str, list[float]] = {name: [] for name in LOADS}
    for number in range(args.repeats):
        for name, share in LOADS.items():
            measured, first = serve(args, llm, share, 1 + number)
            gaps[name] += measured
            firsts[name].append(first)
    plain = statistics.fmean(gaps["none"])
    for name in LOADS:
        yield {
            "load": f"schema on {name}",
            **{f"time_per_token_{statistic}": seconds for statistic, seconds in summarize(gaps[name]).items()},
            "time_per_token_over_none": statistics.fmean(gaps[name]) / plain,
            "time_to_first_token_mean": statistics.fmean(firsts[name]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="v2-lite", help="published sizes; tiny: for CPUs")
    add("--num-requests", type=positive, default=32, metavar="N", help="streams")
    add("--input-len", type=positive, default=256, metavar="N", help="tokens of a prompt")
    add("--output-len", type=positive, default=256, metavar="N", help="new tokens of a stream")
    add("--repeats", type=positive, default=3, metavar="N", help="rounds of all loads")
    add("--kv-cache-memory-bytes", type=positive, default=1 << 30, metavar="BYTES", help="size of the cache")
    add("--enforce-eager", action="store_true", help="run without CUDA graphs")
    add("--device", default="auto", help="cuda, cpu, or auto")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add_commit_argument(parser)
    args = parser.parse_args()
    args.tensor_parallel_size = 1
    with new_llm(args) as llm:
        fields = {
            "geometry": args.geometry,
            "dtype": dtype_name(llm.engine.model.dtype),
            "enforce_eager": args.enforce_eager,
            **{name: getattr(args, name) for name in ("num_requests", "input_len", "output_len")},
        }
        rows = list[Row]()
        for row in measure(args, llm):
            rows.append({**fields, **row})
            print_row(llm, row, *row)
        write_rows(args, llm, rows)


if __name__ == "__main__":
    main()
