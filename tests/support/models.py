"""Tiny random checkpoints of every supported family, with nothing left at a value that hides a bug (norms at 1, biases
at 0).
"""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.integrations.families.table import FAMILIES as TABLE
from tests.support.kimi_k3_files import TEXT, save_k3


def _known(*families: str) -> tuple[str, ...]:
    """Return the families that the installed transformers has: older ones lack the newest."""
    rows = {"kimi_k3": TABLE["kimi_linear"], **TABLE}
    return tuple(family for family in families if hasattr(transformers, f"{rows[family].class_prefix}Config"))


SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa", *_known("axk2"))
LARGE4_FAMILIES = _known("mistral_large4_text")
MLA_FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_no_q_lora",
    "deepseek_v3",
    "deepseek_v3_neox",
    "glm4_moe_lite",
    "longcat_flash",
    "mistral4",
    "youtu",
    "axk1",
    *_known("minicpm3", "hy_v4"),
    *SPARSE_FAMILIES,
    *LARGE4_FAMILIES,
)
# Families with a state of fixed size per request.
STATE_FAMILIES = _known("deepseek_v4", "kimi_linear", "kimi_k3", "bailing_hybrid", "glm5_next_text")
WINDOW_FAMILIES = _known("dots3_note_text")  # layers of MLA of two sizes
FAMILIES = (*MLA_FAMILIES, *WINDOW_FAMILIES, *STATE_FAMILIES)
VOCAB_SIZE = 192  # also the eos id's home: 191 is left out of what prompts use

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_attention_heads": 24,  # divides by 1, 2, 3, 4 and 8
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}
_MOE = {
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 24,
}


# With fewer heads, ReLU gives scores of exactly 0 to many, and who is selected of them is nobody's promise.
_INDEXER = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 24}


_MLA_ONLY = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_V4 = {
    **{name: value for name, value in _COMMON.items() if name not in _MLA_ONLY},
    "head_dim": 16,
    "o_groups": 24,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    **_INDEXER,
    "index_topk": 6,
}


_HYBRID = {
    **{"num_local_experts" if name == "n_routed_experts" else name: value for name, value in _MOE.items()},
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}


_VISION = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_DOTS3 = {
    "num_hidden_layers": 4,
    "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "shared_experts_intermediate_size": 48,
    "rope_parameters": {
        "indexed_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "sliding_window": 12,
    "swa_num_attention_heads": 24,
    "swa_num_key_value_heads": 24,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 6,
}


# Layers 2, 3 and 5 reuse latents; 3 has no indexer, 3 and 5 no positions.
LARGE4_SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1, 4, 1],
    "indexer_types": ["full", "full", "full", "shared", "shared", "full"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "layer_types": ["indexed_attention"] * 6,
}


_GLM_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 48}


def tiny_config(family: str) -> Any:
    common = {**_COMMON, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}
    match family:
        case "deepseek_v2":
            return transformers.DeepseekV2Config(**common, **_MOE, first_k_dense_replace=1, head_dim=8)
        case "deepseek_v2_no_q_lora":
            return transformers.DeepseekV2Config(
                **{**common, "q_lora_rank": None}, **_MOE, first_k_dense_replace=1, head_dim=8
            )
        case "deepseek_v3":
            return transformers.DeepseekV3Config(**common, **_MOE, first_k_dense_replace=1, attention_bias=True)
        case "deepseek_v3_neox":
            return transformers.DeepseekV3Config(
                **{**common, "q_lora_rank": None}, **_MOE, first_k_dense_replace=1, rope_interleave=False
            )
        case "glm4_moe_lite":
            return transformers.Glm4MoeLiteConfig(**{**common, "rms_norm_eps": 1e-3}, **_MOE)
        case "longcat_flash":
            moe = {
                "num_layers": 2,
                "ffn_hidden_size": 96,
                "expert_ffn_hidden_size": 48,
                "n_routed_experts": 4,
                "zero_expert_num": 2,
                "moe_topk": 2,
            }
            return transformers.LongcatFlashConfig(**common, **moe, head_dim=8)
        case "mistral4":
            rope = {**common["rope_parameters"], "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
            return transformers.Mistral4Config(**{**common, "rope_parameters": rope}, **_MOE, first_k_dense_replace=1)
        case "youtu":
            dense = {"num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 24}
            return transformers.YoutuConfig(**common, **dense)
        case "minicpm3":
            dense = {"num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 24}
            factors = [1.0, 1.25, 1.5, 2.0]
            rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
            rope["factor"] = common["max_position_embeddings"] / 64  # transformers 5.17 does not compute it
            rope |= {"short_factor": factors, "long_factor": factors}
            scales = {"scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 12}
            return transformers.MiniCPM3Config(**{**common, "rope_parameters": rope}, **dense, **scales)
        case "axk1":
            return transformers.AXK1Config(**common, **_MOE, mlp_layer_types=["dense", "sparse"])
        case "axk2":
            more = {"n_group": 2, "gated_norm_rank": 6, "attention_bias": True}
            return transformers.AXK2Config(**common, **{**_MOE, **more}, **_INDEXER)
        case "deepseek_v32":
            return transformers.DeepseekV32Config(**common, **_MOE, **_INDEXER, first_k_dense_replace=1)
        case "glm_moe_dsa":
            layers = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
            return transformers.GlmMoeDsaConfig(**common, **{**_MOE, **layers}, **_INDEXER, first_k_dense_replace=1)
        case "mistral_large4_text":
            layers = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
            fields = {name: value for name, value in _COMMON.items() if name != "q_lora_rank"}
            fields |= {"no_rope_layers": [1, 0, 0, 1], "rope_parameters": {**_YARN, "attention_factor": 1.0}}
            return transformers.MistralLarge4TextConfig(
                **fields, **{**_MOE, **layers}, **_INDEXER, final_logit_softcapping=3.0
            )
        case "hy_v4":
            layers = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "hc_mult": 3}
            own = {"hc_magnitude": 1.5, "swiglu_limit": 1.0, "rms_norm_eps": 1e-5}  # the limit clamps many values
            return transformers.HYV4Config(
                **common, **{**_MOE, **layers}, **_INDEXER, **own, attn_implementation="eager"
            )
        case "dots3_note_text":
            return transformers.Dots3NoteTextConfig(**_COMMON, **{**_MOE, **_DOTS3}, **_INDEXER, head_dim=16)
        case "kimi_linear":
            return transformers.KimiLinearConfig(
                **{**_COMMON, "q_lora_rank": None}, **_HYBRID, linear_num_heads=24, linear_head_dim=8
            )
        case "kimi_k3":
            fields = {name: value for name, value in TEXT.items() if name != "model_type"}
            return TABLE["kimi_linear"].read_config(fields)
        case "bailing_hybrid":
            return transformers.BailingHybridConfig(
                **common, **_HYBRID, head_dim=8, layer_group_size=2, kda_lower_bound=-2.0
            )
        case "glm5_next_text":
            fields = {name: value for name, value in _COMMON.items() if name != "qk_rope_head_dim"}
            layers = {**_HYBRID, "num_hidden_layers": 5, "layer_types": [*_HYBRID["layer_types"], "full_attention"]}
            layers |= {"mlp_layer_types": [*_HYBRID["mlp_layer_types"], "sparse"]}
            own = {"index_kpool": 4, "swiglu_limit": 1.0, "rms_norm_eps": 1e-3}
            types = {"indexer_types": ["full", "full", "shared", "full", "shared"]}
            streams = {"hc_mult": 2, "hc_sinkhorn_iters": 3}
            return transformers.Glm5NextTextConfig(
                **fields, **layers, **_INDEXER, **types, **streams, **own, linear_num_heads=24, linear_head_dim=8
            )
        case "deepseek_v4":
            return transformers.DeepseekV4Config(**_V4, rope_parameters=dict(_YARN), attn_implementation="eager")
    raise ValueError(family)


def random_model(config: Any, seed: int = 0) -> Any:
    """Make a transformers model in float32 with every norm weight and bias drawn at random."""
    torch.manual_seed(seed)
    class_name = type(config).__name__.replace("Config", "ForCausalLM")  # Sarvam's is DeepSeek-V3's
    if class_name == "Glm5NextTextForCausalLM":
        config = transformers.Glm5NextConfig(text_config=config, vision_config=_GLM_VISION)
        class_name = "Glm5NextForConditionalGeneration"
    if class_name == "MistralLarge4TextForCausalLM":  # only the multimodal model has a head
        config = transformers.MistralLarge4Config(text_config=config, vision_config=_VISION)
        class_name = "MistralLarge4ForConditionalGeneration"
    class_name = class_name.replace("TextFor", "For")
    model: Any = getattr(transformers, class_name, transformers.AutoModelForCausalLM.from_config)(config).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
        elif config.model_type == "axk2" and config.n_group and name.endswith("e_score_correction_bias"):
            tensor.data.uniform_(0, 0.4)  # transformers leaves ties open, and experts of unchosen groups tie at 0
        elif name.endswith(("bias", "sinks", "_hc.base", "hc_head.hc_base")):
            tensor.data.normal_(0, 0.2)
        elif name.endswith("softmax_scaling.scale"):
            tensor.data.normal_(0, 0.3)
        elif name.endswith(("rotary_emb.alpha", "kpool_compress_ape", "kpool_compress_gate", "gate.dt_bias")):
            tensor.data.normal_(0, 0.5)
        elif config.model_type in ("hy_v4", "glm5_next") and name.endswith(
            ("_hc.scale", "hc_scale")
        ):  # they begin at 0.01
            tensor.data.uniform_(0.5, 1.5)
        elif name.endswith("A_log"):  # states that remember tokens for a while
            tensor.data.uniform_(-4, 0)
        elif name.endswith("tid2eid"):  # routes by token ids, each to other experts
            tensor.data.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]])
    return model


def save_tiny(family: str, directory: Path, **fields: Any) -> Any:
    """Save a tiny checkpoint with these fields of its config; return its model, ours where transformers has none."""
    if family == "kimi_k3":
        return save_k3(directory, **fields)
    if family == "deepseek_v41":
        from tests.support.deepseek_v41_files import save_v41  # which imports this file

        return save_v41(directory, **fields)
    if family == "sarvam_mla":
        from tests.support.sarvam_files import save_sarvam  # likewise

        return save_sarvam(directory)
    config = tiny_config(family)
    if fields:
        config = type(config)(**config.to_dict() | fields, attn_implementation=config._attn_implementation)
    model = random_model(config)
    model.save_pretrained(directory)
    return model


def drop_zero_experts(directory: Path, num_experts: int) -> None:
    """Remove the weights of experts beyond num_experts from a saved LongCat."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    expert = re.compile(r"\.experts\.(\d+)\.")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if (found := expert.search(name)) is None or int(found[1]) < num_experts
    }
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
