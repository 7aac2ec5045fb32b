"""Drafts on GPUs: wide decode graphs, drafters with graphs of their own, the tokens of decoding without either."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.open_model import open_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.speculation import Speculation
from tests.integrations.test_mtp import plain_module
from tests.support.gpus import on_gpus
from tests.support.models import VOCAB_SIZE
from tests.support.plain_eagle3 import PlainEagle3
from tests.support.ranks import run_ranks
from tests.support.recorded import RecordedDrafter

METHODS = (("none", False), ("recorded", False), ("recorded", True), ("ngram", False), ("mtp", False))
HEADS = {"eagle3": "head", "dense eagle3": "dense"}  # directories of EAGLE3 heads by name
WITH_HEAD = (*METHODS, *((name, False) for name in HEADS))


def serve(
    directory: Path, dcp: DCPConfig, dtype: str, methods: tuple[tuple[str, bool], ...]
) -> list[tuple[str, list[list[int]], int, bool]]:
    """Each method's tokens, how many drafts it tried, and whether its graphs were captured; "recorded": drafts that
    are mostly right.
    """
    device, rng = torch.device("cuda", dist.get_rank()), random.Random(0)
    prompts = [[rng.randrange(1, 9) for _ in range(rng.randrange(1, 30))] for _ in range(5)]
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    results: list[tuple[str, list[list[int]], int, bool]] = []
    for method, enforce_eager in methods:
        options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 5, "kv_cache_memory_bytes": 1 << 27}
        options |= {"enforce_eager": enforce_eager, "max_num_batched_tokens": 64, "num_speculative_tokens": 3}
        options |= {"speculative_method": "ngram" if method == "recorded" else method}
        if method in HEADS:
            head = directory.with_name(HEADS[method])
            options |= {"speculative_method": "eagle3", "speculative_model": str(head)}
        chosen = select_exchange(dcp, mesh.dcp_group, device)
        engine = load_engine(
            open_model(str(directory)), dcp, mesh, chosen, device, EngineOptions(**options), seq_lens=[80] * 5
        )
        if method == "recorded":
            drafter = RecordedDrafter(3, dict(enumerate(results[0][1])), 0.8, VOCAB_SIZE)
            engine.speculation = Speculation(drafter)
        elif method in ("mtp", *HEADS):
            engine.speculation.drafter.drafts_always = True
        requests = [
            engine.add(
                prompt, SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=temperature), request_id=index
            )
            for index, (prompt, temperature) in enumerate(zip(prompts, (0, 0, 0, 1, 1), strict=True))
        ]
        list(engine.run())
        is_captured = engine.graph is not None and engine.graph.is_captured
        tokens = [request.token_ids for request in requests]
        results.append((method, tokens, engine.stats.num_draft_tokens, is_captured))
        engine.close()
    return results


@on_gpus(1, 2)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "longcat_flash", "deepseek_v4"])
def test_drafts_change_no_token(num_gpus: int, family: str, tmp_path: Path) -> None:
    module, methods = plain_module(family), METHODS
    directory = module.save(tmp_path / family)
    if family != "deepseek_v4":
        for name in HEADS.values():
            fields: dict[str, Any] = {"is_dense": name == "dense", "eagle_aux_hidden_state_layer_ids": [2, 1]}
            PlainEagle3(module.base, (2, 1), **fields).save(tmp_path / name)
        methods = WITH_HEAD
    dcp = DCPConfig(tensor_parallel_size=num_gpus, decode_context_parallel_size=num_gpus, block_size=16)
    for results in run_ranks(num_gpus, serve, directory, dcp, "float32", methods, device="cuda"):
        assert [is_captured for *_, is_captured in results] == [not enforce_eager for _, enforce_eager in methods]
        for method, tokens, num_drafts, _ in results[1:]:
            assert tokens == results[0][1], method
            assert num_drafts > 0 or method == "ngram"
