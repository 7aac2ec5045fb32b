"""Generate from a batch of prompts with the latent cache sharded over the ranks that torchrun started."""

import argparse
import logging
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from dcpmla.attention.metadata import context_workspace_tokens
from dcpmla.cache.latent import LatentCache
from dcpmla.cli.output import check_writable, write_arrays, write_json
from dcpmla.comm.select import Selection, select_exchange
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.integrations.transformers import find_model, load_config, load_model
from dcpmla.parallel.bootstrap import DEVICES, Ranks, agree, distributed, read_launcher
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request

_TIMEOUT = timedelta(minutes=10)  # of one collective: longer than ranks drift apart while they load a checkpoint
_MAX_PROMPTS = 1 << 20  # prompt i of seed s draws from stream s x this + i, whatever stands beside it
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="directory of a safetensors checkpoint, or a hub id")
    # One list for both, so that prompts keep the order in which they were given.
    add("--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    add("--prompt-ids", dest="prompts", action="append", type=_token_ids, metavar="5,6,7", help="a prompt as token ids; repeatable")
    add("--max-new-tokens", type=_positive, default=16, metavar="K")
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that cut the heads; all ranks of the job")
    add("-dcp", "--decode-context-parallel-size", type=int, default=1, metavar="D", help="ranks that share one cache; divides -tp")
    add("--cp-kv-cache-interleave-size", type=int, default=1, metavar="I", help="consecutive tokens on one rank")
    add("--dcp-comm-backend", choices=DCP_COMM_BACKENDS, default="auto")
    add("--block-size", type=int, default=64, metavar="P", help="tokens of a cache block on one rank")
    add("--max-num-batched-tokens", type=_positive, default=8192, metavar="C", help="most tokens of one prefill step")
    add("--max-model-len", type=int, metavar="L", help="longest sequence, prompt and answer; default: the model's")
    add("--dtype", choices=tuple(_DTYPES), default="auto", help="auto: the checkpoint's")
    add("--device", choices=DEVICES, default="auto")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--seed", type=_seed, default=0)
    add("--json", type=Path, metavar="OUT.json", help="write tokens, texts and measurements")
    add("--logits", type=Path, metavar="OUT.npz", help="write the logits each token was chosen from")


def run(args: argparse.Namespace) -> None:
    """Load, generate, write. Every rank calls it; the first one reports."""
    dcp = DCPConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        decode_context_parallel_size=args.decode_context_parallel_size,
        cp_kv_cache_interleave_size=args.cp_kv_cache_interleave_size,
        dcp_comm_backend=args.dcp_comm_backend,
        block_size=args.block_size,
    )
    ranks = read_launcher(args.device)
    if ranks.num_ranks != dcp.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size (-tp) is {dcp.tensor_parallel_size}, but {ranks.num_ranks} ranks were started; "
            f"start torchrun with --nproc-per-node {dcp.tensor_parallel_size}, or set -tp {ranks.num_ranks}"
        )
    _quiet(ranks)
    with distributed(ranks, _TIMEOUT):
        mesh = init_mesh(args.tensor_parallel_size, args.decode_context_parallel_size)
        with agree():
            if ranks.is_first:
                _check_outputs(args)
            directory = find_model(args.model)
            config = load_config(directory)
            MLAConfig.from_hf(config).heads_per_rank(mesh.tp_size)
            tokenizer, reason = _load_tokenizer(directory)
            max_model_len = _max_model_len(args.max_model_len, config.max_position_embeddings)
            if tokenizer is None and any(isinstance(prompt, str) for prompt in args.prompts):
                raise ValueError(f"--prompt needs a tokenizer, and the model's does not load: {reason}; use --prompt-ids")
            requests = _read_requests(args, tokenizer, config.vocab_size, max_model_len)
        dcp = _with_workspace(dcp, max_model_len, len(requests))
        selection = select_exchange(dcp.dcp_comm_backend, mesh.dcp_group)
        with agree():
            model = load_model(directory, config, dcp, mesh, selection, _DTYPES[args.dtype], ranks.device)
            seq_lens = [request.max_seq_len for request in requests]
            plan = LatentCache.plan(model.attention_config, dcp, model.num_attention_layers, seq_lens, model.dtype)
            engine = Engine(model, LatentCache(plan, ranks.device), dcp, mesh, args.max_num_batched_tokens)
        if ranks.is_first:
            print(f"cache: {plan}\nexchange: {selection.exchange.name} ({selection.reason})", flush=True)
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        with tqdm(total=num_prompt_tokens, desc="prefill", unit="tok", disable=not ranks.is_first) as bar:
            try:
                engine.generate(requests, keep_logits=args.logits is not None and ranks.is_first, on_prefill=bar.update)
            except ValueError as error:  # all that a user can get wrong has been checked: this one wants its traceback
                raise RuntimeError("generate failed") from error
        if ranks.is_first:
            _report(args, engine, requests, _texts(requests, tokenizer), selection)


def _read_requests(args: argparse.Namespace, tokenizer: Any, vocab_size: int, max_model_len: int) -> list[Request]:
    """The prompts in the order given, checked against the model."""
    prompts = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in args.prompts]
    if not prompts:
        raise ValueError("no prompt; give at least one --prompt or --prompt-ids")
    requests = []
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"prompt {index} has token id {outside[0]}; the model's vocabulary is [0, {vocab_size})")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with --max-model-len {max_model_len} "
                f"at most {max_model_len - 1} leave room for a new one"
            )
        max_new_tokens = min(args.max_new_tokens, max_model_len - len(prompt))
        requests.append(Request(prompt, max_new_tokens, args.temperature, seed=args.seed * _MAX_PROMPTS + index))
    return requests


def _max_model_len(asked: int | None, max_position_embeddings: int) -> int:
    if asked is not None and not 2 <= asked <= max_position_embeddings:
        raise ValueError(f"--max-model-len is {asked}; it must be in [2, {max_position_embeddings}], where the model's positions end")
    return asked or max_position_embeddings


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [0, 2^32)")
    return int(text)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids separated by commas, as in 5,6,7") from None


def _with_workspace(dcp: DCPConfig, max_model_len: int, max_num_seqs: int) -> DCPConfig:
    return DCPConfig(**{**asdict(dcp), "context_workspace_tokens": context_workspace_tokens(max_model_len, max_num_seqs, dcp)})


def _load_tokenizer(directory: Path) -> tuple[Any, str]:
    """The model's tokenizer; or None, and why it does not load (none there, broken, or one that needs the checkpoint's own code)."""
    try:
        return transformers.AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False), ""
    except Exception as error:  # a broken tokenizer.json raises whatever its reader stumbled over
        return None, f"{type(error).__name__}: {error}"


def _check_outputs(args: argparse.Namespace) -> None:
    check_writable("--json", args.json)
    check_writable("--logits", args.logits)
    if args.json and args.logits and args.json.resolve() == args.logits.resolve():
        raise ValueError(f"--json and --logits are both {args.json}; give each its own file")


def _texts(requests: list[Request], tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return [""] * len(requests)
    return [tokenizer.decode(request.token_ids, skip_special_tokens=True) for request in requests]


def _report(args: argparse.Namespace, engine: Engine, requests: list[Request], texts: list[str], selection: Selection) -> None:
    """Write the files, then print the answers."""
    kv_tokens_per_rank = engine.kv_tokens_per_rank(requests)
    outputs = [
        {"prompt_token_ids": request.prompt_token_ids, "token_ids": request.token_ids, "text": text, "finish_reason": request.finish_reason}
        for request, text in zip(requests, texts, strict=True)
    ]
    if args.json:
        write_json(
            args.json,
            {
                "outputs": outputs,
                "kv_tokens_per_rank": kv_tokens_per_rank,
                "dcp_comm_backend": selection.exchange.name,
                "dcp_comm_backend_reason": selection.reason,
                "tensor_parallel_size": engine.mesh.tp_size,
                "decode_context_parallel_size": engine.mesh.dcp_size,
                "dtype": str(engine.cache.sizes.dtype).removeprefix("torch."),
                "device": engine.model.device.type,
                **asdict(engine.stats),
            },
        )
    if args.logits:
        write_arrays(args.logits, {f"logits_{i}": np.stack([row.numpy() for row in r.logits]) for i, r in enumerate(requests)})
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        print(f"[{index}] {len(request.prompt_token_ids)} prompt tokens -> {text or request.token_ids}")
    stats = engine.stats
    print(f"prefill: {stats.num_prefill_tokens} tokens, {stats.num_prefill_tokens / max(stats.prefill_seconds, 1e-9):,.0f} tok/s")
    print(f"decode: {stats.num_decode_tokens} tokens, {stats.num_decode_tokens / max(stats.decode_seconds, 1e-9):,.0f} tok/s")
    print(f"KV tokens per rank: {kv_tokens_per_rank}")


def _quiet(ranks: Ranks) -> None:
    """One voice: no bars and notes of transformers', and from other ranks nothing but errors."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not ranks.is_first:
        logging.disable(logging.WARNING)
