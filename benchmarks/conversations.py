"""Serve conversations whose contexts are together several times as large as the GPUs' cache, without and with host
memory for cached blocks.

Usage: `torchrun --nproc-per-node 2 benchmarks/conversations.py -tp 2 -dcp 2 --kv-offloading-size 64 --json OUT.json`

The model has published layer sizes, few layers and random weights. Turns arrive as a Poisson process, each at a random
conversation. A turn waits until the answer before it is complete; its time to the first token starts there, or at its
arrival if that is later. The load is the same in both engines.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.load import rates, request_rate, summarize_all  # noqa: E402
from benchmarks.offloading import (  # noqa: E402
    add_engine_arguments,
    block_sizes,
    engine_fields,
    model_config,
    new_llm,
    print_row,
    random_prompts,
    write_rows,
)
from dcpmla.bench.results import Row  # noqa: E402
from dcpmla.cli.options import positive  # noqa: E402
from dcpmla.llm import LLM  # noqa: E402
from dcpmla.runtime.request import Request  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402


@dataclass
class Conversation:
    """A conversation on its way.

    Attributes:
        due: Arrival times of its turns, ascending, seconds after the load's beginning.
        new: New tokens of each turn's prompt.
        turns: Requests of the turns so far.
        starts: Times from which the turns' first tokens are awaited.
    """

    due: list[float]
    new: list[list[int]]
    turns: list[Request] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


def make_conversations(args: argparse.Namespace, vocab_size: int) -> list[Conversation]:
    """Return the load of the options, the same on all ranks."""
    random = np.random.default_rng(args.seed)
    num_turns = args.num_conversations * args.num_turns
    times = random.exponential(1 / args.request_rate, num_turns).cumsum()
    owners = random.permutation(np.repeat(np.arange(args.num_conversations), args.num_turns))
    first = random_prompts(args.num_conversations, args.input_len, vocab_size, args.seed, 0)
    later = random_prompts(num_turns, args.turn_len, vocab_size, args.seed, 1)
    return [
        Conversation(times[owners == index].tolist(), [first[index], *later[index :: args.num_conversations][1:]])
        for index in range(args.num_conversations)
    ]


def serve(llm: LLM, conversations: Sequence[Conversation], output_len: int) -> None:
    """Serve conversations to their ends. All ranks add the same turns in the same order."""
    engine, owners = llm.engine, dict[Request, Conversation]()
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)

    def add(conversation: Conversation) -> None:
        number, prompt = len(conversation.turns), list(conversation.new[len(conversation.turns)])
        if number:
            previous = conversation.turns[-1]
            prompt = [*previous.prompt_token_ids, *previous.token_ids, *prompt]
        request = engine.add(prompt, params, arrival_time=conversation.due[number])
        conversation.turns.append(request)
        owners[request] = conversation

    for conversation in conversations:
        add(conversation)
    engine.restart_clock()
    for conversation in conversations:
        conversation.starts.append(conversation.due[0])
    while engine.has_requests:
        for request in engine.step().finished:
            conversation = owners.pop(request)
            if len(conversation.turns) < len(conversation.due):
                assert request.finish_time is not None
                conversation.starts.append(max(conversation.due[len(conversation.turns)], request.finish_time))
                add(conversation)


def load_row(conversations: Sequence[Conversation]) -> Row:
    """Return the results of conversations that were served, times by this rank's clock."""
    turns = [pair for each in conversations for pair in zip(each.turns, each.starts, strict=True)]
    requests = [request for request, _ in turns]
    num_input, num_output = (
        sum(map(len, tokens))
        for tokens in zip(*((each.prompt_token_ids, each.token_ids) for each in requests), strict=True)
    )
    seconds = max(request.finish_time or 0.0 for request in requests)
    latencies = [
        {
            "time_to_first_token": (request.first_token_time or 0.0) - start,
            "time_per_token": request.metrics()["time_per_token"] if len(request.token_ids) > 1 else None,
        }
        for request, start in turns
    ]
    return {
        "num_prompt_tokens": num_input,
        "num_cached_tokens": sum(request.num_cached_tokens for request in requests),
        "num_preemptions": sum(request.num_preemptions for request in requests),
        **rates(len(requests), num_input, num_output, seconds),
        **summarize_all(latencies),
    }


def measure(args: argparse.Namespace, llm: LLM, has_tiers: bool) -> Row:
    """Return the row of a load in an engine, after a warm-up with other conversations."""
    engine, vocab_size = llm.engine, llm.engine.model.vocab_size
    warm_up = {"num_conversations": 2, "num_turns": 2, "seed": args.seed + 1, "request_rate": 1e6}
    serve(llm, make_conversations(argparse.Namespace(**{**vars(args), **warm_up}), vocab_size), args.output_len)
    engine.reset()
    conversations = make_conversations(args, vocab_size)
    serve(llm, conversations, args.output_len)
    names = ("num_conversations", "num_turns", "turn_len", "input_len", "output_len", "request_rate", "seed")
    load = {name: getattr(args, name) for name in names}
    return {**engine_fields(args, llm, has_tiers), **load, **load_row(conversations)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--num-conversations", type=positive, default=24, metavar="N", help="conversations of the load")
    add("--num-turns", type=positive, default=4, metavar="N", help="turns of each conversation")
    add("--request-rate", type=request_rate, default=8.0, metavar="R", help="turns a second, Poisson")
    add("--input-len", type=positive, default=32768, metavar="N", help="tokens of a first prompt")
    add("--turn-len", type=positive, default=256, metavar="N", help="new tokens of each further prompt")
    add("--output-len", type=positive, default=128, metavar="N", help="tokens of an answer")
    excess = "contexts of all conversations over what the GPUs' cache holds"
    add("--excess", type=float, default=3.0, metavar="X", help=excess)
    add("--seed", type=int, default=0, help="of arrivals and tokens")
    args = parser.parse_args()
    longest = args.input_len + (args.num_turns - 1) * args.turn_len + args.num_turns * args.output_len
    config = model_config(args, longest)
    block = block_sizes(args, config)
    blocks_of_one = -(-longest // block.block_tokens)
    # The scheduler keeps a block for each running request, besides the blocks of the longest.
    num_blocks = max(int(args.num_conversations * blocks_of_one / args.excess), blocks_of_one + args.max_num_seqs)
    rows = list[Row]()
    for has_tiers in (False, True)[: 1 if args.kv_offloading_size is None else 2]:
        with new_llm(args, config, num_blocks * block.bytes_per_block, has_tiers) as llm:
            rows.append(measure(args, llm, has_tiers))
            names = "output_tokens_per_second", "time_to_first_token_mean", "time_to_first_token_p99"
            print_row(llm, rows[-1], "kv_offloading_size", *names, "num_cached_tokens", "num_prompt_tokens", "seconds")
            write_rows(args, llm, rows)  # a run that is cut off keeps the row before
        del llm
        gc.collect()  # a model refers to itself; the next one needs its memory
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
