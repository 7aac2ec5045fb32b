"""Hyper-connections: the reference against transformers' modules, the kernels against the reference.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.model.mixing import Constants, Mixing, Projection, Streams
from dcpmla.model.streams import Connection, DelayedCollapse, enter, finish, mix
from dcpmla.parallel.quantized import AnyRows, NormedRows, plain, quantize_groups
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.kernels import nan_in_new_memory, run_kernels

CONSTANTS = Constants(eps=1e-6, stream_eps=1e-5, num_iters=5)
INDEPENDENT = Constants(eps=1e-6, stream_eps=1e-5, num_iters=0, post_scale=1.5, post_eps=1e-5)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_case(
    num_tokens: int,
    num_streams: int,
    width: int,
    dtype: torch.dtype,
    has_mixing: bool,
    is_head: bool,
    device: str,
    mixes: bool = True,
) -> tuple[Streams, Projection, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens + num_streams)

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(device)

    values, scale = random(num_tokens, num_streams, width).to(dtype), [0.9] if is_head else [0.9, 1.1, 0.7][: 2 + mixes]
    num = num_streams * (1 if is_head else 2 + num_streams * mixes)
    comb = random(num_tokens, num_streams, num_streams).softmax(-1) if mixes else None
    mixing = Mixing(random(num_tokens, num_streams).sigmoid(), comb) if has_mixing else None
    out = random(num_tokens, width).to(dtype) if has_mixing else None
    weights = random(num, num_streams * width, std=0.1), random(num)
    projection = Projection(*weights, torch.tensor(scale, device=device))
    return Streams(values, mixing, out), projection, random(width).abs()


@pytest.mark.parametrize(("num_streams", "mixes"), [(1, True), (2, True), (4, True), (4, False)])
@torch.no_grad()
def test_as_transformers(num_streams: int, mixes: bool) -> None:
    """A part's input, and the streams after it, as its decoder layer computes them; streams may be independent."""
    if mixes:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

        config = v4.DeepseekV4Config(hidden_size=48, hc_mult=num_streams, hc_sinkhorn_iters=5, hc_eps=1e-5)
        theirs, their_norm = v4.DeepseekV4HyperConnection(config), v4.DeepseekV4RMSNorm(48, config.rms_norm_eps)
    else:
        hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
        config = hy.HYV4Config(hidden_size=48, hc_mult=4, hc_eps=1e-5, hc_magnitude=1.5, rms_norm_eps=1e-6)
        theirs, their_norm = hy.HYV4HyperConnection(config), hy.HYV4RMSNorm(48, config.rms_norm_eps)
    before, projection, norm = make_case(7, num_streams, 48, torch.float32, False, False, "cpu", mixes)
    theirs.fn.data, theirs.base.data, theirs.scale.data = projection
    their_norm.weight.data = norm
    post, *comb, collapsed = theirs(before.values[None])
    x, streams = Connection(projection, norm, CONSTANTS if mixes else INDEPENDENT)(before)
    torch.testing.assert_close(x, their_norm(collapsed)[0])
    out = torch.randn(7, 48)
    mixed = comb[0].transpose(-1, -2) @ before.values if mixes else before.values[None]
    expected = post[..., None] * out[:, None] + mixed
    torch.testing.assert_close(finish(streams._replace(out=out)), expected[0])


@torch.no_grad()
def test_the_head_as_transformers() -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    config = v4.DeepseekV4Config(hidden_size=48, hc_mult=4, hc_eps=1e-5)
    streams, projection, norm = make_case(7, 4, 48, torch.float32, False, True, "cpu")
    theirs, their_norm = v4.DeepseekV4HyperHead(config), v4.DeepseekV4RMSNorm(48, config.rms_norm_eps)
    theirs.hc_fn.data, theirs.hc_base.data, theirs.hc_scale.data = projection
    their_norm.weight.data = norm
    found = Connection(projection, norm, CONSTANTS).collapse(streams.values.flatten(1))
    torch.testing.assert_close(found, their_norm(theirs(streams.values[None]))[0])


def weights_in_float64(values: Tensor, projection: Projection, constants: Constants) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weights [T, S], [T, S], [T, S, S] of streams [T, S, hidden], stream by stream."""
    (num_tokens, num_streams, _), flat = values.shape, values.flatten(1)
    rms = (flat.square().mean(1) + constants.eps).sqrt()
    numbers = flat @ projection.fn.double().T / rms[:, None]
    base, scale = projection.base.double(), projection.scale.double()
    pre = (numbers[:, :num_streams] * scale[0] + base[:num_streams]).sigmoid() + constants.stream_eps
    middle = slice(num_streams, 2 * num_streams)
    post = constants.post_scale * (numbers[:, middle] * scale[1] + base[middle]).sigmoid()
    logits = numbers[:, 2 * num_streams :] * scale[2] + base[2 * num_streams :]
    comb = logits.view(num_tokens, num_streams, num_streams).softmax(2) + constants.stream_eps
    for iteration in range(constants.num_iters):
        if iteration:
            comb = comb / (comb.sum(2, keepdim=True) + constants.stream_eps)
        comb = comb / (comb.sum(1, keepdim=True) + constants.stream_eps)
    return pre, post, comb


@pytest.mark.parametrize("num_streams", [1, 2, 4])
@torch.no_grad()
def test_delayed_connections_in_float64(num_streams: int) -> None:
    """Three parts and the head: each takes the weights of the connection before, the first one stream 0."""
    constants = CONSTANTS._replace(delays=True)
    cases = [make_case(num_tokens, num_streams, 48, torch.float32, False, False, "cpu") for num_tokens in (7, 8, 9)]
    streams = cases[0][0]
    values = streams.values.double()
    pre = torch.zeros(7, num_streams, dtype=torch.float64)
    pre[:, 0] = 1

    def collapse(norm: Tensor) -> Tensor:
        row = torch.stack([pre[:, j, None] * values[:, j] for j in range(num_streams)]).sum(0)
        return row / (row.square().mean(1, keepdim=True) + constants.eps).sqrt() * norm.double()

    for number, (_, projection, norm) in enumerate(cases):
        x, streams = Connection(projection, norm, constants)(streams)
        torch.testing.assert_close(plain(x).double(), collapse(norm), atol=2e-5, rtol=2e-5)
        out = torch.randn(7, 48, generator=torch.Generator().manual_seed(number))
        streams = streams._replace(out=out)
        pre, post, comb = weights_in_float64(values, projection, constants)
        mixed = [sum(comb[:, j, s, None] * values[:, j] for j in range(num_streams)) for s in range(num_streams)]
        values = torch.stack([post[:, s, None] * out.double() + mixed[s] for s in range(num_streams)], 1)
    norm = cases[0][2]
    x, streams = DelayedCollapse(norm, constants.eps)(streams)
    torch.testing.assert_close(x.double(), collapse(norm), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(finish(streams).double(), values, atol=2e-5, rtol=2e-5)


def check_quantized(rows: AnyRows, x: Tensor) -> None:
    assert isinstance(rows, NormedRows)
    assert torch.equal(rows.plain, x)
    codes, scales = quantize_groups(x.cpu(), 128)
    assert torch.equal(rows.quantized.values.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(rows.quantized.scales.cpu(), scales)


@nan_in_new_memory()
def check_kernels(device: str, dtype: torch.dtype, cases: tuple[tuple[int, int, int], ...]) -> None:
    from dcpmla.model.kernels import mix as mixing_kernels
    from dcpmla.model.kernels import streams as kernels

    for num_tokens, num_streams, width in cases:
        kinds = [(False, False, True), (True, False, True), (True, True, True), (False, True, True)]
        kinds += [(True, False, False)]
        delayed = [(False, False, True), (True, False, True)]  # at the first connection, and after
        for index, (has_mixing, is_head, mixes) in enumerate(kinds + delayed):
            streams, projection, norm = make_case(
                num_tokens, num_streams, width, dtype, has_mixing, is_head, device, mixes
            )
            constants = CONSTANTS if mixes else INDEPENDENT
            if index >= len(kinds):
                constants = constants._replace(delays=True)
                pre = torch.rand(num_tokens, num_streams, device=device)
                streams = streams._replace(pre=pre if has_mixing else None)
            case = streams, projection, norm
            wanted, wanted_streams = enter(*case, constants)
            x, found = kernels.enter(*case, constants)
            pairs: list[Any] = [(plain(x), wanted), (found.values, wanted_streams.values)]
            assert (found.mixing is None) == is_head
            if found.mixing is not None and wanted_streams.mixing is not None:
                assert (found.mixing.comb is None) == (not mixes)
                pairs += list(zip(found.mixing, wanted_streams.mixing, strict=True))[: 1 + mixes]
            assert (found.pre is None) == (wanted_streams.pre is None) == (not constants.delays)
            if found.pre is not None and wanted_streams.pre is not None:
                pairs += [(found.pre, wanted_streams.pre)]
            pairs += [(mixing_kernels.mix(case[0]), mix(case[0]))]
            for got, expected in pairs:
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)
            assert torch.equal(plain(x), plain(kernels.enter(*case, constants)[0]))
            if width % 128 == 0:
                check_quantized(kernels.enter(*case, constants, quantizes=True)[0], plain(x))


def test_kernels_in_the_interpreter() -> None:
    """For few tokens, for more than 16, and for none."""
    cases = (1, 4, 80), (17, 3, 128), (0, 4, 64)
    run_kernels("cpu", partial(check_kernels, dtype=torch.float32, cases=cases))


@pytest.mark.thorough
def test_more_shapes_in_the_interpreter() -> None:
    for dtype, cases in ((torch.float32, ((19, 3, 128), (5, 1, 48))), (torch.float16, ((3, 2, 130),))):
        run_kernels("cpu", partial(check_kernels, dtype=dtype, cases=cases))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels(dtype: torch.dtype) -> None:
    check_kernels(
        "cuda", dtype, ((1, 4, 4096), (3, 4, 7168), (40, 4, 4096), (3000, 4, 1024), (19, 3, 200), (7, 8, 512))
    )


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize(("has_out", "num"), [(True, 24), (False, 4), (True, 0), (True, 8)])
def test_the_first_kernel_compiles(has_out: bool, num: int, is_few: bool) -> None:
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.mix import mix_few_kernel, mix_kernel

    floats = ("post_ptr", "comb_ptr", "fn_ptr", "products_ptr", "squares_ptr")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("values_ptr", "out_ptr", "mixed_ptr"), "*bf16")
    constants: dict[str, Any] = {"WIDTH": 4096, "STREAMS": 4, "NUM": num, "NUM_P": 32 if num > 16 else 16}
    constants |= {} if has_out else dict.fromkeys(("out_ptr", "post_ptr", "comb_ptr"))
    constants |= {} if num else {"fn_ptr": None}
    constants |= {"comb_ptr": None} if num == 8 else {}  # streams that are not mixed with each other
    kernel = mix_few_kernel if is_few else mix_kernel
    ptx, said = compile_for_hopper(kernel, ASTSource, types, constants, num_warps=4, num_stages=2)
    assert ("mma" in ptx and "tf32" in ptx) == (num > 0 and not is_few)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    assert int(spilled) <= (0 if is_few else 512)  # the largest tile was measured to be worth it


@pytest.mark.parametrize(
    ("is_head", "mixes", "delays"),
    [(False, True, False), (True, True, False), (False, False, False), (False, True, True)],
)
def test_the_second_kernel_compiles(is_head: bool, mixes: bool, delays: bool) -> None:
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.streams import weigh_kernel

    inputs = ("products_ptr", "squares_ptr", "base_ptr", "scale_ptr", "norm_ptr", "pre_ptr")
    outputs = ("post_ptr", "comb_ptr", "next_pre_ptr")
    types = dict.fromkeys(inputs + outputs, "*fp32") | dict.fromkeys(("values_ptr", "x_ptr"), "*bf16")
    types |= dict.fromkeys(("eps", "stream_eps", "post_scale", "post_eps"), "fp32")
    types |= {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    constants: dict[str, Any] = {"WIDTH": 7168, "WIDTH_P": 8192, "STREAMS": 4, "STREAMS_P": 4}
    constants |= {"NUM_P": 16 if is_head else 32, "PARTS_P": 128, "NUM_ITERS": 20}
    constants |= dict.fromkeys(("post_ptr", "comb_ptr", "codes_ptr", "scales_ptr")) if is_head else {}
    constants |= {} if mixes else {"comb_ptr": None, "NUM_P": 16}
    constants |= {} if delays else dict.fromkeys(("pre_ptr", "next_pre_ptr"))
    ptx, said = compile_for_hopper(weigh_kernel, ASTSource, types, constants, num_warps=16)
    assert "0 bytes spill stores" in said
    assert ptx.count("bar.sync") < 40  # none in an iteration
