"""The layer with an indexer, against transformers' DeepSeek-V3.2 and GLM-5 attention: mixed batches, every cut of the
cache.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla import DCPConfig, DCPMesh, MLAAttention, Placement, StepMetadata, init_mesh
from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.select import scores as scores_module
from dcpmla.attention.select import selector as selector_module
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata, with_selection
from dcpmla.attention.step import metadata as metadata_module
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_layer import hidden_states, layout, rope
from tests.support.layer_batches import run_batch
from tests.support.models import random_model, tiny_config
from tests.support.ranks import on_ranks, run_ranks
from tests.support.steps import part, selection_of

TOPK = 24
PADDING = 3
# (tokens cached before the step, new tokens): decodes of one token and of three, below top-k, at it and beyond;
# prefills likewise.
BATCH = ((0, 1), (23, 1), (24, 1), (70, 1), (41, 3), (0, 9), (0, 40), (30, 6), (66, 17))
PROJECTED_FIRST = dataclasses.replace(layout(4, 2, 2, "ag_rs"), dcp_project_before_merge=True)
Weights = dict[str, Tensor]


def run_layers(
    layers: list[MLAAttention],
    hf_config: Any,
    dcp: DCPConfig,
    padding: int,
    num_decodes: int | None,
    buffer: Tensor | None = None,
) -> tuple[list[Tensor], SelectedTokens]:
    """Return each layer's output of the new tokens and padding, and what was selected last.

    buffer: An engine's memory for positions.
    """
    angles = rope(hf_config, max(map(sum, BATCH)), True)
    cos_sin = torch.cat([part[0, :, : part.shape[-1] // 2] for part in angles], -1)

    def select(step: StepMetadata) -> StepMetadata:
        step = with_selection(step, TOPK, buffer)
        selection = selection_of(step)
        for memory in (selection.positions, selection.slots, selection.num_slots):
            memory.fill_(2**31 - 1)
        return step

    outputs, step = run_batch(
        layers, dcp, BATCH, hidden_states(hf_config, BATCH), cos_sin, padding, 3, num_decodes, select
    )
    return outputs, selection_of(step)


def new_layer(hf_config: Any, dcp: DCPConfig, mesh: DCPMesh, weights: Weights, skip_topk: bool = False) -> MLAAttention:
    config = attention_of(hf_config).config
    exchange = select_exchange(dcp, mesh.dcp_group, "cpu").exchange
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, torch.float32, "cpu"), skip_topk)
    layer.load_weights(weights)
    return layer


def expected(hf_config: Any) -> list[Tensor]:
    """Return the first two attention layers' outputs of the new tokens of all requests, laid end to end."""
    modules = [decoder.self_attn for decoder in random_model(hf_config).model.layers[:2]]
    outputs: list[list[Tensor]] = [[] for _ in modules]
    for (cached, new), hidden in zip(BATCH, hidden_states(hf_config, BATCH), strict=True):
        length, reused = cached + new, {}
        angles, causal = rope(hf_config, length, True), torch.full((length, length), -torch.inf).triu(1)[None, None]
        for module, rows in zip(modules, outputs, strict=True):
            out = module(hidden[None], angles, causal, position_ids=torch.arange(length)[None], **reused)
            reused = {"prev_topk_indices": out[2]} if len(out) == 3 else {}
            rows.append(out[0][0, -new:])
    return [torch.cat(rows) for rows in outputs]


def check_layouts(hf_config: Any, layouts: list[DCPConfig]) -> None:
    """Layers of a model in each layout: by masked MHA in prefill, and by selected rows."""
    hf_config._attn_implementation = "eager"
    model = random_model(hf_config).model
    layer_module.PROJECT_FIRST_TOKENS, metadata_module.PART_ROWS = 8, 144  # some parts project after the merge
    # Tokens are scored, and selected for, in several turns.
    selector_module.WORKSPACE_BYTES = scores_module._MAX_PRODUCTS = 1 << 14
    with torch.no_grad():
        wanted = expected(hf_config)
        for dcp in layouts:
            mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
            shared = [kind == "shared" for kind in getattr(hf_config, "indexer_types", ["full"] * 2)[:2]]
            weights = [layer.self_attn.state_dict() for layer in model.layers[:2]]
            layers = [new_layer(hf_config, dcp, mesh, *each) for each in zip(weights, shared, strict=True)]
            for num_decodes in (None, len(BATCH)):
                outputs, selection = run_layers(layers, hf_config, dcp, PADDING, num_decodes)
                for out, rows in zip(outputs, wanted, strict=True):
                    torch.testing.assert_close(out[: len(rows)], rows, atol=1e-5, rtol=1e-4)
                    assert out.isfinite().all()  # padding took nothing from the rows after num_tokens
                # The first decode's one token is the first rank's.
                assert mesh.dcp_rank == 0 or (selection.num_slots == 0).any()


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("deepseek_v32", [layout(1, 1)]),
        ("glm_moe_dsa", [layout(3, 3, 2, "ag_rs")]),
        ("deepseek_v32", [layout(4, 4, 4, "a2a"), PROJECTED_FIRST]),
        ("glm_moe_dsa", [layout(8, 8, 1, "a2a")]),
    ],
    ids=["V3.2 on 1", "GLM-5 on 3", "V3.2 on 4", "GLM-5 on 8"],
)
def test_mixed_batch(family: str, layouts: list[DCPConfig]) -> None:
    run_ranks(layouts[0].tensor_parallel_size, check_layouts, tiny_config(family), layouts)


def select_in_formats(hf_config: Any, dcp: DCPConfig) -> list[Tensor]:
    """Positions selected by exact keys and queries, by transformed ones, by fp8, and by both; sorted."""
    weights: Weights = dict(random_model(hf_config).model.layers[0].self_attn.state_dict())
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    found = []
    for dtype, hadamard in (("auto", False), ("auto", True), ("fp8", False), ("fp8", True)):
        formats = dataclasses.replace(dcp, index_cache_dtype=dtype, index_hadamard=hadamard)
        with torch.no_grad():
            _, selection = run_layers([new_layer(hf_config, formats, mesh, weights)], hf_config, formats, 0, None)
        found.append(selection.positions.sort(1).values)
    return found


def test_formats_of_the_index_cache() -> None:
    alone = run_ranks(1, select_in_formats, tiny_config("deepseek_v32"), layout(1, 1))[0]
    for ranks in run_ranks(3, select_in_formats, tiny_config("deepseek_v32"), layout(3, 3, 2)):
        for positions, others in zip(alone, ranks, strict=True):
            assert torch.equal(positions, others)  # whatever the format, the number of ranks does not show
    exact, transformed, *rounded = (
        torch.zeros(len(rows), 128).scatter(1, rows.clamp(min=0).long(), 1.0) for rows in alone
    )
    assert torch.equal(exact, transformed)
    for chosen in rounded:
        assert 0.9 < (exact * chosen).sum() / exact.sum() < 1  # rounding shows, a little


@on_ranks(1)
def test_mistakes_are_named() -> None:
    hf_config, dcp, mesh = tiny_config("deepseek_v32"), layout(1, 1), init_mesh(1, 1)
    weights: Weights = dict(random_model(hf_config).model.layers[0].self_attn.state_dict())
    layer, reusing = (new_layer(hf_config, dcp, mesh, weights, skip) for skip in (False, True))
    dense = StepBuilder(dcp, 0).build(StepRequests([30], [30], [list(range(8))])).with_cos_sin(torch.zeros(30, 8))
    step, bare, hidden = with_selection(dense, TOPK), with_selection(dense, 30), torch.zeros(30, 48)
    cache = LayerCache(torch.zeros(8, 4, 24), torch.zeros(8, 4, 16))
    assert part(bare, SparseMetadata).selection is None  # no token has more than 30 before it
    captured = dataclasses.replace(dense, defer=lambda work, arguments: None)
    assert with_selection(captured, TOPK) is captured
    for with_mistake, cache_with_mistake, message in (
        (dense, cache, "step has no sparse part, .*; call with_selection\\(step, 24\\)"),
        (bare, cache, r"the step has no selection; tokens with more than 24 .* need with_selection\(step, 24\)"),
        (with_selection(dense, 23), cache, r"the step's selection is \(30, 23\); expected \(30, 24\), tokens and topk"),
        (
            step,
            LayerCache(cache.latents),
            r"cache.index_keys is None; expected torch.float32 \(8, 4, 16\), .* \(--index-cache-dtype\) 'auto'",
        ),
        (
            step,
            LayerCache(cache.latents, torch.zeros(8, 4, 20, dtype=torch.uint8)),
            r"cache.index_keys is torch.uint8 \(8, 4, 20\), strides .*; expected torch.float32 \(8, 4, 16\)",
        ),
        (
            step,
            LayerCache(torch.zeros(16, 4, 24)[::2], cache.index_keys),
            r"kv_cache has strides \(192, 24, 1\); sparse attention takes contiguous blocks",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer(hidden, cache_with_mistake, with_mistake)
    with pytest.raises(ValueError, match="the step has no selection"):
        reusing(hidden, LayerCache(cache.latents), bare)
    with pytest.raises(ValueError, match="checkpoint: tensor wk.weight is missing"):
        layer.load_weights({name: weight for name, weight in weights.items() if name != "indexer.wk.weight"})
    placement = Placement(dcp, mesh, layer.exchange, torch.float32, "cpu")
    with pytest.raises(ValueError, match="config has an indexer, but q_lora_rank is None"):
        MLAAttention(dataclasses.replace(layer.config, q_lora_rank=None), placement)
    odd = dataclasses.replace(layer.config, indexer=dataclasses.replace(layer.config.indexer, head_dim=24))
    with pytest.raises(
        ValueError, match=r"index_hadamard \(--index-hadamard\) takes a power of two; the indexer's head_dim is 24"
    ):
        MLAAttention(odd, dataclasses.replace(placement, dcp=dataclasses.replace(dcp, index_hadamard=True)))
