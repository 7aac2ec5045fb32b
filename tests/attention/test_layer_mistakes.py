"""Mistakes in what a layer takes: each is named."""

import dataclasses
from typing import Any

import pytest
import torch

from dcpmla import MLAAttention, Placement, init_mesh
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_layer import layout, oracle
from tests.support.models import tiny_config
from tests.support.ranks import on_ranks


@on_ranks(1)
def test_mistakes_are_named() -> None:
    hf_config, dcp, mesh = tiny_config("deepseek_v3"), layout(1, 1), init_mesh(1, 1)
    config = attention_of(hf_config).config
    placement = Placement(dcp, mesh, select_exchange(dcp, mesh.dcp_group, "cpu").exchange, torch.float32, "cpu")
    layer = MLAAttention(config, placement)
    hidden, cache = torch.zeros(3, 48), LayerCache(torch.zeros(2, 4, 24))
    bare = StepBuilder(dcp, 0).build(StepRequests([3], [3], [[1]]))
    step = bare.with_cos_sin(torch.zeros(3, 8))

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            layer(*arguments)

    refused(r"hidden_states has shape \(2, 48\); expected \[at least 3, 48\]", hidden[:2], cache, step)
    refused("step is str; expected what a StepBuilder gives", hidden, cache, "decode")
    refused("cache is Tensor; expected a LayerCache, for example", hidden, cache.latents, step)
    refused("cache is NoneType; expected a LayerCache, for example", hidden, None, step)
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
    expected = r"expected \(torch.float32, \(3, 8\), device\(type='cpu'\)\) .*, which StepMetadata.with_cos_sin adds"
    for cos_sin, actual in (
        (None, "None"),
        (torch.zeros(2, 8), r"\(torch.float32, \(2, 8\), .*\)"),
        (torch.zeros(3, 8, dtype=torch.bfloat16), r"\(torch.bfloat16, \(3, 8\), .*\)"),
        (torch.zeros(3, 8, device="meta"), r"\(torch.float32, \(3, 8\), device\(type='meta'\)\)"),
    ):
        refused(rf"step.cos_sin is {actual}; {expected}", hidden, cache, bare.with_cos_sin(cos_sin))
    layer.config = dataclasses.replace(config, use_rope=False)
    refused(r"step.cos_sin is \(.*\); expected None, because the model has no positions", hidden, cache, step)
    layer.config = config
    refused(
        r"step.query_factor is \(torch.float32, \(3,\), .*\); expected None, because config.llama_4_scaling is None",
        hidden,
        cache,
        step.with_cos_sin(step.cos_sin, torch.ones(3)),
    )
    layer.config = dataclasses.replace(config, llama_4_scaling=(0.3, 16))
    expected = r"expected \(torch.float32, \(3,\), device\(type='cpu'\)\), because .* is \(0.3, 16\)"
    for factor, actual in (
        (None, "None"),
        (torch.ones(2), r"\(torch.float32, \(2,\), .*\)"),
        (torch.ones(3, dtype=torch.float16), r"\(torch.float16, \(3,\), .*\)"),
        (torch.ones(3, device="meta"), r"\(torch.float32, \(3,\), device\(type='meta'\)\)"),
    ):
        refused(rf"step.query_factor is {actual}; {expected}", hidden, cache, step.with_cos_sin(step.cos_sin, factor))
    weights = oracle(hf_config).state_dict()
    without = {name: weight for name, weight in weights.items() if name != "q_b_proj.weight"}
    shorter = {**weights, "o_proj.weight": weights["o_proj.weight"][:47]}
    for message, call in (
        ("checkpoint: tensor q_b_proj.weight is missing", lambda: layer.load_weights(without)),
        (
            r"tensor o_proj.weight has shape \(47, 96\); the model's config asks for \(48, 96\)",
            lambda: layer.load_weights(shorter),
        ),
        (
            "dcp is for tensor_parallel_size 2 and decode_context_parallel_size 2; the mesh has 1 and 1",
            lambda: dataclasses.replace(placement, dcp=layout(2, 2)),
        ),
        (
            r"\(--kv-cache-dtype\) is 'bf16', but the model computes in torch.float32; choose auto",
            lambda: dataclasses.replace(placement, dcp=dataclasses.replace(dcp, kv_cache_dtype="bf16")),
        ),
        (
            r"tensor_parallel_size \(-tp\) is 5; it must divide the model's 24 attention heads: choose 1, 2, 3, ",
            lambda: config.heads_per_rank(5),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
