"""Conversations that return after their blocks have left the cache: transformers' tokens, from host memory."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.runtime import offload
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

NUM_NEW = 3
NUM_TURNS = 3
CACHED, KEPT = 200, 2000  # tokens of the cache and of host memory


def offloading_engine(directory: Path, dcp: DCPConfig, device_type: str) -> Engine:
    """Return one rank's engine whose cache and host memory hold so many tokens."""
    kind = attention_of(load_config(directory))
    plan = kind.plan_cache(dcp, [CACHED], torch.float32, num_states=12)
    num_host_bytes = -(-KEPT // plan.block_tokens) * 3 * 2**17 * dcp.tensor_parallel_size  # blocks with padding
    options = EngineOptions(
        kv_cache_memory_bytes=plan.bytes_per_rank,
        kv_offloading_size=num_host_bytes / 2**30,
        max_num_seqs=4,
        max_num_batched_tokens=8,  # many steps, so that loads pay on all machines
        dtype="float32",
    )
    offload._STORED_TOGETHER = 2
    return load_engine_on_rank(directory, dcp, options, 160, device_type)


def converse(
    directory: Path, dcp: DCPConfig, device_type: str = "cpu"
) -> tuple[list[tuple[list[int], list[int]]], int, int]:
    """On one rank: return prompts and answers of conversations in turns, loaded blocks, and tokens from any cache."""
    engine, rng = offloading_engine(directory, dcp, device_type), Random(0)
    conversations: list[list[int]] = [[] for _ in range(5)]
    answers, num_cached = [], 0
    for _ in range(NUM_TURNS):
        requests = []
        for conversation in conversations:
            conversation += [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randint(25, 40))]
            requests.append(engine.add(list(conversation), SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)))
        list(engine.run())
        for conversation, request in zip(conversations, requests, strict=True):
            answers.append((request.prompt_token_ids, request.token_ids))
            conversation += request.token_ids
            num_cached += request.num_cached_tokens
    assert engine.offload is not None
    engine.offload.count()
    assert engine.allocator.num_free == engine.allocator.num_blocks
    num_loaded = engine.offload.loaded.blocks
    engine.close()
    return answers, num_loaded, num_cached


def test_conversations_return(tmp_path: Path) -> None:
    """On two DCP groups; test_combinations.py has all families on one and two ranks."""
    reference = save_tiny("deepseek_v3", tmp_path)
    layout = dcp_config(4, 2, 1, block_size=4)
    check(reference, run_ranks(4, converse, tmp_path, layout, timeout=300))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize(
    ("tp", "dcp"), [pytest.param(1, 1, marks=pytest.mark.gpu), pytest.param(2, 2, marks=pytest.mark.gpu_2)]
)
def test_conversations_return_on_gpus(family: str, tp: int, dcp: int, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path)
    layout = dcp_config(tp, dcp, block_size=16)
    check(reference, run_ranks(tp, converse, tmp_path, layout, "cuda", device="cuda", timeout=500))


def check(reference: Any, results: list[tuple[list[tuple[list[int], list[int]]], int, int]]) -> None:
    """Assert that all ranks have transformers' answers, and that blocks were loaded."""
    oracle = Oracle(reference)
    for answers, num_loaded, num_cached in results:
        assert num_loaded > 10
        assert num_cached > 200
        for prompt, tokens in answers:
            oracle.check_tokens(prompt, tokens)
