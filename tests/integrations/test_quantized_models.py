"""Models over caches of 8 bits: against themselves without DCP, and against what errors of a rounding do to them
without 8 bits.
"""

import itertools
from contextlib import nullcontext
from pathlib import Path
from unittest import TestCase
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla import DCPConfig, MLAAttention
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.attention.test_quantized_cache import FORMATS, config_of_layer, layout
from tests.support.engines import new_engine
from tests.support.models import random_model
from tests.support.ranks import run_ranks
from tests.support.whole_models import Answers, answers_of, draw_prompts, load_on_rank, poisoned_cache

NUM_NEW = 5
PROMPT_LENS = (3, 17, 36)
# Tokens of a step; what a prompt finds again of its like ends where a chunk does, so that the same tokens are read as
# cached
CHUNK = 16


def save_badly_scaled(directory: Path) -> None:
    """Make a model whose latents are 300 times as large as others', W_UK and W_UV as much smaller: e4m3 by itself ends
    at 448.
    """
    model = random_model(config_of_layer())
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.weight.data *= 300
        layer.self_attn.kv_b_proj.weight.data /= 300
    model.save_pretrained(directory)


def generate(directory: Path, dcp: DCPConfig) -> tuple[Answers, list[float]]:
    """On one rank: each prompt's outcome, the same when it is served again; and the scales of all layers."""
    model, mesh = load_on_rank(directory, dcp)
    cache = poisoned_cache(model, dcp, [length + NUM_NEW for length in PROMPT_LENS])
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
    # It runs the padded step, without a GPU.
    graph = StepGraph.decodes(model.decode, torch.zeros((), dtype=torch.int64), cache, steps, mesh, 3, 64)
    engine = new_engine(model, cache, dcp, mesh, 64, CHUNK, max_num_seqs=3, graph=graph)
    params, prompts = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True), draw_prompts(PROMPT_LENS)
    engine.add(prompts[0][:1], params)
    list(engine.run())  # a prompt of one token, and decodes behind it
    scales = scales_of(model)
    first, again = [], []
    for requests, prompt in itertools.product((first, again), prompts):
        requests.append(engine.add(prompt, params, keep_logits=True))
        list(engine.run())
    assert [request.num_cached_tokens for request in again] == [0, 16, 32]
    assert [request.token_ids for request in again] == [request.token_ids for request in first]
    torch.testing.assert_close(
        [request.logits for request in again], [request.logits for request in first], atol=1e-5, rtol=1e-5
    )
    assert scales_of(model) == scales  # what has been cached by them stays
    return answers_of(first), scales


def scales_of(model: ShardedModel) -> list[float]:
    layers = [module for module in model.hidden_states.modules() if isinstance(module, MLAAttention)]
    return [float(scale) for layer in layers for scale in (layer.kv_scale, layer.q_scale) if scale is not None]


def error(got: Answers, wanted: Answers) -> float:
    """Of logits, those up to the first other token: the norm of the difference beside theirs."""
    pairs = []
    for (tokens, logits), (other_tokens, other_logits) in zip(got, wanted, strict=True):
        same = next((i for i in range(NUM_NEW) if tokens[i] != other_tokens[i]), NUM_NEW - 1) + 1
        pairs.append((logits[:same], other_logits[:same]))
    ours, theirs = (torch.cat(logits) for logits in zip(*pairs, strict=True))
    return float((ours - theirs).norm() / theirs.norm())


def off_by_a_sixteenth(values: Tensor) -> Tensor:
    """At most, each by another part; the same value always by the same."""
    return values * (1 + 2**-4 * (1e4 * values).sin())


def check_models(directory: Path) -> list[float]:
    """Return this rank's scales."""
    plain, _ = generate(directory, layout(2, 1, 1, ("auto", "auto")))
    with TestCase().assertLogs("dcpmla.integrations.parts") if dist.get_rank() == 0 else nullcontext() as log:
        unscaled, _ = generate(directory, layout(2, 2, 1, ("fp8", "auto"), kv_cache_scale=None))
    assert log is None or [
        "layers have no kv_scale in their checkpoint, so 1 is taken" in line for line in log.output
    ] == [True]
    with patch(
        "dcpmla.cache.formats.to_cache_rows",
        lambda kv_c, k_pe, *_: torch.cat([off_by_a_sixteenth(part) for part in (kv_c, k_pe)], -1),
    ):
        noisy, _ = generate(directory, layout(2, 1, 1, ("auto", "auto")))
    all_scales = []
    for kv_format in FORMATS:
        changes = {"calculate_kv_scales": True} if kv_format[0] == "fp8" else {}
        (whole, whole_scales), (sharded, scales) = (
            generate(directory, layout(2, size, 2, kv_format, **changes)) for size in (1, 2)
        )
        assert scales == pytest.approx(whole_scales, rel=1e-3)
        assert [tokens for tokens, _ in sharded] == [tokens for tokens, _ in whole]
        # Sums over the ranks round otherwise, at 1e-7; then a value in 10^5 has the next code of e4m3, in latents of
        # thousands.
        assert error(sharded, whole) < 5e-3
        # e4m3 rounds a value by 2^-4 of it at most. So the logits are off by less than where all values in a plain
        # cache are off by up to that, and by far less than where values are cut off at 448.
        assert 0.1 * error(noisy, plain) < error(sharded, plain) < error(noisy, plain) < 0.5 * error(unscaled, plain)
        all_scales += scales
    return all_scales


def test_models(tmp_path: Path) -> None:
    save_badly_scaled(tmp_path)
    scales, others = run_ranks(2, check_models, tmp_path)
    assert scales == others
    assert len(scales) == 2 + 4  # of two layers, without and with fp8 queries
    assert all(scale != 1 for scale in scales)
