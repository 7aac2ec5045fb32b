"""Routers: the torch code against transformers' modules, the Triton kernels against the torch code.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import math
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.integrations.families.table import find_family
from dcpmla.model.moe import Gate
from dcpmla.model.router import Router, route, router_logits, split_weight
from tests.attention.test_small_kernels import compile_for_hopper
from tests.support.kernels import on_both, run_kernels

GROUPS = {"num_groups": 4, "topk_groups": 2, "n_routed_experts": 16}
FAMILIES: dict[str, dict[str, Any]] = {  # fields of the config
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v2 greedy": {"topk_method": "greedy"},
    "deepseek_v3": {"norm_topk_prob": True},
    "deepseek_v3 greedy": {"topk_method": "greedy"},  # transformers reads `topk_method` for DeepSeek-V2 alone
    "deepseek_v32": {"norm_topk_prob": False},
    "glm4_moe_lite": {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {"norm_topk_prob": True},
    "mistral4": {"norm_topk_prob": True},
    "longcat_flash": {},
    "deepseek_v4": {},
}


def transformers_router(family: str) -> tuple[Any, Any]:
    """Build transformers' router of a family: 16 experts (LongCat's last 4 are zero experts), 4 of which are chosen.
    Return its config, too.
    """
    name = family.split()[0]
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    router = next(getattr(modeling, key) for key in vars(modeling) if key.lower().endswith("topkrouter"))
    config = import_module(f"transformers.models.{name}.configuration_{name}")
    config_class = next(getattr(config, key) for key in vars(config) if key.endswith(("Config",)) and key[0] in "DGML")
    common = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64}
    if name != "deepseek_v4":
        common |= {"n_group": 4, "topk_group": 2}
    if name == "longcat_flash":
        common = {"n_routed_experts": 12, "zero_expert_num": 4, "moe_topk": 4, "hidden_size": 64}
    built = config_class(**{**common, "routed_scaling_factor": 2.5, **FAMILIES[family]})
    module = router(built)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.normal_(generator=generator).mul_(0.3)
    return module, built


def sorted_routes(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.long().sort(1)
    return ids, weights.gather(1, order)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_as_transformers(family: str) -> None:
    module, config = transformers_router(family)
    how = find_family(family.split()[0]).routing.router(config, 0)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    logits = router_logits(x, next(module.parameters())[None])
    expected_logits, expected_weights, expected_ids = module(x)
    torch.testing.assert_close(logits, expected_logits.float())
    ids, weights = route(logits, getattr(module, "e_score_correction_bias", None), how)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    expected_ids, expected_weights = sorted_routes(expected_ids, expected_weights)
    ids, weights = sorted_routes(ids, weights)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


@torch.no_grad()
def test_experts_by_token_ids_as_transformers() -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    module = v4.DeepseekV4HashRouter(
        v4.DeepseekV4Config(hidden_size=64, num_local_experts=16, num_experts_per_tok=4, vocab_size=30)
    )
    module.weight.data.normal_()
    module.tid2eid.copy_(torch.rand(30, 16).argsort(1)[:, :4])
    x, token_ids = torch.randn(50, 64), torch.randint(30, (50,))
    how = Router(
        scoring="sqrtsoftplus",
        top_k=4,
        renormalize=True,
        routed_scaling_factor=module.routed_scaling_factor,
        num_shared=1,
    )
    ids, weights = Gate(module.weight[None], how, table=module.tid2eid)(x, token_ids)
    _, expected_weights, expected_ids = module(x, token_ids)
    assert torch.equal(ids[:, :4].long(), expected_ids)
    torch.testing.assert_close(weights[:, :4], expected_weights)
    assert (ids[:, 4] == 16).all()
    assert (weights[:, 4] == 1).all()


def root(row: Tensor) -> Tensor:
    return (1 + row.exp()).log().sqrt()


def brute_force(
    logits: Tensor, bias: Tensor | None, how: Router, dtype: torch.dtype = torch.float64
) -> tuple[list[list[int]], list[list[float]]]:
    """Route, one Python sort after the other; NaN last, ties by lower id."""
    all_ids, all_weights = [], []
    for row in logits.to(dtype):
        scores = {"sigmoid": torch.sigmoid, "softmax": partial(torch.softmax, dim=0)}.get(how.scoring, root)(row)
        choice = (scores + (0 if bias is None else bias)).nan_to_num(nan=-torch.inf).tolist()
        size = len(choice) // how.num_groups
        groups = [sorted(choice[i : i + size], reverse=True) for i in range(0, len(choice), size)]
        group_scores = [group[0] if how.group_score == "max" else sum(group[:2]) for group in groups]
        chosen = sorted(range(how.num_groups), key=lambda group: (-group_scores[group], group))[: how.topk_groups]
        choice = [score if i // size in chosen else how.unchosen_score for i, score in enumerate(choice)]
        ids = sorted(range(len(choice)), key=lambda i: (-choice[i], i))[: how.top_k]
        weights = scores[ids]
        if how.renormalize:
            weights = weights / (weights.sum() + 1e-20)
        all_ids.append([*ids, *range(len(choice), len(choice) + how.num_shared)])
        all_weights.append([*(weights * how.routed_scaling_factor).tolist(), *[1.0] * how.num_shared])
    return all_ids, all_weights


ROUTERS = st.builds(
    Router,
    scoring=st.sampled_from(("sigmoid", "softmax", "sqrtsoftplus")),
    top_k=st.integers(1, 6),
    num_groups=st.just(3),
    topk_groups=st.integers(1, 3),
    group_score=st.sampled_from(("max", "top2_sum")),
    renormalize=st.booleans(),
    routed_scaling_factor=st.sampled_from((1.0, 2.5)),
    num_shared=st.integers(0, 2),
    unchosen_score=st.sampled_from((-math.inf, 0.0)),  # of experts in groups that are not chosen
)


@given(how=ROUTERS, seed=st.integers(0, 1000), has_bias=st.booleans())
def test_against_brute_force(how: Router, seed: int, has_bias: bool) -> None:
    """Few distinct logits, so that scores and group scores are equal; biases are sums of powers of two."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-1, 2, (4, 12), generator=generator).float()
    logits[1, ::3] = torch.nan
    bias = torch.randint(-4, 5, (12,), generator=generator) / 4 if has_bias else None
    ids, weights = route(logits, bias, how)
    expected_ids, expected_weights = brute_force(logits, bias, how)
    if how.scoring != "softmax":
        # Sums that are equal but for rounding decide nothing: sigmoid(1) + sigmoid(-1) is 1, or a bit less.
        assume(brute_force(logits, bias, how, torch.float32)[0] == expected_ids)
        assert ids.tolist() == expected_ids
    elif how.unchosen_score:  # a NaN makes every score NaN; sums of float32 scores may tie where float64's do not
        assert ids[1, : how.top_k].tolist() == list(range(how.top_k))
    assert weights.shape == ids.shape
    same = (ids == torch.tensor(expected_ids)).all(1)
    torch.testing.assert_close(
        weights[same], torch.tensor(expected_weights)[same], equal_nan=True, rtol=1e-5, atol=1e-6
    )


CASES = [
    (
        Router(scoring="sigmoid", top_k=8, num_groups=8, topk_groups=4, group_score="top2_sum", renormalize=True),
        64,
        True,
    ),
    (
        Router(scoring="sigmoid", top_k=6, num_groups=4, topk_groups=1, group_score="top2_sum", unchosen_score=0.0),
        24,
        True,
    ),
    (Router(scoring="softmax", top_k=6, num_groups=8, topk_groups=3, routed_scaling_factor=16.0), 160, False),
    (Router(scoring="softmax", top_k=3, num_shared=2), 7, True),
    (Router(scoring="sqrtsoftplus", top_k=6, renormalize=True, routed_scaling_factor=1.5), 60, True),
]


def check_kernels(device: str) -> None:
    """Check the kernel against plain torch: equal logits, NaN in some, in all, ties."""
    from dcpmla.model.kernels import router as kernels

    num_tokens = 3000 if device == "cuda" else 5
    for how, num_experts, has_bias in CASES:
        generator = torch.Generator().manual_seed(num_experts)
        logits = torch.randn(num_tokens, num_experts, generator=generator) * 5
        logits[1], logits[2, ::2], logits[3], logits[4] = 0, torch.nan, torch.nan, logits[4].round()
        bias = torch.randint(-8, 9, (num_experts,), generator=generator) / 8 if has_bias else None
        ids, weights = kernels.route(logits.to(device), None if bias is None else bias.to(device), how)
        expected_ids, expected_weights = route(logits, bias, how)
        same = (ids.cpu() == expected_ids).all(1)
        assert same[:5].all()
        assert same.float().mean() > 0.99  # another last bit of a score
        torch.testing.assert_close(weights.cpu()[same], expected_weights[same], equal_nan=True)
    x, weight = torch.randn(3, 70), torch.randn(2, 5, 70)
    torch.testing.assert_close(kernels.router_logits(x.to(device), weight.to(device)).cpu(), x @ weight.sum(0).T)


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_terms_are_the_weight(stored: torch.dtype) -> None:
    """No bit of a checkpoint's router is lost in bfloat16, and numbers that bfloat16 holds are one term."""
    weight = (torch.randn(16, 300, generator=torch.Generator().manual_seed(0)) * 0.02).to(stored)
    terms = split_weight(weight, torch.bfloat16)
    assert (terms.dtype, terms.shape) == (torch.bfloat16, (1 if stored is torch.bfloat16 else 3, 16, 300))
    assert torch.equal(terms.float().sum(0), weight.float())
    assert len(split_weight(weight.bfloat16().float(), torch.bfloat16)) == 1
    assert len(split_weight(weight, torch.float32)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_logits_on_a_gpu(stored: torch.dtype) -> None:
    """Products of 16 bits are exact in float32, whatever computes them."""
    generator = torch.Generator("cuda").manual_seed(0)
    new = {"generator": generator, "device": "cuda"}
    for num_tokens in (1, 8, 9, 300):
        x = torch.randn(num_tokens, 7168, dtype=torch.bfloat16, **new)
        weight = torch.randn(256, 7168, dtype=stored, **new)
        logits = router_logits(x, split_weight(weight, x.dtype))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0, atol=5e-3)


def test_kernels_compile_for_hopper() -> None:
    from dcpmla.model.kernels.router import logits_kernel, route_kernel

    sizes = {"NUM_EXPERTS": 256, "NUM_GROUPS": 8, "TOPK_GROUPS": 4, "TOP_K": 8, "NUM_SHARED": 1}
    padded = {"GROUPS": 8, "GROUP": 32, "OUT": 16}
    flags = {"SCORING": "sqrtsoftplus", "TOP2": True, "RENORMALIZE": True}
    compile_for_hopper(
        route_kernel, "fp32", {**sizes, **padded, **flags}, ids_ptr="*i32", factor="fp32", unchosen_score="fp32"
    )
    ptx = compile_for_hopper(logits_kernel, "bf16", {"TERMS": 3, "WIDTH": 7168, "COLUMNS": 8192}, out_ptr="*fp32")
    assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": "tanh"}, "scoring is 'tanh'; it must be one of sigmoid, softmax, sqrtsoftplus"),
        ({"group_score": "sum"}, "group_score is 'sum'; it must be one of max, top2_sum"),
        ({"topk_groups": 5, "num_groups": 4}, "topk_groups is 5; expected 1 to num_groups, which is 4"),
        ({"topk_groups": 2, "num_groups": 5}, "num_groups is 5; it must divide 12 experts"),
        ({"num_groups": 12, "topk_groups": 3, "group_score": "top2_sum"}, "into groups of 2 for top2_sum"),
        ({"top_k": 13}, "top_k is 13, of 12 experts"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(2, 12), None, Router(**{"scoring": "sigmoid", "top_k": 2, **change}))


def test_shapes_that_do_not_fit() -> None:
    how = Router(scoring="sigmoid", top_k=2)
    with pytest.raises(ValueError, match=r"logits is torch.bfloat16 \(2, 12\); expected float32 \[T, E\]"):
        route(torch.zeros(2, 12, dtype=torch.bfloat16), None, how)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \(11,\); expected float32 \[12\]"):
        route(torch.zeros(2, 12), torch.zeros(11), how)
    ids, weights = route(torch.zeros(0, 12), None, how)
    assert ids.shape == weights.shape == (0, 2)
