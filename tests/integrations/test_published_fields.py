"""Each field of a config.json changes the model, or is refused by its name, or is in `NO_EFFECT` with a reason.

Fields are those of files as they are published and as transformers saves them, those of transformers' classes, and
those with a rule in this package. A field that nothing reads is the worst: another model's file gives answers without
a word.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla import LLM, SamplingParams
from dcpmla.integrations.families.routing import num_routed_experts
from dcpmla.integrations.families.table import attention_of, family_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.skeleton import build_skeleton, published_shapes
from tests.support.models import FAMILIES, save_tiny

VARIANTS = ("deepseek_v2_no_q_lora", "deepseek_v3_neox")
ALL = (
    *(family for family in FAMILIES if family not in VARIANTS),
    "deepseek_v41",
    *(["sarvam_mla"] if hasattr(transformers, "SarvamMLAConfig") else []),
)
PROMPT = [number * 37 % 190 + 1 for number in range(70)]  # longer than windows, and than what indexers select
TRAINING = "of training alone"
NO_EFFECT = {
    "model_type": "it chooses the family",
    **dict.fromkeys(("architectures", "auto_map", "transformers_version"), "of the program that wrote the file"),
    **dict.fromkeys(("attention_dropout", "initializer_range", "embedding_initializer_range"), TRAINING),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise", "mtp_loss_scaling_factor"), TRAINING),
    **dict.fromkeys(("learnable_sink_init", "output_router_logits"), TRAINING),
    **dict.fromkeys(("use_cache", "pretraining_tp"), "of transformers' loop"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "the tokenizer's; a request has no padding"),
    "tie_word_embeddings": "the checkpoint has a head of its own, or not",
}
HEAD_DIM = "heads have qk_nope_head_dim + qk_rope_head_dim; published files have several widths"
NO_EFFECT_IN = {
    **{(family, "head_dim"): HEAD_DIM for family in ("deepseek_v2", "minicpm3", "hy_v4")},
    **{(family, "head_dim"): HEAD_DIM for family in ("deepseek_v32", "glm_moe_dsa", "axk2", "sarvam_mla")},
    **{(family, "head_dim"): HEAD_DIM for family in ("kimi_linear", "kimi_k3", "mistral_large4_text")},
    **{("kimi_linear", name): "of Kimi-K3 alone" for name in ("activation_situ_beta", "activation_situ_linear_beta")},
    ("kimi_linear", "latent_moe_use_norm"): "of Kimi-K3 alone",
    **{("kimi_k3", f"linear_{name}"): "linear_attn_config has it" for name in ("head_dim", "num_heads")},
    ("kimi_k3", "linear_conv_kernel_dim"): "linear_attn_config has it",
    ("mistral_large4_text", "no_rope_layer_interval"): "the saved file has no_rope_layers",
    ("deepseek_v41", "num_nextn_predict_layers"): "drafts come from the DSpark module",
    **{
        (family, f"dspark_{name}"): "of the DSpark module, which is read where it drafts"
        for family in ("deepseek_v4", "deepseek_v41")
        for name in ("n_routed_experts", "num_experts_per_tok")
    },
    ("deepseek_v41", "compress_ratios"): "the MTP module's entry is free, others must agree with the lists of sources",
    ("dots3_note_text", "head_dim"): "17 has as many whole rotated columns as 16; other widths are refused",
    ("mistral4", "head_dim"): "17 has as many whole rotated columns as 16; other widths are refused",
    **{("mistral4", f"rope_parameters.beta_{name}"): "8 rotated columns are too few" for name in ("fast", "slow")},
}
# Fields that a message names instead, because both must agree.
NAMED_AS = {
    "engram_max_ngram_size": "engram_num_embeddings",
    "engram_n_heads": "engram_num_embeddings",
    **dict.fromkeys(("swa_head_dim", "swa_qk_nope_head_dim"), "qk_rope_head_dim of sliding_attention"),
    "hidden_size": "hidden size",
    "num_attention_heads": "number of attention heads",
}
# Changes of saved files, towards published ones: None removes a field.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), {"mlp_layer_types": None, "first_k_dense_replace": 1}),
    "axk2": {"mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1},
    "mistral_large4_text": {
        **dict.fromkeys(("mlp_layer_types", "indexer_types"), None),
        **{"first_k_dense_replace": 1, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    },
    "dots3_note_text": {
        **dict.fromkeys(("per_layer_config", "mlp_layer_types", "rope_parameters", "sliding_window"), None),
        "shared_experts_intermediate_size": None,
        **{"swa_head_dim": 20, "swa_kv_lora_rank": 32, "swa_num_attention_heads": 24, "swa_num_key_value_heads": 24},
        **{"swa_q_lora_rank": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 6, "swa_rope_theta": 100.0},
        **{"rope_theta": 1e4, "sliding_window_size": 12, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        "moe_shared_expert_intermediate_size": 48,
    },
    "deepseek_v4": {
        **dict.fromkeys(("rope_parameters", "partial_rotary_factor", "mlp_layer_types"), None),
        **{"qk_rope_head_dim": 8, "num_hash_layers": 1, "rope_theta": 1e4, "compress_rope_theta": 1.6e5},
        "rope_scaling": {"type": "yarn", "factor": 16.0, "beta_fast": 32, "beta_slow": 1},
    },
    "bailing_hybrid": {
        **dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"), None),
        **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "qk_head_dim"), None),
        **dict.fromkeys(("num_expert_group", "num_experts_per_token", "moe_renormalize", "model_max_length"), None),
        **{"rope_theta": 1e4, "first_k_dense_replace": 1, "n_group": 1, "num_experts_per_tok": 2, "pad_token_id": 0},
        **{"norm_topk_prob": True, "max_position_embeddings": 256, "num_nextn_predict_layers": 1},
    },
}


def save(family: str, directory: Path) -> dict[str, Any]:
    """Save a tiny checkpoint, and return the fields of its text model."""
    save_tiny(family, directory, **({"engram_layer_ids": [1, 4]} if family == "deepseek_v41" else {}))
    whole = json.loads((directory / "config.json").read_text())
    fields = as_published(family, whole.get("text_config", whole)) | {"dtype": "float32"}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if rope and "beta_fast" in rope and family != "mistral4":  # few columns: shorter contexts have no fast ones
            fields[name] = rope | {"original_max_position_embeddings": 4096}
    return fields


def as_published(family: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved fields with the changes of PUBLISHED."""
    changed = PUBLISHED.get(family, {})
    return {name: value for name, value in (saved | changed).items() if value is not None or name not in changed}


def others(value: Any) -> list[Any]:
    """Return other values of a field's type; of a field that is null or missing, some of all types."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value + 1, 2 * value, 16 * value, value // 16} - {value})
    if isinstance(value, float):
        return [value * 2 + 0.5, value / 2, value / 16]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, list) and value:
        of_last = [[*value[:-1], other] for other in others(value[-1])]
        return [*of_last, *([other, *value[1:]] for other in others(value[0]))]
    return [True, False, 0, 1, 3, 0.5, "other", ["other"]]


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
    """Yield each field's name, whether the file has it, and whole files that differ in it alone."""
    family = find_family(fields["model_type"])
    declared = {*family.config_class().__dataclass_fields__} - {*transformers.PretrainedConfig.__dataclass_fields__}
    for name in sorted({*fields, *declared, *family.routing.rules(), *family.rules}):
        outer, _, inner = name.partition(".")
        value = fields.get(outer)
        if isinstance(value, dict) and not inner:
            for key in value:
                files = [fields | {outer: value | {key: other}} for other in others(value[key])]
                yield f"{outer}.{key}", True, files
        elif inner and isinstance(value, dict):
            if inner not in value:
                yield name, False, [fields | {outer: value | {inner: other}} for other in others(None)]
        elif not inner:
            yield name, value is not None, [fields | {outer: other} for other in others(value)]


def described(directory: Path, fields: dict[str, Any]) -> str:
    """Return what the fields make without weights."""
    (directory / "config.json").write_text(json.dumps(fields))
    config = load_config(directory)
    family = family_of(config)
    try:
        family.check_mtp(config)
        mtp = "has a module"
    except ValueError as error:
        mtp = str(error)
    router = family.routing.router(config, 0) if num_routed_experts(config) else None
    kind, shapes, glus = attention_of(config), published_shapes(build_skeleton(config)), family.glus(config, 1)
    return repr((kind, shapes, router, glus, mtp, config.dtype, config.eos_token_id, config.max_position_embeddings))


def logits(directory: Path) -> torch.Tensor:
    """Return the logits of two tokens after the prompt."""
    with LLM(str(directory), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 22, max_num_seqs=2) as llm:
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        request = llm.engine.add(PROMPT, params, keep_logits=True)
        list(llm.engine.run())
        return torch.stack(list(request.logits))


@pytest.mark.parametrize("family", ALL)
def test_fields(family: str, tmp_path: Path) -> None:
    fields = save(family, tmp_path)
    aliases = find_family(fields["model_type"]).config_class().attribute_map
    as_saved, faults = described(tmp_path, fields), []
    expected = logits(tmp_path)
    for name, is_there, files in changes(fields):
        if name in NO_EFFECT or (family, name) in NO_EFFECT_IN:
            continue
        num_alike = num_others = 0
        for file in files:
            try:
                is_alike = described(tmp_path, file) == as_saved
                if is_alike and not (is_there and num_others):  # a single value that matters is enough there
                    is_alike = torch.equal(logits(tmp_path), expected)
                num_alike, num_others = num_alike + is_alike, num_others + (not is_alike)
            except ValueError as error:
                inner = name.rpartition(".")[2]
                if not any(word in str(error) for word in (inner, NAMED_AS.get(inner, inner), aliases.get(name, name))):
                    faults.append(f"{name} is not named: {error}")
            except Exception as error:
                faults.append(f"{name}: {error!r}")
        # One value of a field that the file lacks may be what is computed anyway.
        if (num_alike and not num_others) if is_there else num_alike > 1:
            faults.append(f"{name} is ignored")
    assert not faults, "\n".join(faults)
