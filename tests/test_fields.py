"""Every field of the configurations: what it refuses, by its name, and its option where it has one."""

import dataclasses
import math
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.fields import FLAG, TEXT, Rule, check_fields, either, list_of, number, one_of, optional, tuple_of, whole
from dcpmla.indexer_config import IndexerConfig
from tests.support.layouts import dcp_config

INDEXER = IndexerConfig(num_heads=4, head_dim=32, topk=64, rope_interleaved=False)
MLA = MLAConfig(
    hidden_size=128,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    softmax_scale=0.2,
    llama_4_scaling=(0.1, 8192),
    indexer=INDEXER,
)
ROOM = DCPConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
NONSENSE = (0, -1, 10**12, 10**400, -0.5, 1.5, math.nan, math.inf, -math.inf, True, "x", "", None, [], {}, (1, 2, 3))
OPTIONS = {
    "tensor_parallel_size": "-tp",
    "decode_context_parallel_size": "-dcp",
    "exchange_timeout": "--dcp-exchange-timeout",
}
FLOATS = ("softmax_scale", "rms_norm_eps", "norm_eps", "kv_lora_scale", "exchange_timeout", "kv_cache_scale")


def fits(config: Any, name: str, value: object) -> bool:
    """Whether a field may hold one of NONSENSE, by the field's kind."""
    current = getattr(config, name)
    if value is None:
        return name in ("q_lora_rank", "llama_4_scaling", "indexer", "window", "kv_cache_scale", "kv_hot_tokens")
    if isinstance(current, bool):
        return isinstance(value, bool)
    if name == "num_gates":
        return isinstance(value, int) and not isinstance(value, bool) and value == 0
    if name in FLOATS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (0 < value < 1e38 or (name.endswith("norm_eps") and value == 0))
    if name in ("attention_backend", "prefill_backend"):
        return isinstance(value, str) and value != ""
    is_large = not isinstance(value, bool) and value in (10**12, 10**400)
    return is_large and name in ("context_workspace_tokens", "kv_hot_tokens")


@pytest.mark.parametrize(
    ("config", "name"),
    [(config, field.name) for config in (MLA, INDEXER, ROOM) for field in dataclasses.fields(config)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_nonsense_is_refused_by_name(config: Any, name: str) -> None:
    label = name
    if config is INDEXER:
        label = f"indexer.{name}"
    elif config is ROOM and name != "context_workspace_tokens":
        label = f"{name} ({OPTIONS.get(name, '--' + name.replace('_', '-'))})"
    for value in NONSENSE:
        if fits(config, name, value):
            continue
        with pytest.raises(ValueError, match="^" + re.escape(label) + r" is .+; it must (be|divide) "):
            replace(config, **{name: value})


def test_what_fits_is_taken() -> None:
    for config in (MLA, INDEXER, ROOM):
        assert replace(config) == config
    assert replace(MLA, q_lora_rank=None, llama_4_scaling=None, indexer=None, rms_norm_eps=0).indexer is None
    assert replace(ROOM, kv_cache_dtype="fp8", kv_cache_scale=1).kv_cache_scale == 1


def test_fields_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"^indexer.head_dim is 32; it must be at least qk_rope_head_dim 34$"):
        replace(MLA, qk_rope_head_dim=34)
    with pytest.raises(ValueError, match=r"^qk_rope_head_dim is 7; it must be an even number"):
        replace(MLA, qk_rope_head_dim=7)
    with pytest.raises(ValueError, match=r"^llama_4_scaling is \(0.1, 0\); it must be a pair"):
        replace(MLA, llama_4_scaling=(0.1, 0))
    with pytest.raises(ValueError, match=r"^window is 9; it must be None in a layer with an indexer$"):
        replace(MLA, window=9)
    assert [replace(MLA, **fields).topk for fields in ({}, {"indexer": None})] == [64, None]
    assert replace(MLA, indexer=None, window=9).topk == 9


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
RULES: dict[str, tuple[Rule, Any]] = {
    "whole": (whole(-2, 5), lambda value: type(value) is int and -2 <= value <= 5),
    "whole without end": (whole(1), lambda value: type(value) is int and value >= 1),
    "number": (number(0, 1), lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "number above": (
        number(0, above=True),
        lambda value: type(value) in (int, float) and 0 < value < math.inf and float(value) > 0,
    ),
    "flag": (FLAG, lambda value: type(value) is bool),
    "text": (TEXT, lambda value: type(value) is str and len(value) > 0),
    "choice": (one_of(("a", "b")), lambda value: type(value) is str and value in ("a", "b")),
    "optional": (optional(FLAG), lambda value: value is None or type(value) is bool),
    "list": (list_of(FLAG), lambda value: type(value) is list and all(type(item) is bool for item in value)),
    "two": (
        list_of(FLAG, 2),
        lambda value: type(value) is list and len(value) == 2 and all(type(item) is bool for item in value),
    ),
    "tuple": (tuple_of(FLAG), lambda value: type(value) is tuple and all(type(item) is bool for item in value)),
    "either": (either(FLAG, TEXT), lambda value: type(value) is bool or (type(value) is str and value != "")),
}


@pytest.mark.parametrize("name", RULES)
@given(value=anything | st.lists(st.booleans(), max_size=3) | st.tuples(st.booleans()) | st.sampled_from("ab"))
def test_rules_take_any_value(name: str, value: object) -> None:
    rule, expected = RULES[name]
    assert rule.holds(value) == expected(value)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(ValueError, match=r"^size is 'x{79}\.\.\.; it must be a whole number in \[1, 4\]$"):
        check_fields({"size": whole(1, 4)}, {"size": "x" * 500})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 6, "decode_context_parallel_size": 4},
            "decode_context_parallel_size (-dcp) is 4; it must divide tensor_parallel_size (-tp) 6: choose 1, 2, 3 "
            "or 6",
        ),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 4},
            "decode_context_parallel_size (-dcp) is 4; it must divide tensor_parallel_size (-tp) 2: choose 1 or 2",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size (-tp) is 0; it must be a whole number in [1, 65536]"),
        (
            {"cp_kv_cache_interleave_size": 16, "block_size": 40},
            "cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is 16; it must divide block_size "
            "(--block-size) 40",
        ),
        (
            {"exchange_timeout": 0},
            "exchange_timeout (--dcp-exchange-timeout) is 0; it must be a finite number above 0, in seconds",
        ),
        (
            {"index_cache_dtype": "bf16"},
            "index_cache_dtype (--index-cache-dtype) is 'bf16'; it must be one of auto, fp8",
        ),
        ({"dcp_comm_backend": "nvlink"}, "dcp_comm_backend (--dcp-comm-backend) is 'nvlink'; it must be one of auto, "),
        (
            {
                "tensor_parallel_size": 6,
                "decode_context_parallel_size": 6,
                "cp_kv_cache_interleave_size": 16,
                "context_workspace_tokens": 191,
            },
            "context_workspace_tokens is 191; a context chunk needs at least lcm(block_size, dcp x interleave) = 192",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        DCPConfig(**options)


@pytest.mark.parametrize(
    ("size", "interleave", "block_size", "virtual", "alignment"),
    [
        (1, 1, 64, 64, 64),
        (8, 1, 64, 512, 64),
        (3, 1, 64, 192, 192),
        (6, 16, 64, 384, 192),
        (5, 16, 64, 320, 320),
        (5, 2, 6, 30, 30),
    ],
)
def test_sizes_of_blocks_and_chunks(size: int, interleave: int, block_size: int, virtual: int, alignment: int) -> None:
    dcp = dcp_config(size, size, interleave, block_size=block_size)
    assert dcp.virtual_block_size == virtual
    multiples = [
        tokens for tokens in range(1, virtual + 1) if tokens % block_size == 0 and tokens % (size * interleave) == 0
    ]
    assert dcp.chunk_alignment == multiples[0] == alignment


def test_configs_are_frozen_and_named() -> None:
    dcp = DCPConfig()
    with pytest.raises(FrozenInstanceError):
        dcp.block_size = 128  # type: ignore[misc]
    with pytest.raises(TypeError):
        DCPConfig(8, 8)  # type: ignore[misc]
