"""Experts: the torch code against transformers' modules and float64, the Triton kernels against both.

Kernels run on a GPU, in Triton's interpreter without one.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.output.formats import write_fp8_groups
from dcpmla.cache.formats import FP8
from dcpmla.comm.terms import add_terms, whole
from dcpmla.model.calls import RoutedRows
from dcpmla.model.experts import ExpertWeights, compute_experts
from dcpmla.model.glu import SWIGLU, Glu
from dcpmla.parallel.formats import AnyWeight, Quantized, dequantize
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import NormedRows, QuantizedRows, fields
from tests.support.glu import GLUS, glu_of
from tests.support.kernels import nan_in_new_memory, run_kernels
from tests.support.packed import KINDS as PACKED
from tests.support.packed import make_packed

FORMATS = ("plain", "fp8", *PACKED)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # relative, of norms


def make_weight(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> AnyWeight:
    """Return random weights [E, N, K] of about K^-1/2."""
    num_experts, num_rows, num_cols = shape
    if kind == "plain":
        return (torch.randn(shape, generator=generator) * num_cols**-0.5).to(dtype)
    if kind == "fp8":
        codes = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(FP8)
        scales = torch.rand(num_experts, num_rows // 128, num_cols // 128, generator=generator) + 0.5
        return Quantized(codes, scales * num_cols**-0.5 / 100)
    return make_packed(kind, (num_experts, num_rows), num_cols, generator)


def make_case(
    kind: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    """Return x, ids from -1 to E (both are no expert), their weights, and the experts'."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k), generator=generator).int()
    weights = ExpertWeights(
        make_weight(kind, (num_experts, 2 * width, hidden), dtype, generator),
        make_weight(kind, (num_experts, hidden, width), dtype, generator),
    )
    return x, ids, torch.rand(num_tokens, top_k, generator=generator), weights


def quantized(x: Tensor) -> Tensor:
    """Return what `write_fp8_groups` makes of rows, in float64."""
    codes, scales = torch.empty(x.shape, dtype=FP8), torch.empty(len(x), x.shape[1] // 128)
    write_fp8_groups(x, 0, codes, scales, False)
    return codes.double() * scales.double().repeat_interleave(128, 1)


def rounded(weight: AnyWeight, dtype: torch.dtype) -> AnyWeight:
    """Return a weight whose scales are rounded to a dtype of 16 bits."""
    if isinstance(weight, Tensor) or dtype == torch.float32:
        return weight
    return weight._replace(scales=weight.scales.to(dtype))


def brute_force(
    x: Tensor,
    ids: Tensor,
    expert_weights: Tensor,
    weights: ExpertWeights,
    glu: Glu,
    quantizes: bool,
    value_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> Tensor:
    """Return [T, H] in float64, expert by expert; quantizes: as block fp8 does on GPUs, value_dtypes: to which the two
    weights are rounded before, and of 16 bits their scales, too.
    """
    pairs = zip(weights, value_dtypes, strict=True)
    gate_up, down = (dequantize(rounded(weight, dtype), dtype).double() for weight, dtype in pairs)
    rows, out = (quantized(x) if quantizes else x.double()), torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (rows[token] @ gate_up[expert].T).chunk(2, 1)
        h = (glu_of(gate, up, glu) * expert_weights[token, place, None]).to(x.dtype)
        out.index_add_(0, token, (quantized(h) if quantizes else h.double()) @ down[expert].T)
    return out


def assert_near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert not got.isnan().any()
    assert (got.cpu().double() - wanted).norm() <= tolerance * wanted.norm()


def on(device: str, case: tuple[Tensor, Tensor, Tensor, ExpertWeights]) -> Any:
    *tensors, weights = case
    moved = (w.to(device) if isinstance(w, Tensor) else w.map(lambda part: part.to(device)) for w in weights)
    return *(tensor.to(device) for tensor in tensors), ExpertWeights(*moved)


@given(
    kind=st.sampled_from(FORMATS),
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 5),
    top_k=st.integers(1, 3),
    glu=st.sampled_from(GLUS),
    seed=st.integers(0, 100),
)
def test_against_float64(kind: str, num_tokens: int, num_experts: int, top_k: int, glu: Glu, seed: int) -> None:
    case = make_case(kind, num_tokens, num_experts, top_k, 256, 128, seed=seed)
    out = whole(compute_experts(*case, glu))
    assert out.dtype == torch.float32
    assert_near(out, brute_force(*case, glu, False), TOLERANCE[torch.float32])


@torch.no_grad()
def test_as_transformers() -> None:
    """DeepSeek-V4's experts clamp; those of DeepSeek-V3 do not."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Experts
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts

    x, ids, expert_weights, weights = make_case("plain", 20, 6, 3, 64, 40)
    ids = torch.rand(20, 6).argsort(1)[:, :3].int()
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "n_routed_experts": 6, "num_attention_heads": 4}
    modules = (
        (DeepseekV3Experts(DeepseekV3Config(**sizes)), SWIGLU),
        (DeepseekV4Experts(DeepseekV4Config(**sizes, swiglu_limit=0.3)), Glu(0.3, 0.3)),
    )
    for module, glu in modules:
        module.gate_up_proj.data, module.down_proj.data = weights
        wanted = module(x, ids.long(), expert_weights)
        torch.testing.assert_close(whole(compute_experts(x, ids, expert_weights, weights, glu)), wanted)


def compute_by_kernels(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: AnyWeight,
    down: AnyWeight,
    glu: Glu,
    quantized: QuantizedRows | None = None,
    is_deterministic: bool = False,
) -> Tensor:
    from dcpmla.model.kernels import experts as kernels

    codes = *fields(gate_up), *fields(down)
    num_experts = len(codes[4])
    is_few = len(x) <= 2 or (len(x) <= 4 and ids.numel() * 6 <= num_experts)
    call = RoutedRows(x, quantized, ids, weights, *codes, glu, num_experts, is_few, is_deterministic)
    out = kernels.compute_experts(call)
    return out if is_few and not is_deterministic else add_terms(out, ids, num_experts)


def value_dtypes_of(kind: str, dtype: torch.dtype, is_few: bool = False) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Return pairs of dtypes to which kernels may round values of the two weights, for rows in a dtype. Integers in
    groups of 64 or more columns are exact in products with few rows, of which the first needs fewer.
    """
    exact = torch.float32
    if not kind.startswith("int4"):
        return ((exact, exact),)
    held = torch.float16 if dtype == torch.float16 else torch.bfloat16
    if kind in ("int4", "int4_32_zeros"):
        return ((held, held),)
    return ((exact, exact),) if is_few else ((held, held), (exact, held), (exact, exact))


@nan_in_new_memory()
def check_kernels(device: str, dtype: torch.dtype, kinds: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Check few and many tokens, few of many experts, many of one; one expert for all of a token's routes, experts that
    few tokens take, or none.
    """
    hidden, width = sizes[-2:]
    for kind in kinds:
        for num_tokens, num_experts, top_k in [*((num, 5, 3) for num in sizes[:-2]), (4, 72, 3), (90, 1, 2)]:
            case = make_case(kind, num_tokens, num_experts, top_k, hidden, width, dtype, seed=num_tokens)
            ids = case[1]
            ids[:, 1] = torch.where(ids[:, 1] == 2, 3, ids[:, 1])
            ids[: num_tokens // 2] = torch.where(ids[: num_tokens // 2] == 2, 0, ids[: num_tokens // 2])
            ids[0], ids[-1, 0] = 4, -(2**31)  # one expert three times
            for glu in GLUS if num_tokens in (sizes[0], sizes[-3]) else (SWIGLU,):
                moved = on(device, case)
                out = compute_by_kernels(*moved[:3], *moved[3], glu)
                assert torch.equal(out, compute_by_kernels(*moved[:3], *moved[3], glu))
                # The last bits of h move its codes, by a sixteenth: of one row of few by a hundredth.
                tolerance = max(1e-2 if kind == "fp8" else 0, TOLERANCE[dtype])
                candidates = [
                    brute_force(*case, glu, kind == "fp8", pair)
                    for pair in value_dtypes_of(kind, dtype, num_tokens == 1)
                ]
                wanted = min(candidates, key=lambda each: (out.cpu().double() - each).norm())
                assert_near(out, wanted, tolerance)
                if kind in ("plain", "fp8"):
                    out = compute_by_kernels(*moved[:3], *moved[3], glu, is_deterministic=True)
                    assert_near(out, wanted, tolerance)
        case = make_case(kind, 40, 5, 2, hidden, width, dtype)
        for nobody in (torch.full_like(case[1], -1), torch.full_like(case[1], 5)):
            for num_tokens in (2, 40):
                x, _, expert_weights, weights = on(device, case)
                ids = nobody[:num_tokens].to(device)
                out = compute_by_kernels(x[:num_tokens], ids, expert_weights[:num_tokens], *weights, SWIGLU)
                assert not out.any()


def test_kernels_in_the_interpreter() -> None:
    run_kernels("cpu", partial(check_kernels, dtype=torch.float32, kinds=("plain",), sizes=(1, 21, 72, 40)))


def check_packed_kernels(device: str, kinds: tuple[str, ...]) -> None:
    """Check few tokens and many: tiles wider and narrower than groups."""
    for kind, num_tokens in itertools.product(kinds, (1, 21)):
        case = make_case(kind, num_tokens, 5, 3, 384, 128, torch.float32, seed=num_tokens)
        out = compute_by_kernels(*case[:3], *case[3], SWIGLU)
        # These sizes of tiles round either all values of integers in wide groups, or none.
        exact_or_not = value_dtypes_of(kind, torch.float32, num_tokens == 1)[0]
        assert_near(out, brute_force(*case, SWIGLU, False, exact_or_not), TOLERANCE[torch.float32])


def test_packed_kernels_in_the_interpreter() -> None:
    run_kernels("cpu", partial(check_packed_kernels, kinds=("fp4", "nvfp4", "int4", "int4_64", "int4_128_zeros")))


def check_given_codes(device: str) -> None:
    """Compare rows that were quantized before, in another order of their scales, with rows that the kernels quantize,
    and both with float64.
    """
    for num_tokens in (1, 3):
        x, ids, expert_weights, weights = case = make_case("fp8", num_tokens, 3, 2, 256, 128)
        rows = quantize_rows(x)
        out = compute_by_kernels(x, ids, expert_weights, *weights, SWIGLU)
        assert_near(out, brute_force(*case, SWIGLU, True), 4e-3)
        for scales in (rows.scales, rows.scales.contiguous()):
            given = QuantizedRows(rows.values, scales)
            assert torch.equal(compute_by_kernels(x * torch.nan, ids, expert_weights, *weights, SWIGLU, given), out)


def test_given_codes_in_the_interpreter() -> None:
    run_kernels("cpu", check_given_codes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_kernels(kind: str, dtype: torch.dtype) -> None:
    """At every tiling."""
    check_kernels("cuda", dtype, (kind,), (1, 2, 7, 30, 150, 600, 512, 256))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_of_uneven_sizes(dtype: torch.dtype) -> None:
    check_kernels("cuda", dtype, ("plain",), (1, 30, 600, 712, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_in_a_graph_at_deepseeks_sizes(kind: str) -> None:
    """Capture the public function, then replay it with other routes: nothing is read back while it is captured."""
    for num_tokens in (1, 40, 200):
        x, ids, expert_weights, weights = on("cuda", make_case(kind, num_tokens, 9, 4, 7168, 512, torch.bfloat16))
        other = ids.flip(0).flip(1).contiguous()
        wanted = whole(compute_experts(x, other, expert_weights, weights))
        if kind == "fp8":
            x = NormedRows(x, quantize_rows(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = whole(compute_experts(x, ids, expert_weights, weights))
        ids.copy_(other)
        graph.replay()
        assert torch.equal(out, wanted)


def test_mistakes() -> None:
    x, ids, expert_weights, weights = make_case("plain", 3, 4, 2, 64, 32)
    fp8 = make_case("fp8", 3, 4, 2, 256, 128)

    def refuses(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            compute_experts(*arguments)

    refuses(r"x is torch.float64 \(3, 64\); expected \[T, H\]", x.double(), ids, expert_weights, weights)
    refuses(r"expert_ids is torch.int64 \(3, 2\); expected int32 \[3, k\]", x, ids.long(), expert_weights, weights)
    refuses(r"expert_ids is torch.int32 \(2, 2\)", x, ids[:2], expert_weights, weights)
    refuses(
        r"expert_weights is torch.float32 \(3, 1\); expected float32 of \(3, 2\)",
        x,
        ids,
        expert_weights[:, :1],
        weights,
    )
    refuses("gate_up is fp8, down plain", fp8[0], ids, expert_weights, ExpertWeights(fp8[3].gate_up, weights.down))
    wrong = ExpertWeights(weights.gate_up[:, :-2], weights.down)
    refuses(r"gate_up is \(4, 62, 64\); expected \(4, 64, 64\)", x, ids, expert_weights, wrong)
    refuses("down is torch.float32", x.bfloat16(), ids, expert_weights, weights)
    gate_up = fp8[3].gate_up._replace(scales=fp8[3].gate_up.scales[:, :1])
    refuses(r"gate_up has codes .* and scales torch.float32 \(4, 1, 2\)", *fp8[:3], ExpertWeights(gate_up, fp8[3].down))
    narrow = ExpertWeights(*(w._replace(codes=w.codes[..., :-8]) for w in fp8[3]))
    refuses("down has 256 x 120 values an expert; scales need multiples of 128", *fp8[:3], narrow)
    refuses("on meta", x, ids.to("meta"), expert_weights, weights)
