"""Decode graphs over caches of 8 bits, and graphs that are captured before the scales of a cache are known.

There is no GPU here: a step is recorded operator by operator and replayed over the same memory, as a CUDA graph would.
So what Python decided when it was captured stays decided, and what it read from memory is read again.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla import DCPConfig, MLAAttention, init_mesh
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transformers import load_model
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_quantized_models import save_badly_scaled
from tests.support.engines import new_engine
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.recording import capture

MAX_NUM_SEQS, MAX_MODEL_LEN = 5, 64  # so that three requests are padded to four
PROMPT_LENS = (1, 3, 40)  # the first is a step of one token, which could be taken for a decode
CASES = {
    "fp8 queries, calculated": (
        "deepseek_v3",
        {"kv_cache_dtype": "fp8", "decode_query_dtype": "fp8", "calculate_kv_scales": True},
    ),
    "fp8_ds_mla": ("deepseek_v3", {"kv_cache_dtype": "fp8_ds_mla"}),
    "both, calculated": (
        "glm_moe_dsa",
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "index_cache_dtype": "fp8"},
    ),
    "entries": ("deepseek_v4", {"index_cache_dtype": "fp8"}),
    "shared entries": ("deepseek_v41", {"index_cache_dtype": "fp8"}),
}


def serve(model: ShardedModel, dcp: DCPConfig, how: str) -> list[tuple[list[int], Tensor]]:
    """Each prompt's tokens and logits, first alone, then beside the others."""
    plan = model.attention.plan_cache(dcp, [MAX_MODEL_LEN] * MAX_NUM_SEQS, model.dtype, 2 * MAX_NUM_SEQS)
    cache, mesh = plan.allocate(model.device), init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    for memory in cache.tensors:
        memory.view(torch.uint8).fill_(0xFF)  # NaN, in any format: a row that nobody wrote must not be seen
    token = torch.zeros((), dtype=torch.int64, device=model.device)
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
    graph = StepGraph.decodes(model.decode, token, cache, steps, mesh, MAX_NUM_SEQS, MAX_MODEL_LEN)
    mixed = StepGraph.prompts(model, cache, steps, mesh, 16, MAX_NUM_SEQS, MAX_MODEL_LEN, tokens_per_request=1)
    if how == "captured":
        for each in (graph, mixed):
            each.capture() if model.device.type == "cuda" else capture(each)
    graphs = {} if how == "no graph" else {"graph": graph, "mixed_graph": mixed}
    engine = new_engine(model, cache, dcp, mesh, MAX_MODEL_LEN, 16, MAX_NUM_SEQS, **graphs)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    requests, scales = [], []
    for num_new, at_once in ((2, prompts[:1]), (6, prompts)):
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        requests += [engine.add(prompt, params, keep_logits=True) for prompt in at_once]
        list(engine.run())
        scales.append(scales_of(model))
    engine.close()
    assert scales[0] == scales[1]  # by the first prompt, and for good
    return [(request.token_ids, torch.stack(request.logits)) for request in requests]


def scales_of(model: ShardedModel) -> list[float]:
    layers = [module for module in model.hidden_states.modules() if isinstance(module, MLAAttention)]
    return [float(scale) for layer in layers for scale in (layer.kv_scale, layer.q_scale) if scale is not None]


def compare(directory: Path, dcp: DCPConfig, device_type: str = "cpu") -> None:
    """On one rank: replays against the padded steps that they were captured from, bit for bit, and these against bare
    ones, whose matrix products round otherwise: seldom a value has another code of 8 bits.
    """
    outcomes, scales = [], []
    for how in ("no graph", "padded", "captured"):
        device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")
        mesh, config = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), load_config(directory)
        selection = select_exchange(dcp, mesh.dcp_group, device)
        model = load_model(directory, config, dcp, mesh, selection, torch.float32, device)
        outcomes.append(serve(model, dcp, how))
        scales.append(scales_of(model))
    assert scales[0] == scales[1] == scales[2]
    assert all(scale != 1 for scale in scales[0])
    for (bare_tokens, bare), (tokens, padded), (replayed_tokens, replayed) in zip(*outcomes, strict=True):
        assert bool(bare.isfinite().all())
        assert float((padded - bare).norm() / bare.norm()) < 5e-3
        assert torch.equal(replayed, padded)
        assert replayed_tokens == tokens == bare_tokens


@pytest.mark.parametrize("case", CASES)
def test_replays_over_caches_of_8_bits(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    if family == "deepseek_v3":
        save_badly_scaled(tmp_path)  # with a scale of 1 most of its latents would be cut off
    else:
        save_tiny(family, tmp_path)
    run_ranks(1, compare, tmp_path, DCPConfig(block_size=4, **options))
