"""What `mla_decode` refuses: arguments that do not belong together, by their names."""

import math
import re
from typing import Any

import pytest
import torch

from dcpmla.attention.backends.choice import (
    DECODE_BACKENDS,
    PREFILL_BACKENDS,
    Backend,
    passed_over,
    register_backend,
    select_backend,
)
from tests.attention.test_reference import L, R
from tests.support.backends import checked_call, decode, decode_call, only, prefill_call


def decode_arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 3, L + R),
        "kv_cache": torch.zeros(4, 8, L + R),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "softmax_scale": 1.0,
        "kv_lora_rank": L,
    }


INT, E4M3, ONE = torch.int32, torch.float8_e4m3fn, torch.ones(1)
LATENT, ROPE = torch.zeros(2, 3, L), torch.zeros(2, 3, R)
SHAPES = [  # argument, value, what is expected
    ("q", torch.zeros(2, L + R), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
    ("q", torch.zeros(2, 3, L - 1), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
    ("q", torch.tensor(0.0), "[T, H, kv_lora_rank + rope] with kv_lora_rank 6"),
    ("kv_cache", torch.zeros(32, L + R), "[num_blocks, block_size, 10]"),
    ("kv_cache", torch.zeros(4, 8, L), "[num_blocks, block_size, 10]"),
    ("block_table", torch.tensor(0, dtype=INT), "[num_rows, max_blocks]"),
    ("block_table", torch.zeros(2, dtype=INT), "[num_rows, max_blocks]"),
    ("block_table", torch.zeros(0, 2, dtype=INT), "[num_rows, max_blocks]"),
    ("query_start_loc", torch.zeros(2, dtype=INT), "[3], num_segments + 1"),
    ("query_start_loc", torch.tensor(0, dtype=INT), "[3], num_segments + 1"),
    ("seq_lens", torch.ones(3, dtype=INT), "expected [2]"),
    ("seq_lens", torch.ones(2, 1, dtype=INT), "expected [2]"),
]
FP8_CACHE = {"kv_cache": torch.zeros(4, 8, L + R).to(E4M3), "kv_scale": ONE}
FP8 = {**FP8_CACHE, "q": torch.zeros(2, 3, L + R).to(E4M3), "q_scale": ONE, "dtype": torch.float32}
ALONE = "e4m3 queries need an fp8 cache, q_scale and the output's dtype, other queries take no q_scale"
FLOAT32_IN_FP8 = f"q has dtype torch.float32, kv_cache {E4M3}, q_scale is"
# Dtypes and scales that do not belong together, and parts of queries that do not.
FORMATS = [
    (
        {**FP8, "q_scale": None},
        f"q has dtype {E4M3}, kv_cache {E4M3}, q_scale is missing and dtype is torch.float32; {ALONE}",
    ),
    ({**FP8, "dtype": None}, f"q has dtype {E4M3}, kv_cache {E4M3}, q_scale is given and dtype is None; {ALONE}"),
    (
        {**FP8, "kv_cache": torch.zeros(4, 8, L + R), "kv_scale": None},
        f"q has dtype {E4M3}, kv_cache torch.float32, q_scale is given",
    ),
    ({**FP8_CACHE, "q_scale": ONE}, f"{FLOAT32_IN_FP8} given and dtype is None"),
    ({**FP8_CACHE, "dtype": torch.bfloat16}, f"{FLOAT32_IN_FP8} missing and dtype is torch.bfloat16"),
    ({**FP8_CACHE, "kv_scale": None}, f"kv_scale is missing for a cache of {E4M3}"),
    ({**FP8_CACHE, "kv_scale": ONE.to("meta")}, "kv_scale is on meta; it must be on q's device, cpu"),
    ({**FP8, "q_scale": ONE.to("meta")}, "q_scale is on meta; it must be on q's device, cpu"),
    ({**FP8, "q_scale": torch.ones(2)}, "q_scale is torch.float32 (2,); expected torch.float32 of one element"),
    (
        {"q": (LATENT, ROPE[:1])},
        f"q has parts of shapes (2, 3, {L}) and (1, 3, {R}); expected [T, H, kv_lora_rank] and",
    ),
    ({"q": (LATENT[..., 1:], ROPE)}, f"q has parts of shapes (2, 3, {L - 1}) and (2, 3, {R}); expected"),
    ({"q": (LATENT, ROPE[..., :0])}, f"q has parts of shapes (2, 3, {L}) and (2, 3, 0); expected"),
    ({"q": (LATENT[0], ROPE[0])}, f"q has parts of shapes (3, {L}) and (3, {R}); expected"),
    (
        {"q": (LATENT, ROPE.double())},
        "q has parts of torch.float32 on cpu and torch.float64 on cpu; they must be alike",
    ),
    ({"q": (LATENT, ROPE.to("meta"))}, "q has parts of torch.float32 on cpu and torch.float32 on meta; they must"),
]
UNREADABLE = [  # by kernels
    {"seq_lens": torch.ones(2, dtype=torch.int64)},
    {"seq_lens": torch.ones(4, dtype=INT)[::2]},
    {"block_table": torch.zeros(2, 4, dtype=INT)[:, ::2]},
    {"query_start_loc": torch.zeros(3, dtype=torch.int64), "max_query_len": 1},
]
WORKSPACES = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2), torch.zeros(4, device="meta")
MISTAKES: list[tuple[dict[str, Any], str]] = [  # changes of the arguments, and a pattern that the message begins with
    *(
        ({name: value}, rf"{name} has shape {re.escape(str(tuple(value.shape)))}.*{re.escape(expected)}")
        for name, value, expected in SHAPES
    ),
    *((changes, re.escape(message)) for changes, message in FORMATS),
    *((changes, f"{next(iter(changes))} has dtype .* expected int32 with contiguous rows") for changes in UNREADABLE),
    *(({"workspace": x}, f"workspace is {x.dtype} .* on {x.device}; expected one from decode_w") for x in WORKSPACES),
    *(({"kv_lora_rank": rank}, f"q has shape .* kv_lora_rank {rank}$") for rank in (0, -1, L + R + 1)),
    *(({"softmax_scale": scale}, f"softmax_scale is {scale}; it must be positive") for scale in (0.0, -1.0, math.nan)),
    *(
        ({"q": torch.zeros(2, 3, L + R).to(dtype)}, f"q has dtype {dtype}; ")
        for dtype in (INT, torch.int8, torch.bool, torch.float8_e5m2)
    ),
    *(
        ({"q": torch.zeros(2, 3, L + R, dtype=dtype)}, f"kv_cache has dtype torch.float32; expected q's, {dtype}")
        for dtype in (torch.float64, torch.bfloat16)
    ),
    *(
        ({name: decode_arguments()[name].to("meta")}, f"{name} is on meta; it must be on q's device, cpu")
        for name in ("kv_cache", "block_table", "seq_lens")
    ),
    ({"block_table": torch.zeros(3, 2, dtype=INT)}, "q has 2 tokens for 3 segments; .* max_query_len, 1$"),
    ({"block_table": torch.zeros(1, 2, dtype=INT)}, "q has 2 tokens for 1 segments"),  # a table of another batch
    ({"max_query_len": 2}, "q has 2 tokens for 2 segments; .* max_query_len, 2$"),
    ({"max_query_len": 0, "query_start_loc": torch.zeros(3, dtype=INT)}, "max_query_len is 0; "),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda x: x if isinstance(x, str) else "")
def test_decode_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        decode(**{**decode_arguments(), **changes})


def test_a_device_without_a_backend() -> None:
    q = torch.empty(1, 2, L + R, device="meta")
    for table, call in (
        (DECODE_BACKENDS, decode_call(q, q[None], L, torch.float32)),
        (PREFILL_BACKENDS, prefill_call(q, q[:, 0], q)),
    ):
        with pytest.raises(ValueError, match=r"; torch: q is on device meta, not 'cpu' or 'cuda'$"):
            select_backend(table, call)


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
