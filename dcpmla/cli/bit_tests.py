"""Tests of `doctor --determinism`: a model in all layouts of its cache, by the ways of `dcpmla.cli.determinism`."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dcpmla.bench.geometries import config_of
from dcpmla.cli.determinism import (
    ALONE,
    CPU_PROMPT_LENS,
    GRAPH_WAYS,
    MAX_NUM_SEQS,
    PROMPT_LENS,
    WAYS,
    Answer,
    draw_cases,
    serve,
)
from dcpmla.cli.self_tests import SelfTest
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig
from dcpmla.fields import divisors
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import ModelFiles, check_layout, open_model
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import Job
from dcpmla.llm import build_engine
from dcpmla.ownership import NUM_TILE_LANES
from dcpmla.parallel.mesh import init_mesh

_MAX_MODEL_LEN = 1024
# A model with the attention of DeepSeek-V3, and less of everything else.
_SIZES = {
    **{"hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_hidden_layers": 4},
    **{"n_routed_experts": 32, "first_k_dense_replace": 1, "vocab_size": 8192, "num_nextn_predict_layers": 0},
}


def bit_tests(job: Job, model: str | None, dtype: torch.dtype) -> Iterator[SelfTest]:
    """Yield the test of each layout and way: whether all logits are equal to the logits of prompts served one by
    one with DCP 1. Collective over the job.

    Args:
        model: Directory or hub id; None for a small model of random weights in a dtype.
    Raises:
        ValueError: The model does not exist, or does not support the mode.
    """
    expected: list[Answer] = []
    with TemporaryDirectory() as folder:
        with agree():
            files = _open(model or _save_config(Path(folder), job.ranks.device))
        options = EngineOptions(
            dtype="auto" if model else dtype,
            load_format="auto" if model else "dummy",
            max_num_batched_tokens=1000,
            max_num_seqs=MAX_NUM_SEQS,
        )
        for dcp in _layouts(job):
            check_layout(files, dcp)
            seq_lens = [files.max_model_len + dcp.virtual_block_size] * MAX_NUM_SEQS
            loaded, chosen = build_engine(job, dcp, files, options, seq_lens)
            name = f"dcp {dcp.decode_context_parallel_size}, exchange {chosen.exchange.name}"
            with closing(loaded):
                lengths = PROMPT_LENS if job.ranks.device.type == "cuda" else CPU_PROMPT_LENS
                cases = draw_cases(loaded.model.vocab_size, files.max_model_len, lengths)
                has_graphs = loaded.graph is not None
                for way in (ALONE, *WAYS, *(GRAPH_WAYS if has_graphs else ())):
                    answers = serve(loaded, way, cases, expected)
                    expected = expected or answers
                    yield _compare(f"equal bits, {name}, {way.name}", answers, expected)


def _compare(name: str, answers: list[Answer], expected: list[Answer]) -> SelfTest:
    num_equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
    total = sum(len(right.logits) for right in expected)
    words = f"{num_equal} of {total} rows of logits are equal"
    if num_equal == total:
        return SelfTest(name, 0.0, "", words)
    pairs = [(answer.logits, right.logits) for answer, right in zip(answers, expected, strict=True)]
    return SelfTest(name, max(float((first - second).abs().max()) for first, second in pairs), words)


def _layouts(job: Job) -> Iterator[DCPConfig]:
    """Yield the layouts of the mode, with each exchange that is possible here."""
    num_ranks, device = job.ranks.num_ranks, job.ranks.device
    for dcp_size in divisors(NUM_TILE_LANES):
        if num_ranks % dcp_size:
            continue
        group = init_mesh(num_ranks, dcp_size).dcp_group
        for backend in DCP_COMM_BACKENDS[1:] if dcp_size > 1 else DCP_COMM_BACKENDS[:1]:
            dcp = layout({"deterministic": True, "dcp_comm_backend": backend}, num_ranks, dcp_size)
            try:
                select_exchange(dcp, group, device)
            except ValueError:  # `doctor` has printed why
                continue
            yield dcp


def _open(model: str) -> ModelFiles:
    files = open_model(model)
    return replace(files, max_model_len=min(files.max_model_len, _MAX_MODEL_LEN))


def _save_config(folder: Path, device: torch.device) -> str:
    """Save the config of the small model; a tiny one for CPUs."""
    is_gpu = device.type == "cuda"
    sizes = {**(_SIZES if is_gpu else {}), "max_position_embeddings": _MAX_MODEL_LEN, "torch_dtype": "bfloat16"}
    config_of("deepseek-v3" if is_gpu else "tiny", **sizes).save_pretrained(folder)
    return str(folder)
