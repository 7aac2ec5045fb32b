"""Generate from prompts with the latent cache sharded over the ranks of the job."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dcpmla.bench.results import dtype_name
from dcpmla.cache.formats import format_name
from dcpmla.cli.field_options import add_fields
from dcpmla.cli.options import add_engine_arguments, build_engine, dcp_config, seed, start, token_ids
from dcpmla.cli.output import OutputLines, check_writable, is_same_path, open_output_lines, write_arrays, write_json
from dcpmla.cli.prompts import SAMPLING_OPTIONS, Prompt, prompts_from_file, prompts_from_options
from dcpmla.comm.select import ChosenExchange
from dcpmla.integrations.open_model import ModelFiles, check_layout, open_model
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import LOAD_TIMEOUT
from dcpmla.llm import run_with_bar
from dcpmla.parallel.collectives import broadcast_value
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate`."""
    parser.set_defaults(run=run)
    add_engine_arguments(parser)
    add = parser.add_argument
    # One list for both, so that prompts keep the order in which they were given.
    add("--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    ids = "a prompt as token ids; repeatable"
    add("--prompt-ids", dest="prompts", action="append", type=token_ids, metavar="5,6,7", help=ids)
    prompts = 'a JSON object a line: {"id", "prompt" or "prompt_token_ids", ...}'
    add("--prompt-file", type=Path, metavar="IN.jsonl", help=prompts)
    outputs = "a line for each prompt of --prompt-file; a rerun adds the missing ones"
    add("--output-file", type=Path, metavar="OUT.jsonl", help=outputs)
    changes: dict[str, dict[str, Any]] = {
        "top_k": {"type": int},  # the dataclass checks it
        "seed": {"type": seed},
        "stop": {"action": "append", "default": [], "nargs": None, "type": str},
        "stop_token_ids": {"type": token_ids, "default": [], "nargs": None, "metavar": "5,6,7"},
    }
    add_fields(parser, SamplingParams, "choice of tokens", SAMPLING_OPTIONS, changes=changes)
    add("--json", type=Path, metavar="OUT.json", help="write tokens, texts and measurements")
    add("--logits", type=Path, metavar="OUT.npz", help="write the logits each token was chosen from")


def run(args: argparse.Namespace) -> None:
    """Read the prompts, load the model, generate, write.

    Every rank calls it; the first one reads, writes and reports.
    """
    dcp = dcp_config(args, args.decode_context_parallel_size)
    _check_files(args)
    with start(args) as job, ExitStack() as to_close:
        job.watchdog.enter("reading the prompts", LOAD_TIMEOUT)
        lines: OutputLines | None = None
        prompts: list[Prompt] = []
        with agree():
            files = open_model(args.model, args.max_model_len, args.revision)
            check_layout(files, dcp)
            if job.ranks.is_first:
                check_writable("--json", args.json, files.directory)
                check_writable("--logits", args.logits, files.directory)
                prompts = prompts_from_file(args, files) if args.prompt_file else prompts_from_options(args, files)
                if args.output_file:
                    lines = to_close.enter_context(open_output_lines(args.output_file, files.directory))
                    prompts = _missing(prompts, lines)
        # Only the first rank's host needs the file.
        shared = broadcast_value([asdict(prompt) for prompt in prompts], None, "sharing the prompts")
        prompts = [Prompt.from_dict(values) for values in shared]
        if not prompts:
            return
        seq_lens = [len(prompt.token_ids) + prompt.params.max_new_tokens - 1 for prompt in prompts]
        engine, chosen = build_engine(args, job, dcp, files, seq_lens)
        to_close.callback(engine.close)
        requests = [
            engine.add(
                prompt.token_ids,
                prompt.params,
                request_id=prompt.request_id,
                keep_logits=bool(args.logits) and job.ranks.is_first,
            )
            for prompt in prompts
        ]
        for finished in run_with_bar(engine, "generate", len(requests), job.ranks.is_first):
            if lines is not None:
                lines.append([_output_line(request) for request in finished])
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if job.ranks.is_first:
            _report(args, files, engine, requests, chosen)
        _check_errors(requests)


def _check_errors(requests: Sequence[Request]) -> None:
    """Raise ValueError if a request ended with an error, on every rank alike."""
    if failed := [request for request in requests if request.error is not None]:
        raise ValueError(
            f"{len(failed)} of {len(requests)} prompts failed; {failed[0].request_id!r}: {failed[0].error}"
        )


def _check_files(args: argparse.Namespace) -> None:
    if bool(args.prompt_file) != bool(args.output_file):
        raise ValueError("--prompt-file and --output-file belong together; give both or neither")
    if args.prompt_file and (args.prompts or args.json or args.logits):
        raise ValueError(
            "--prompt-file does not go with --prompt, --prompt-ids, --json or --logits; its results go to --output-file"
        )
    if args.prompt_file and is_same_path(args.prompt_file, args.output_file):
        raise ValueError(f"--prompt-file and --output-file are both {args.prompt_file}; give each its own file")
    if args.json and args.logits and is_same_path(args.json, args.logits):
        raise ValueError(f"--json and --logits are both {args.json}; give each its own file")


def _missing(prompts: list[Prompt], lines: OutputLines) -> list[Prompt]:
    """Return the prompts that have no output yet."""
    if foreign := lines.ids - {prompt.request_id for prompt in prompts}:
        example = min(map(repr, foreign))
        raise ValueError(
            f"--output-file is {lines.path}, which has id {example} that is not in --prompt-file; "
            f"give the files of one job"
        )
    if lines.ids:
        print(f"{lines.path} has {len(lines.ids)} of {len(prompts)} outputs already", flush=True)
    return [prompt for prompt in prompts if prompt.request_id not in lines.ids]


def _output_line(request: Request) -> dict[str, object]:
    return {"id": request.request_id, **_answer(request), **_logprobs(request), **request.metrics()}


def _answer(request: Request) -> dict[str, object]:
    error = {} if request.error is None else {"error": str(request.error)}
    return {"token_ids": request.token_ids, "text": request.text, "finish_reason": request.finish_reason, **error}


def _logprobs(request: Request) -> dict[str, object]:
    """Return [token id, log probability, [[token id, log probability] of the best]] of each token, where asked for."""
    asked = {"logprobs": request.params.logprobs, "prompt_logprobs": request.params.prompt_logprobs}
    return {name: getattr(request, name) for name, num_top in asked.items() if num_top is not None}


def _report(
    args: argparse.Namespace, files: ModelFiles, engine: Engine, requests: Sequence[Request], chosen: ChosenExchange
) -> None:
    """Write the files of --json and --logits; print the measurements, and the answers unless they are in a file."""
    kv_tokens_per_rank, drafter = _kv_tokens_per_rank(engine, requests), engine.speculation.drafter
    if args.json:
        write_json(
            args.json,
            {
                "outputs": [{"prompt_token_ids": each.prompt_token_ids, **_answer(each)} for each in requests],
                "metrics": [request.metrics() for request in requests],
                "kv_tokens_per_rank": kv_tokens_per_rank,
                **({} if files.commit is None else {"model_commit": files.commit}),
                "dcp_comm_backend": chosen.exchange.name,
                "dcp_comm_backend_reason": chosen.reason,
                "tensor_parallel_size": engine.mesh.tp_size,
                "decode_context_parallel_size": engine.mesh.dcp_size,
                "dtype": dtype_name(engine.model.dtype),
                "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
                "decode_query_dtype": args.decode_query_dtype,
                "index_cache_dtype": args.index_cache_dtype,
                "index_hadamard": args.index_hadamard,
                "device": engine.model.device.type,
                **({"synthetic_acceptance_rates": rates} if (rates := drafter.synthetic_rates) else {}),
                **asdict(engine.stats),
            },
        )
    if args.logits:
        write_arrays(
            args.logits, {f"logits_{i}": np.stack([row.numpy() for row in r.logits]) for i, r in enumerate(requests)}
        )
    for index, request in enumerate(requests if args.output_file is None else ()):
        print(f"[{index}] {len(request.prompt_token_ids)} prompt tokens -> {request.text or request.token_ids}")
    stats = engine.stats
    _print_rate("prefill", stats.num_prefill_tokens, stats.prefill_seconds)
    _print_rate("decode", stats.num_decode_tokens, stats.decode_seconds)
    if stats.num_draft_tokens:
        mean = 1 + stats.num_accepted_tokens / sum(request.acceptance.num_steps for request in requests)
        by_numbers = " by random numbers" if drafter.synthetic_rates else ""
        print(
            f"drafts: {stats.num_draft_tokens}, accepted{by_numbers} {stats.num_accepted_tokens} "
            f"({stats.num_accepted_tokens / stats.num_draft_tokens:.0%}); {mean:.2f} tokens a step with drafts"
        )
    print(f"from earlier requests: {stats.num_cached_tokens} tokens; preemptions: {stats.num_preemptions}")
    print(f"KV tokens per rank: {kv_tokens_per_rank}")


def _print_rate(phase: str, num_tokens: int, seconds: float) -> None:
    print(f"{phase}: {num_tokens} tokens, {num_tokens / max(seconds, 1e-9):,.0f} tok/s")


def _kv_tokens_per_rank(engine: Engine, requests: Sequence[Request]) -> list[int]:
    """Count the tokens that each TP rank cached for the requests: all but the last of each request."""
    owners = [engine.dcp.owner(tp_rank % engine.mesh.dcp_size) for tp_rank in range(engine.mesh.tp_size)]
    return [sum(owner.local_seq_lens(request.num_tokens - 1) for request in requests) for owner in owners]
