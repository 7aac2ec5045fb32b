"""The layer alone, against transformers' DeepSeek-V3 attention: batches that mix everything, padding, no positions, a
dummy run.
"""

import dataclasses
import weakref
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from dcpmla import DCPConfig, DCPMesh, LatentCache, MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention import claim as claim_module
from dcpmla.attention import layer as layer_module
from dcpmla.attention.backends import Backend
from dcpmla.attention.build import StepBuilder
from dcpmla.attention.step import StepRequests
from dcpmla.cache.latent import LayerCache, num_blocks
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_kind
from tests.attention.test_compile import DEEPSEEK, Batch, make_layer, run_layer
from tests.support.models import random_model, tiny_config
from tests.support.ranks import run_ranks

# (tokens cached before the step, new tokens): decodes at 1, 2 and 41 tokens, prefills fresh, with context, of one token
# after another.
BATCH: Batch = ((0, 1), (1, 1), (40, 1), (0, 9), (30, 6), (3, 17), (21, 1))
# As few decodes as project W_UV before the merge, where that is asked for; many at lengths that leave ranks without
# tokens.
PROJECT_FIRST_TOKENS = 8  # in place of the layer's
DECODES: Batch = (*((3 * n % 11, 1) for n in range(PROJECT_FIRST_TOKENS)), (5, 6))
SPECULATED: Batch = ((0, 3), (1, 3), (5, 3), (40, 3))  # at lengths that leave some ranks without some tokens' keys
PIECES: Batch = ((0, 7), (30, 6), (3, 17), (21, 1), (41, 9))  # of prompts, with absorbed queries
# q_replicate, project_before_merge, a batch and whether its decodes are enough for that.
VARIANTS = (
    (False, False, BATCH, False),
    (True, False, BATCH, False),
    (False, True, DECODES, True),
    (True, True, DECODES, True),
    (False, True, DECODES[1:], False),
)


def oracle(config: Any) -> DeepseekV3Attention:
    return random_model(config).model.layers[0].self_attn


def hidden_states(config: Any, batch: Batch) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(cached + new, config.hidden_size, generator=generator) for cached, new in batch]


def rope(config: Any, num_tokens: int, with_positions: bool) -> tuple[Tensor, Tensor]:
    """Return transformers' (cos, sin) [1, T, R]; angles of zero mean a model without positions."""
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.empty(0), torch.arange(num_tokens)[None])
    return (cos, sin) if with_positions else (torch.ones_like(cos), torch.zeros_like(sin))


def expected(config: Any, batch: Batch, with_positions: bool) -> Tensor:
    """Return the outputs of the new tokens of all requests, laid end to end."""
    attention, outputs = oracle(config), []
    for (_, new), hidden in zip(batch, hidden_states(config, batch), strict=True):
        causal = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        outputs.append(attention(hidden[None], rope(config, len(hidden), with_positions), causal)[0][0, -new:])
    return torch.cat(outputs)


def run_steps(
    layer: MLAAttention,
    hf_config: Any,
    dcp: DCPConfig,
    batch: Batch,
    with_positions: bool,
    padding: int,
    max_decode_query_len: int,
    num_decodes: int | None,
) -> Tensor:
    """Fill the cache with what each request has cached, as one prefill; then the batch as one step."""
    total = [cached + new for cached, new in batch]
    cache = LatentCache(LatentCache.plan(layer.config, dcp, 1, total, torch.float32), torch.device("cpu"))[0]
    blocks = iter(range(len(cache.latents.fill_(torch.nan)) - 1, -1, -1))
    tables = [[next(blocks) for _ in range(num_blocks(length, dcp))] for length in total]
    hidden = hidden_states(hf_config, batch)
    cos, sin = (part[0, :, : part.shape[-1] // 2] for part in rope(hf_config, max(total), True))
    cos_sin = torch.cat([cos, sin], -1)

    def step(
        query_lens: list[int], seq_lens: list[int], requests: list[int], padding: int, num_decodes: int | None
    ) -> Tensor:
        numbers = StepRequests(query_lens, seq_lens, [tables[i] for i in requests])
        metadata = StepBuilder(dcp, layer.mesh.dcp_rank).build(numbers, max_decode_query_len, num_decodes)
        rows = torch.cat(
            [hidden[i][seq - query : seq] for i, query, seq in zip(requests, query_lens, seq_lens, strict=True)]
        )
        rows = torch.cat([rows, torch.full((padding, rows.shape[1]), torch.nan)])
        return layer(rows, cache, metadata.with_positions(cos_sin[metadata.positions] if with_positions else None))

    filled = [i for i, (cached, _) in enumerate(batch) if cached]
    step([batch[i][0] for i in filled], [batch[i][0] for i in filled], filled, 0, None)
    return step([new for _, new in batch], total, list(range(len(batch))), padding, num_decodes)


def check_layer(
    hf_config: Any,
    dcp: DCPConfig,
    mesh: DCPMesh,
    batch: Batch,
    with_positions: bool = True,
    padding: int = 0,
    max_decode_query_len: int = 1,
    num_decodes: int | None = None,
) -> Mock:
    """Compare with transformers' attention; returns the layer's exchange, which knows its calls."""
    config = dataclasses.replace(attention_kind(hf_config).config, use_rope=with_positions)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, torch.float32, "cpu"))
    layer.load_weights(oracle(hf_config).state_dict())
    with torch.no_grad():
        out = run_steps(layer, hf_config, dcp, batch, with_positions, padding, max_decode_query_len, num_decodes)
        wanted = expected(hf_config, batch, with_positions)
    assert out.shape == (len(wanted) + padding, config.hidden_size)
    torch.testing.assert_close(out[: len(wanted)], wanted, atol=1e-5, rtol=1e-4)
    assert out.isfinite().all()  # padding took nothing from the rows after num_tokens
    return exchange


def check_variants(hf_config: Any, dcp: DCPConfig) -> None:
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    layer_module.PROJECT_FIRST_TOKENS = PROJECT_FIRST_TOKENS
    for q_replicate, project_before_merge, batch, projects_first in VARIANTS:
        variant = dataclasses.replace(dcp, dcp_q_replicate=q_replicate, dcp_project_before_merge=project_before_merge)
        exchange = check_layer(hf_config, variant, mesh, batch)
        assert exchange.gather_heads.called != q_replicate
        width = hf_config.v_head_dim if projects_first else hf_config.kv_lora_rank
        assert exchange.combine.call_args.args[0].shape[-1] == width


def check_query_lens(hf_config: Any, dcp: DCPConfig) -> None:
    """Compare decodes of several query tokens: as many each, then different numbers, with padding and a prefill."""
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    for batch, padding in ((SPECULATED, 0), ((*SPECULATED, (6, 1), (4, 2), (13, 9)), 3)):
        check_layer(hf_config, dcp, mesh, batch, padding=padding, max_decode_query_len=3)


def check_absorbed_pieces(hf_config: Any, dcp: DCPConfig) -> None:
    """Compare pieces of prompts that attend with absorbed queries, cut into requests and parts of all sizes."""
    mesh, batch = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), (*SPECULATED, *PIECES)
    for width, max_rows, num_decodes in ((1, 1 << 16, None), (2, 20, 0), (4, 20, 1), (3, 1, 0)):
        layer_module.PART_ROWS = max_rows
        count = len(batch) - (num_decodes or 0)
        exchange = check_layer(hf_config, dcp, mesh, batch, padding=2, max_decode_query_len=width, num_decodes=count)
        assert exchange.start_context.called == bool(num_decodes)
        assert (exchange.combine.call_count > 2) == (max_rows < 1 << 16)


def check_padding(hf_config: Any, dcp: DCPConfig) -> None:
    check_layer(hf_config, dcp, init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), BATCH, False, 5)


def layout(tp: int, dcp: int, interleave: int = 1, backend: str = "auto") -> DCPConfig:
    config = DCPConfig(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        dcp_comm_backend=backend,
        block_size=4,
        context_workspace_tokens=1 << 16,
    )
    return dataclasses.replace(config, context_workspace_tokens=4 * config.chunk_alignment)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v3_neox"])
@pytest.mark.parametrize(
    "dcp",
    [layout(1, 1), layout(2, 2), layout(4, 2, 2, "ag_rs"), layout(4, 4, 4, "a2a"), layout(3, 3, 2, "ag_rs")],
    ids=str,
)
def test_mixed_batch(family: str, dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_variants, tiny_config(family), dcp)


@pytest.mark.parametrize("dcp", [layout(1, 1), layout(2, 2, 2, "a2a"), layout(3, 3, 1, "ag_rs")], ids=str)
def test_several_query_tokens(dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_query_lens, tiny_config("deepseek_v3"), dcp)


@pytest.mark.parametrize("dcp", [layout(1, 1), layout(2, 2, 2, "a2a"), layout(3, 3, 1, "ag_rs")], ids=str)
def test_absorbed_pieces(dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_absorbed_pieces, tiny_config("deepseek_v3"), dcp)


def test_padding_and_no_positions() -> None:
    run_ranks(2, check_padding, tiny_config("deepseek_v3"), layout(2, 2))


class Allocations(TorchDispatchMode):
    """Memory that is held at a time, of what is allocated under it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.storages.append(weakref.ref(result.untyped_storage()))
        held = {storage.data_ptr(): storage.nbytes() for ref in self.storages if (storage := ref()) is not None}
        self.peak = max(self.peak, sum(held.values()))
        return result


def claimed(layer: MLAAttention, num_tokens: int) -> int:
    """Bytes at a time, beside the exchange's."""
    with Allocations() as allocations:
        layer.claim_memory(num_tokens)
    return allocations.peak


def check_claims(hf_config: Any) -> None:
    dcp, mesh = layout(2, 2), init_mesh(2, 2)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    config, num_keys = attention_kind(hf_config).config, dcp.context_workspace_tokens

    def new_layer(config: MLAConfig, **formats: str) -> MLAAttention:
        placement = Placement(dataclasses.replace(dcp, **formats), mesh, exchange, torch.float32, "cpu")
        return MLAAttention(config, placement)

    # A key and a value of each of 12 heads, 8 + 8 and 4 wide; what the backend joins of keys, 16 wide.
    of_heads = num_keys * 12 * (8 + 4 + 16) * 4
    exchange.reserve_context.side_effect = lambda *_: None
    assert claimed(new_layer(config), 1) == of_heads
    exchange.reserve_context.assert_called_once_with(num_keys, 24, torch.float32, torch.device("cpu"))
    assert claimed(new_layer(config, kv_cache_dtype="fp8"), 1) == of_heads + num_keys * 24 * 4  # dequantized latents
    exchange.reserve_context.assert_called_with(num_keys, 24, torch.float8_e4m3fn, torch.device("cpu"))
    # Of each token's absorbed rows, of both ranks' heads, 24 columns of queries and 16 of outputs, each twice.
    assert claimed(new_layer(config), 100) == 100 * 24 * 2 * (24 + 16) * 4
    assert claimed(new_layer(config), 10**6) == claim_module.PART_ROWS * 2 * (24 + 16) * 4
    with patch.object(claim_module, "select_backend", return_value=Backend("one", Mock(), Mock())):
        assert claimed(new_layer(config), 1) == num_keys * 12 * (8 + 4) * 4
    sparse = new_layer(attention_kind(tiny_config("deepseek_v32")).config)
    assert sparse.indexer is not None
    few, many = (sparse.indexer.selector.workspace_bytes(num_tokens, 4) for num_tokens in (1, 1001))
    assert many - few == 2 * 1000 * 32 * 16 * 4  # queries of 32 heads, 16 wide, before and after what finishes them
    assert claimed(sparse, 1001) == many
    nothing_else = patch.object(claim_module, "PART_ROWS", 0)
    with nothing_else, patch.object(sparse.indexer.selector, "workspace_bytes", return_value=0):
        assert claimed(sparse, 800) == of_heads + 800 * num_keys // 8  # a bit for each pair: a mask


def test_claims_memory() -> None:
    run_ranks(2, check_claims, tiny_config("deepseek_v3"))


def check_mistakes(hf_config: Any) -> None:
    dcp, mesh = layout(1, 1), init_mesh(1, 1)
    config = attention_kind(hf_config).config
    placement = Placement(dcp, mesh, select_exchange(dcp, mesh.dcp_group, "cpu").exchange, torch.float32, "cpu")
    layer = MLAAttention(config, placement)
    hidden, cache = torch.zeros(3, 48), LayerCache(torch.zeros(2, 4, 24))
    bare = StepBuilder(dcp, 0).build(StepRequests([3], [3], [[1]]))
    step = bare.with_positions(torch.zeros(3, 8))

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            layer(*arguments)

    refused(r"hidden_states has shape \(2, 48\); expected \[at least 3, 48\]", hidden[:2], cache, step)
    refused("step is str; expected what a StepBuilder gives", hidden, cache, "decode")
    refused("cache is Tensor; expected a LayerCache, such as", hidden, cache.latents, step)
    refused("cache is NoneType; expected a LayerCache, such as", hidden, None, step)
    for latents, message in (
        (cache.latents[..., :23], r"kv_cache has shape \(2, 4, 23\); expected \[num_blocks, 4, 24\]"),
        (
            cache.latents.half(),
            r"kv_cache has dtype torch.float16; expected torch.float32 for .*\(--kv-cache-dtype\) 'auto'",
        ),
        (
            cache.latents.transpose(1, 2).contiguous().transpose(1, 2),
            r"kv_cache has strides \(96, 1, 4\); the values of a row must be contiguous",
        ),
        (cache.latents[:1], "block_tables has block 1; the cache has 1 blocks, numbered from 0"),
    ):
        refused(message, hidden, LayerCache(latents), step)
    wanted = r"expected \(torch.float32, \(3, 8\), device\(type='cpu'\)\), see with_positions"
    for cos_sin, found in (
        (None, "None"),
        (torch.zeros(2, 8), r"\(torch.float32, \(2, 8\), .*\)"),
        (torch.zeros(3, 8, dtype=torch.bfloat16), r"\(torch.bfloat16, \(3, 8\), .*\)"),
        (torch.zeros(3, 8, device="meta"), r"\(torch.float32, \(3, 8\), device\(type='meta'\)\)"),
    ):
        refused(rf"step.cos_sin is {found}; {wanted}", hidden, cache, bare.with_positions(cos_sin))
    layer.config = dataclasses.replace(config, use_rope=False)
    refused(r"step.cos_sin is \(.*\); expected None, for the model has no positions", hidden, cache, step)
    layer.config = config
    refused(
        r"step.query_factor is \(torch.float32, \(3,\), .*\); expected None, for config.llama_4_scaling is None",
        hidden,
        cache,
        step.with_positions(step.cos_sin, torch.ones(3)),
    )
    layer.config = dataclasses.replace(config, llama_4_scaling=(0.3, 16))
    wanted = r"expected \(torch.float32, \(3,\), device\(type='cpu'\)\), for .* is \(0.3, 16\)"
    for factor, found in (
        (None, "None"),
        (torch.ones(2), r"\(torch.float32, \(2,\), .*\)"),
        (torch.ones(3, dtype=torch.float16), r"\(torch.float16, \(3,\), .*\)"),
        (torch.ones(3, device="meta"), r"\(torch.float32, \(3,\), device\(type='meta'\)\)"),
    ):
        refused(rf"step.query_factor is {found}; {wanted}", hidden, cache, step.with_positions(step.cos_sin, factor))
    weights = oracle(hf_config).state_dict()
    with pytest.raises(ValueError, match="checkpoint: tensor q_b_proj.weight is missing"):
        layer.load_weights({name: weight for name, weight in weights.items() if name != "q_b_proj.weight"})
    with pytest.raises(
        ValueError, match=r"tensor o_proj.weight has shape \(47, 96\); the model's config asks for \(48, 96\)"
    ):
        layer.load_weights({**weights, "o_proj.weight": weights["o_proj.weight"][:47]})
    with pytest.raises(
        ValueError, match="dcp is for tensor_parallel_size 2 and decode_context_parallel_size 2; the mesh has 1 and 1"
    ):
        dataclasses.replace(placement, dcp=layout(2, 2))
    with pytest.raises(
        ValueError, match=r"\(--kv-cache-dtype\) is 'bf16', but the model computes in torch.float32; choose auto"
    ):
        dataclasses.replace(placement, dcp=dataclasses.replace(dcp, kv_cache_dtype="bf16"))
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size \(-tp\) is 5; it must divide the model's 24 attention heads: choose 1, 2, 3, ",
    ):
        config.heads_per_rank(5)


def test_mistakes_are_named() -> None:
    run_ranks(1, check_mistakes, tiny_config("deepseek_v3"))


# Widths and variants of the models that are supported, as one rank of several has them.
ON_A_GPU = {
    "DeepSeek-V3": DEEPSEEK,
    "V2-lite": dataclasses.replace(DEEPSEEK, num_heads=2, q_lora_rank=None),
    "GLM": dataclasses.replace(DEEPSEEK, num_heads=5, qk_nope_head_dim=192, v_head_dim=256, rope_interleaved=False),
    "LongCat": dataclasses.replace(DEEPSEEK, num_heads=8, kv_lora_scale=3.5, attention_bias=True),
    "Mistral 4": dataclasses.replace(DEEPSEEK, num_heads=1, kv_lora_rank=256, llama_4_scaling=(0.3, 16)),
}


def check_on_a_gpu(config: MLAConfig, dtype: torch.dtype) -> None:
    layer, exact = make_layer(config, 1, "auto", dtype, "cuda"), make_layer(config, 1, "auto", torch.float64, "cpu")
    exact.load_state_dict(layer.state_dict())
    exact.dcp = layer.dcp
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    for batch in (BATCH, ((69, 1),), ((0, 300), (200, 131))):
        for got, wanted in zip(run_layer(layer, batch), run_layer(exact, batch), strict=True):
            assert got.dtype == dtype
            assert (got.cpu() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", ON_A_GPU)
def test_on_a_gpu(variant: str, dtype: torch.dtype) -> None:
    """The kernels of a GPU together, against the plain torch of a CPU in float64."""
    run_ranks(1, check_on_a_gpu, ON_A_GPU[variant], dtype, device="cuda")
