"""Checks of a model's JSON files: every field that transformers' modules or this package read, by its name.

transformers checks types alone, and takes a size of 0, -1 or 10^12 until something fails far from its cause.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dcpmla.fields import (
    EVEN_SIZE,
    FLAG,
    LARGEST_SIZE,
    OBJECT,
    SIZE,
    TEXT,
    Rule,
    check_fields,
    either,
    list_of,
    number,
    one_of,
    only,
    optional,
    whole,
)
from dcpmla.hf_quantization import check_quantization
from dcpmla.integrations.families.routing import Routing, num_routed_experts

_NUM_EXPERTS = whole(1, 1 << 16)
_THETA = number(1, above=True)
_POSITIVE = number(0, above=True)
_TOKEN_IDS = optional(either(whole(0), list_of(whole(0))))
_DTYPE = optional(one_of(("float32", "bfloat16", "float16", "float64")))
_LETTERS = Rule("text of F and S", lambda value: isinstance(value, str) and not set(value) - {"F", "S"})
_INDEXER_TYPES = list_of(one_of(("full", "shared")))
_RATES = Rule(
    "an object of whole numbers of at least 2",
    lambda value: isinstance(value, dict) and all(whole(2, 1 << 16).holds(rate) for rate in value.values()),
)
_POSITIONS = whole(1, (1 << 31) - 1)
_ROPE_TYPE = one_of(("default", *ROPE_INIT_FUNCTIONS))
# Rules for the fields of all families; fields that a config lacks are skipped.
_CONFIG_RULES = {
    "num_layers": whole(1, 512),  # LongCat's, of two layers each
    "num_hidden_layers": whole(1, 1024),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "ffn_hidden_size"), SIZE),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "num_attention_heads"), SIZE),
    **dict.fromkeys(("num_key_value_heads", "q_lora_rank", "qk_head_dim"), optional(SIZE)),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), SIZE),
    "head_dim": whole(0, LARGEST_SIZE),  # 0 without a rotary embedding
    "max_position_embeddings": whole(2, (1 << 31) - 1),
    **dict.fromkeys(("rms_norm_eps", "hc_eps"), number(0, 1)),
    "hidden_act": one_of(("silu", "swish")),  # one function; no MLA model has another
    **dict.fromkeys(("attention_bias", "rope_interleave"), FLAG),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts"), _NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), _NUM_EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), optional(_NUM_EXPERTS)),
    "zero_expert_num": optional(whole(0, 1 << 16)),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_limit"), _POSITIVE),
    **dict.fromkeys(("first_k_dense_replace", "num_hash_layers"), whole(0)),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk", "sliding_window"), SIZE),
    "index_topk_freq": optional(whole(1)),
    "index_skip_topk_offset": optional(whole(0)),
    "index_topk_pattern": optional(either(_LETTERS, _INDEXER_TYPES)),
    "indexer_types": optional(_INDEXER_TYPES),
    "indexer_rope_interleave": optional(FLAG),
    **dict.fromkeys(("o_groups", "o_lora_rank"), SIZE),
    "hc_mult": whole(1, 8),
    "hc_sinkhorn_iters": whole(1, 1 << 16),
    "compress_ratios": optional(list_of(whole(0, 1 << 16))),
    "compress_rates": optional(_RATES),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), optional(list_of(TEXT))),
    **dict.fromkeys(("rope_theta", "compress_rope_theta"), _THETA),
    "partial_rotary_factor": optional(number(0, 1, above=True)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), optional(OBJECT)),
    "eos_token_id": _TOKEN_IDS,
    "pad_token_id": optional(whole(-LARGEST_SIZE)),
}
# Of the file alone: transformers renames, derives or ignores them. Other values of several make other models.
_RAW_RULES = {
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    "qk_rope_head_dim": EVEN_SIZE,
    "shared_experts_intermediate_size": SIZE,
    "moe_layer_freq": only(1),
    **dict.fromkeys(("use_bias", "use_qkv_bias", "mlp_bias"), optional(only(False))),
}
# Fields of the file that repeat another one, in families without a rule of their own for them.
_SAME = {
    "rotary_dim": "qk_rope_head_dim",
    "moe_shared_expert_intermediate_size": "moe_intermediate_size",
    "shared_experts_intermediate_size": "moe_shared_expert_intermediate_size",
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "swa_qk_rope_head_dim": "qk_rope_head_dim",
}
_ROPE_RULES = {
    **dict.fromkeys(("rope_type", "type"), _ROPE_TYPE),
    "rope_theta": _THETA,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    "original_max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), optional(_POSITIVE)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), optional(number(0, 1e3))),
    "partial_rotary_factor": number(0, 1, above=True),
    **dict.fromkeys(("short_factor", "long_factor"), list_of(_POSITIVE)),
    "truncate": FLAG,
    "llama_4_scaling_beta": optional(number(0)),
    **dict.fromkeys(("main", "compress", "indexed_attention", "sliding_attention"), OBJECT),
}


def check_generation_config(directory: Path) -> None:
    """Raise ValueError for a generation_config.json that transformers cannot read, or whose end-of-sequence tokens are
    no token ids.
    """
    file = directory / "generation_config.json"
    if not file.is_file():
        return
    try:
        raw = json.loads(file.read_text())
        check_fields({"the file": OBJECT}, {"the file": raw})
        check_fields({"eos_token_id": _TOKEN_IDS}, raw)
        transformers.GenerationConfig.from_dict(raw)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"model (--model): {file} is no generation config: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the message of an exception of transformers, with its type unless that is ValueError."""
    return str(error) if isinstance(error, ValueError) else repr(error)


def check_raw_config(raw: Mapping[str, Any], names: Mapping[str, str], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for a field of a config.json that no model of a family can have, by its name in the file.

    Args:
        names: Names in the file of fields that transformers' config has under others (`attribute_map`).
        rules: Rules of the family (`Family.rules`).
    """
    renamed = {names[name]: rule for name, rule in _CONFIG_RULES.items() if name in names}
    inner = {f"{name}.{key}": raw[name][key] for name in raw if isinstance(raw[name], dict) for key in raw[name]}
    check_fields({**renamed, **_CONFIG_RULES, **_RAW_RULES, **rules}, {**raw, **inner})
    for name, other in [*names.items(), *((name, other) for name, other in _SAME.items() if name not in rules)]:
        value, expected = raw.get(name), raw.get(other, raw.get(names.get(other, other)))
        if value is not None and expected is not None and value != expected:
            raise ValueError(f"{name} is {value}; it must be {other}, which is {expected}")
    if "qk_nope_head_dim" in raw and "qk_rope_head_dim" in raw:
        width = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
        for name in ("qk_head_dim", "q_head_dim"):
            if raw.get(name) not in (None, width):
                raise ValueError(f"{name} is {raw[name]}; it must be qk_nope_head_dim + qk_rope_head_dim = {width}")
    for name in ("rope_parameters", "rope_scaling"):
        check_fields(_ROPE_RULES, raw.get(name) or {}, f"{name}.{{}}".format)
        for kind, fields in (raw.get(name) or {}).items():
            if isinstance(fields, dict):  # layers of several kinds, each with a rotary embedding
                check_fields(_ROPE_RULES, fields, f"{name}.{kind}.{{}}".format)
    if (quantization := raw.get("quantization_config")) is not None:
        check_quantization(quantization)


def check_rope_fields(rope: Mapping[str, Any], dims: int, label: str) -> None:
    """Raise ValueError for fields of a rotary embedding of `dims` columns that this package cannot compute.

    Args:
        label: Format of a field's name in messages.
    """
    check_fields(_ROPE_RULES, rope, label.format)
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim") and "factor" not in rope:
        raise ValueError(
            f"{label.format('mscale_all_dim')} is {rope['mscale_all_dim']}; it must be 0 where there is no factor"
        )
    if rope["rope_type"] == "longrope":
        check_fields({"original_max_position_embeddings": whole(2)}, rope, label.format)  # its logarithm divides
        short, long = rope["short_factor"], rope["long_factor"]
        # Else angles depend on the longest position of a call: on a request's neighbours, and on when a key was cached.
        if short != long or len(short) != dims // 2:
            raise ValueError(
                f"{label.format('short_factor')} is {short} and long_factor {long}; with rope_type 'longrope' both "
                f"must be the same {dims // 2} numbers, one for each pair of qk_rope_head_dim {dims}"
            )


def check_model(config: Any, routing: Routing) -> None:
    """Raise ValueError for a transformers config that its own modules could not be built or run with, by the fields
    around attention.

    Fields that the file leaves out have transformers' defaults by now, so that what belongs together can be compared.
    """
    values = {name: getattr(config, name) for name in _CONFIG_RULES if hasattr(config, name)}
    check_fields(_CONFIG_RULES, values, lambda name: config.attribute_map.get(name, name))  # the file's names
    check_lengths(vars(config), ("layer_types", "mlp_layer_types"), config.num_hidden_layers)
    pad = config.pad_token_id
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        raise ValueError(f"pad_token_id is {pad}; it must be less than vocab_size {config.vocab_size}")
    if num_routed_experts(config):
        routing.check(config)


def check_lengths(fields: Mapping[str, Any], names: Iterable[str], num_layers: int) -> None:
    """Raise ValueError for a list, by its name, without an entry for each layer. None, or a missing one, is none."""
    for name in names:
        entries = fields.get(name)
        if entries is not None and len(entries) < num_layers:
            raise ValueError(
                f"{name} has {len(entries)} entries; each of {num_layers} layers (num_hidden_layers) has one"
            )


def check_kinds(config: Any, kinds: tuple[str, str]) -> None:
    """Raise ValueError unless each layer of a transformers config is of one of two kinds, and both exist."""
    types, group_size = config.layer_types, getattr(config, "layer_group_size", None)
    if len(types) != config.num_hidden_layers or {*types} != {*kinds}:
        raise ValueError(
            f"layer_types is {types}; each of {config.num_hidden_layers} layers (num_hidden_layers) has one, and "
            f"{' and '.join(kinds)} must both be there" + (f"; layer_group_size is {group_size}" if group_size else "")
        )


def check_mla(config: Any) -> None:
    """Raise ValueError for inconsistent fields of MLA with a rotary embedding."""
    check_rope(config)
    index_head_dim = getattr(config, "index_head_dim", config.qk_rope_head_dim)
    if index_head_dim < config.qk_rope_head_dim:
        raise ValueError(
            f"index_head_dim is {index_head_dim}; it must be at least qk_rope_head_dim {config.qk_rope_head_dim}"
        )


def check_rope(config: Any) -> None:
    """Raise ValueError unless transformers' rotary embedding rotates as many dims as attention has for it."""
    rope, dims = config.rope_parameters, config.qk_rope_head_dim
    check_rope_fields(rope, dims, "rope_parameters.{}")
    rotated, factor = config.head_dim, rope.get("partial_rotary_factor", 1.0)
    if rope["rope_type"] not in ("default", "proportional"):
        rotated = int(rotated * factor)
    elif factor != 1.0 and dims not in (int(rotated * factor), int(getattr(config, "linear_head_dim", 0) * factor)):
        rotated = int(rotated * factor)  # transformers ignores the factor; Ling's is of the other layers' heads
    if rotated != dims or dims % 2:
        raise ValueError(
            f"qk_rope_head_dim is {dims}; it must be even, and the {rotated} dims that head_dim {config.head_dim} and "
            f"rope_parameters (rope_type {rope['rope_type']}, partial_rotary_factor {factor}) give"
        )
