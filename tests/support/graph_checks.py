"""Checks of decode graphs on any device, run on every rank of a job: captured on GPUs, padded
alone on CPUs.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests, StepTraits
from dcpmla.cache.formats import is_quantized, to_cache_rows
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.parallel.mesh import DCPMesh, init_mesh
from dcpmla.runtime.graph import Step, StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.support.direct_checks import assert_same_bits
from tests.support.models import VOCAB_SIZE
from tests.support.whole_models import device_of, load_engine_on_rank, load_on_rank

MAX_NUM_SEQS, MAX_MODEL_LEN = 5, 60
BATCHES = (5, 1, 3, 2, 4, 5)


def open_model_on(
    directory: Path, dcp: DCPConfig, enable_expert_parallel: bool, device_type: str, dtype: torch.dtype = torch.float32
) -> tuple[ShardedModel, DCPMesh]:
    return load_on_rank(directory, dcp, device_type, dtype, enable_expert_parallel)


def check_model(
    directory: Path, dcp: DCPConfig, enable_expert_parallel: bool, device_type: str, in_half: bool = False
) -> int:
    """Check a whole model, and return how many batches were compared.

    In bfloat16 it takes other kernels: of attention, and of experts.
    """
    dtype = torch.bfloat16 if in_half else torch.float32
    model, mesh = open_model_on(directory, dcp, enable_expert_parallel, device_type, dtype)
    plan = model.attention.plan_cache(dcp, [MAX_MODEL_LEN] * MAX_NUM_SEQS, model.dtype)
    cache: Any = plan.allocate(model.device)
    token = torch.zeros((), dtype=torch.int64, device=model.device)

    def draw(num_reqs: int, generator: torch.Generator) -> Tensor:
        return torch.randint(1, VOCAB_SIZE - 1, (num_reqs,), generator=generator).to(model.device)

    return check_rows(model.decode, token, draw, cache, dcp, mesh, exact_to=None if in_half else 1e-4)


def check_stack(dcp: DCPConfig, num_layers: int, num_heads: int, device_type: str, topk: int | None = None) -> int:
    """Layers of DeepSeek-V3's head sizes in bfloat16, or of V3.2's; a residual around each; angles are looked up inside
    the step.
    """
    config = MLAConfig(
        hidden_size=256,
        num_heads=num_heads,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        softmax_scale=192**-0.5,
        indexer=None if topk is None else IndexerConfig(num_heads=64, head_dim=128, topk=topk, rope_interleaved=False),
    )
    mesh, device = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), device_of(device_type)
    exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
    torch.manual_seed(dist.get_rank())
    placement = Placement(dcp, mesh, exchange, torch.bfloat16, device)
    layers = [MLAAttention(config, placement) for _ in range(num_layers)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.05)
    angles = torch.arange(MAX_MODEL_LEN, device=device)[:, None] * torch.logspace(
        0, -3, config.qk_rope_head_dim // 2, device=device
    )
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)

    def step(hidden: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        metadata = metadata.with_cos_sin(cos_sin[metadata.tokens.positions])
        if topk is not None:
            metadata = with_selection(metadata, topk)
        for layer, kv_cache in zip(layers, cache, strict=True):
            hidden = hidden + layer(hidden, kv_cache, metadata)
        return hidden

    def draw(num_reqs: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_reqs, config.hidden_size, generator=generator).to(device, torch.bfloat16)

    row = torch.empty(config.hidden_size, dtype=torch.bfloat16, device=device)
    return check_rows(
        step, row, draw, new_cache(config, num_layers, dcp, torch.bfloat16, device), dcp, mesh, exact_to=None
    )


def check_rows(
    step: Step,
    input_like: Tensor,
    draw: Callable[[int, torch.Generator], Tensor],
    cache: LatentCache,
    dcp: DCPConfig,
    mesh: DCPMesh,
    exact_to: float | None,
) -> int:
    """Replays against the padded step (bit for bit, results and caches) and against the bare one (exact_to), over
    poisoned caches.
    """
    builder = new_builder(dcp, mesh, input_like.device, cache[0].index_keys is not None)
    graph = StepGraph.decodes(step, input_like, cache, builder, mesh, MAX_NUM_SEQS, MAX_MODEL_LEN)
    eager = StepGraph.decodes(step, input_like, cache, builder, mesh, MAX_NUM_SEQS, MAX_MODEL_LEN)
    skew()
    if input_like.is_cuda:
        graph.capture()
        assert graph.is_captured
    generator, num_compared = torch.Generator().manual_seed(0), 0
    for requests, metadata in steps(dcp, mesh, input_like.device, generator, cache[0].index_keys is not None):
        inputs = draw(metadata.num_tokens, generator)
        before = poison(cache, metadata, dcp, generator)
        skew()
        padded, padded_cache = eager.run(inputs, requests).clone(), copies(cache)
        restore(cache, before)
        skew()
        out = graph.run(inputs, requests)
        assert bool(out.isfinite().all())
        assert_same_bits([out, *cache.tensors], [padded, *padded_cache])
        check_written(cache, before, metadata)
        if exact_to is not None:
            restore(cache, before)
            with torch.inference_mode():
                torch.testing.assert_close(out, step(inputs, metadata, cache), atol=exact_to, rtol=0)
        num_compared += 1
    graph.release()
    assert not graph.is_captured
    return num_compared


def skew() -> None:
    """Ranks arrive at different times."""
    time.sleep(random.random() * 0.03 * (dist.get_rank() + 1))


def new_cache(
    config: MLAConfig,
    num_layers: int,
    dcp: DCPConfig,
    dtype: torch.dtype,
    device: torch.device,
    index_layers: Iterable[int] | None = None,
) -> LatentCache:
    return LatentCache(
        LatentCache.plan(config, dcp, num_layers, [MAX_MODEL_LEN] * MAX_NUM_SEQS, dtype, index_layers), device
    )


def steps(
    dcp: DCPConfig, mesh: DCPMesh, device: torch.device, generator: torch.Generator, is_sparse: bool
) -> Iterator[tuple[StepRequests, StepMetadata]]:
    """Draw decodes of requests of random lengths, their blocks all over the cache; the same on all ranks. Each as
    requests, for graphs, and laid out on the device.
    """
    blocks = num_blocks(MAX_MODEL_LEN, dcp)
    for batch in BATCHES:
        ids = torch.randperm(MAX_NUM_SEQS * blocks, generator=generator).view(MAX_NUM_SEQS, blocks)[:batch]
        seq_lens = torch.randint(1, MAX_MODEL_LEN + 1, (batch,), generator=generator).tolist()
        requests = StepRequests([1] * batch, seq_lens, ids.tolist())
        yield requests, new_builder(dcp, mesh, device, is_sparse).build(requests)


def new_builder(dcp: DCPConfig, mesh: DCPMesh, device: torch.device, is_sparse: bool) -> StepBuilder:
    return StepBuilder(dcp, mesh.dcp_rank, device, StepTraits(has_static_decodes=not is_sparse))


def poison(cache: LatentCache, metadata: StepMetadata, dcp: DCPConfig, generator: torch.Generator) -> list[Tensor]:
    """NaN wherever nobody has written, random rows of this rank's tokens before the step. Returns copies."""
    for layer in cache.tensors:
        layer.view(torch.uint8).fill_(0xFF)  # NaN in every format
        rows = layer.flatten(0, 1)
        for table, length in zip(
            metadata.decode.block_table.cpu(), metadata.decode.local_seq_lens.tolist(), strict=True
        ):
            slots = (table.long()[:, None] * dcp.block_size + torch.arange(dcp.block_size)).flatten()[:length]
            rows[slots.to(layer.device)] = draw_rows(length, layer.shape[-1], layer.dtype, generator).to(layer.device)
    return copies(cache)


def draw_rows(num_rows: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random rows in the format of a cache's dtype."""
    if dtype != torch.uint8:
        return torch.randn(num_rows, width, generator=generator).to(dtype)
    kv_c, k_pe = torch.randn(num_rows, 512 + 64, generator=generator).split([512, 64], -1)
    return to_cache_rows(kv_c, k_pe, dtype, None)


def copies(cache: LatentCache) -> list[Tensor]:
    return [layer.clone() for layer in cache.tensors]


def restore(cache: LatentCache, before: list[Tensor]) -> None:
    for layer, old in zip(cache.tensors, before, strict=True):
        layer.copy_(old)


def check_written(cache: LatentCache, before: list[Tensor], metadata: StepMetadata) -> None:
    """Check that a step wrote the slots of this rank's tokens, and no others."""
    mine = metadata.tokens.slots[metadata.tokens.slots >= 0]
    for layer, old in zip(cache.tensors, before, strict=True):
        written = layer.flatten(0, 1)[mine]
        assert bool((written.view(torch.uint8) != 0xFF).any(1).all())
        assert is_quantized(layer.dtype) or bool(written.isfinite().all())
        expected = old.clone()
        expected.flatten(0, 1)[mine] = layer.flatten(0, 1)[mine]
        assert_same_bits([layer], [expected])


def serve_loaded(
    directory: Path, dcp: DCPConfig, enable_expert_parallel: bool, device_type: str
) -> list[tuple[list[list[int]], bool]]:
    """Tokens of random prompts by `load_engine`'s engine, and whether it has a captured graph: as it comes, then with
    enforce_eager.
    """
    rng, results = random.Random(0), []
    prompts = [[rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randrange(1, 30))] for _ in range(7)]
    for enforce_eager in (False, True):
        options = EngineOptions(
            dtype=torch.float32,
            max_num_seqs=5,
            max_num_batched_tokens=64,
            enforce_eager=enforce_eager,
            enable_expert_parallel=enable_expert_parallel,
            kv_cache_memory_bytes=1 << 27,
        )
        engine = load_engine_on_rank(directory, dcp, options, None, device_type, [60] * 7)
        requests = [
            engine.add(prompt, SamplingParams(max_new_tokens=4 + 4 * index)) for index, prompt in enumerate(prompts)
        ]
        for _ in engine.run():
            skew()
        is_captured = engine.graph is not None and engine.graph.is_captured
        engine.close()
        results.append(([request.token_ids for request in requests], is_captured))
    return results
