"""What `mla_decode` refuses: arguments that do not belong together, by their names."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends.choice import DECODE_BACKENDS, Backend, passed_over, register_backend, select_backend
from tests.attention.test_reference import L, R
from tests.support.backends import checked_call, decode, decode_call, only


def decode_arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 3, L + R),
        "kv_cache": torch.zeros(4, 8, L + R),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "softmax_scale": 1.0,
        "kv_lora_rank": L,
    }


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("q", torch.zeros(2, L + R), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
        ("q", torch.zeros(2, 3, L - 1), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
        ("kv_cache", torch.zeros(32, L + R), "[num_blocks, block_size, 10]"),
        ("kv_cache", torch.zeros(4, 8, L), "[num_blocks, block_size, 10]"),
        ("q", torch.tensor(0.0), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
        ("block_table", torch.tensor(0, dtype=torch.int32), "[num_rows, max_blocks]"),
        ("block_table", torch.zeros(2, dtype=torch.int32), "[num_rows, max_blocks]"),
        ("block_table", torch.zeros(0, 2, dtype=torch.int32), "[num_rows, max_blocks]"),
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), "[3], num_segments + 1"),
        ("query_start_loc", torch.tensor(0, dtype=torch.int32), "[3], num_segments + 1"),
        ("seq_lens", torch.ones(3, dtype=torch.int32), "expected [2]"),
        ("seq_lens", torch.ones(2, 1, dtype=torch.int32), "expected [2]"),
    ],
)
def test_decode_names_the_wrong_shape(argument: str, value: Tensor, expected: str) -> None:
    decode(**decode_arguments())
    with pytest.raises(ValueError, match=f"^{argument} has shape ") as error:
        decode(**{**decode_arguments(), argument: value})
    assert str(tuple(value.shape)) in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "workspace", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2), torch.zeros(4, device="meta")]
)
def test_decode_names_a_wrong_workspace(workspace: Tensor) -> None:
    with pytest.raises(
        ValueError,
        match=f"^workspace is {workspace.dtype} .* on {workspace.device}; expected one from decode_workspace",
    ):
        decode(**{**decode_arguments(), "workspace": workspace})


def test_decode_names_dtypes_and_scales_that_do_not_belong() -> None:
    e4m3, one = torch.float8_e4m3fn, torch.ones(1)
    fp8_cache = {**decode_arguments(), "kv_cache": torch.zeros(4, 8, L + R).to(e4m3), "kv_scale": one}
    fp8 = {**fp8_cache, "q": torch.zeros(2, 3, L + R).to(e4m3), "q_scale": one, "dtype": torch.float32}
    alone = "e4m3 queries need an fp8 cache, q_scale and the output's dtype, other queries take no q_scale"
    assert decode(**fp8)[0].dtype == torch.float32
    for arguments, message in (
        (
            {**fp8, "q_scale": None},
            f"q has dtype {e4m3}, kv_cache {e4m3}, q_scale is missing and dtype is torch.float32; {alone}",
        ),
        ({**fp8, "dtype": None}, f"q has dtype {e4m3}, kv_cache {e4m3}, q_scale is given and dtype is None; {alone}"),
        (
            {**fp8, "kv_cache": torch.zeros(4, 8, L + R), "kv_scale": None},
            f"q has dtype {e4m3}, kv_cache torch.float32, q_scale is given",
        ),
        (
            {**fp8_cache, "q_scale": one},
            f"q has dtype torch.float32, kv_cache {e4m3}, q_scale is given and dtype is None",
        ),
        (
            {**fp8_cache, "dtype": torch.bfloat16},
            f"q has dtype torch.float32, kv_cache {e4m3}, q_scale is missing and dtype is torch.bfloat16",
        ),
        ({**fp8_cache, "kv_scale": None}, f"kv_scale is missing for a cache of {e4m3}"),
        ({**fp8_cache, "kv_scale": one.to("meta")}, "kv_scale is on meta; it must be on q's device, cpu"),
        ({**fp8, "q_scale": one.to("meta")}, "q_scale is on meta; it must be on q's device, cpu"),
        ({**fp8, "q_scale": torch.ones(2)}, "q_scale is torch.float32 (2,); expected torch.float32 of one element"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            decode(**arguments)


def test_decode_names_parts_of_queries_that_do_not_belong() -> None:
    """As a tuple they are taken without being joined."""
    latent, rope = torch.zeros(2, 3, L), torch.zeros(2, 3, R)
    assert decode(**{**decode_arguments(), "q": (latent, rope)})[0].shape == (2, 3, L)
    for parts, message in (
        ((latent, rope[:1]), f"q has parts of shapes (2, 3, {L}) and (1, 3, {R}); expected [T, H, kv_lora_rank] and"),
        ((latent[..., 1:], rope), f"q has parts of shapes (2, 3, {L - 1}) and (2, 3, {R}); expected"),
        ((latent, rope[..., :0]), f"q has parts of shapes (2, 3, {L}) and (2, 3, 0); expected"),
        ((latent[0], rope[0]), f"q has parts of shapes (3, {L}) and (3, {R}); expected"),
        ((latent, rope.double()), "q has parts of torch.float32 on cpu and torch.float64 on cpu; they must be alike"),
        ((latent, rope.to("meta")), "q has parts of torch.float32 on cpu and torch.float32 on meta; they must"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            decode(**{**decode_arguments(), "q": parts})


@pytest.mark.parametrize("kv_lora_rank", [0, -1, L + R + 1])
def test_decode_names_the_wrong_rank(kv_lora_rank: int) -> None:
    with pytest.raises(ValueError, match=f"kv_lora_rank {kv_lora_rank}$"):
        decode(**{**decode_arguments(), "kv_lora_rank": kv_lora_rank})


def test_a_device_without_a_backend() -> None:
    rows = torch.empty(1, 1, L + R, device="meta"), torch.empty(1, 4, L + R, device="meta")
    with pytest.raises(ValueError, match=r"; torch: q is on device meta, not 'cpu' or 'cuda'$"):
        select_backend(DECODE_BACKENDS, decode_call(*rows, L, torch.float32))


def test_decode_names_wrong_query_lens() -> None:
    arguments = decode_arguments()
    with pytest.raises(ValueError, match="^q has 2 tokens for 3 segments; .* max_query_len, 1$"):
        decode(**{**arguments, "block_table": torch.zeros(3, 2, dtype=torch.int32)})
    with pytest.raises(ValueError, match="^q has 2 tokens for 1 segments"):  # a table of another batch
        decode(**{**arguments, "block_table": torch.zeros(1, 2, dtype=torch.int32)})
    with pytest.raises(ValueError, match="^q has 2 tokens for 2 segments; .* max_query_len, 2$"):
        decode(**arguments, max_query_len=2)
    with pytest.raises(ValueError, match="^max_query_len is 0; "):
        decode(**arguments, max_query_len=0, query_start_loc=torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.float8_e5m2])
def test_decode_names_queries_that_are_no_numbers_of_ours(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"^q has dtype {dtype}; "):
        decode(**{**decode_arguments(), "q": torch.zeros(2, 3, L + R).to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_decode_names_queries_and_a_cache_of_different_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"^kv_cache has dtype torch.float32; expected q's, {dtype}"):
        decode(**{**decode_arguments(), "q": torch.zeros(2, 3, L + R, dtype=dtype)})


@pytest.mark.parametrize("argument", ["kv_cache", "block_table", "seq_lens"])
def test_decode_names_what_is_on_another_device(argument: str) -> None:
    arguments = decode_arguments()
    with pytest.raises(ValueError, match=f"^{argument} is on meta; it must be on q's device, cpu"):
        decode(**{**arguments, argument: arguments[argument].to("meta")})


def test_a_backend_by_name() -> None:
    out, _ = decode(**decode_arguments(), backend="torch")
    assert out.shape == (2, 3, L)
    with pytest.raises(ValueError, match="^backend is 'hopper', which does not take this call: q is on device cpu"):
        decode(**decode_arguments(), backend="hopper")
    with pytest.raises(ValueError, match="^backend is 'cuda'; expected 'auto' or one of hopper, triton, "):
        decode(**decode_arguments(), backend="cuda")


def test_a_backend_of_ones_own() -> None:
    ours = Backend("ours", lambda call: "" if call.q.shape[0] > 1 else "one token", lambda call: call.new_output())
    one = {
        name: value[:1] if name in ("q", "block_table", "seq_lens") else value
        for name, value in decode_arguments().items()
    }
    with only(DECODE_BACKENDS, *DECODE_BACKENDS):
        register_backend(DECODE_BACKENDS, ours)
        assert select_backend(DECODE_BACKENDS, checked_call(**decode_arguments())) is ours
        call = checked_call(**one)
        assert select_backend(DECODE_BACKENDS, call).name == "torch"
        assert list(passed_over(DECODE_BACKENDS, call)) == ["ours", "hopper", "triton"]
        assert passed_over(DECODE_BACKENDS, call)["ours"] == "one token"
        with pytest.raises(ValueError, match="^backend.name is 'ours'; it must be new to the table"):
            register_backend(DECODE_BACKENDS, ours)


@pytest.mark.parametrize("softmax_scale", [0.0, -1.0, math.nan])
def test_decode_names_a_scale_that_is_not_positive(softmax_scale: float) -> None:
    with pytest.raises(ValueError, match=f"^softmax_scale is {softmax_scale}; it must be positive"):
        decode(**{**decode_arguments(), "softmax_scale": softmax_scale})


@pytest.mark.parametrize(
    "numbers",
    [
        {"seq_lens": torch.ones(2, dtype=torch.int64)},
        {"seq_lens": torch.ones(4, dtype=torch.int32)[::2]},
        {"block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
        {"query_start_loc": torch.zeros(3, dtype=torch.int64), "max_query_len": 1},
    ],
)
def test_decode_names_numbers_that_kernels_cannot_read(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(numbers))} has dtype .* expected int32 with contiguous rows"):
        decode(**{**decode_arguments(), **numbers})
