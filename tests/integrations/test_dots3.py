"""dots3's text model: inside multimodal checkpoints as transformers saves them and as they are published, in steps of
graphs, over 8-bit caches. test_transformers.py has more layouts.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.attention.layers.windowed.spec import WindowSpec
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment, attention_us
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import H200X8
from dcpmla.planning.setting import Setting
from tests.integrations.test_quantized_families import check as check_quantized
from tests.integrations.test_quantized_families import outcome, read_twin
from tests.integrations.test_transformers import check, make_cases, prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.models import WINDOW_FAMILIES, random_model, tiny_config
from tests.support.oracle import Oracle
from tests.support.quantized_models import write_dequantized, write_quantized
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts

pytestmark = pytest.mark.skipif(not WINDOW_FAMILIES, reason="needs a transformers with dots3")
CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"adapter_in_dim": 16, "adapter_out_dim": 48, "pyramid_num_routed": [-1]}
WHISPER = {"d_model": 16, "encoder_attention_heads": 2, "encoder_layers": 1, "encoder_ffn_dim": 32}
AUDIO = {"whisper_config": WHISPER, "adapter_input_size": 16, "adapter_out_dim": 48, "downsample_hidden_size": 8}
SIZES = {"head_dim": 20, "kv_lora_rank": 32, "num_attention_heads": 24, "num_key_value_heads": 24, "q_lora_rank": 20}
SIZES |= {"qk_nope_head_dim": 12, "v_head_dim": 6}


def save_whole(directory: Path) -> Any:
    """Save a multimodal model, and return it."""
    text = tiny_config("dots3_note_text")
    config = transformers.Dots3NoteConfig(text_config=text.to_dict(), vision_config=VISION, audio_config=AUDIO)
    model = transformers.Dots3NoteForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(random_model(text).model.state_dict())
    model.save_pretrained(directory)
    return model


def published(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config as it is published: without text_config, and with other names of fields."""
    text = {name: value for name, value in raw["text_config"].items() if name != "model_type"}
    for name in ("per_layer_config", "mlp_layer_types", "rope_parameters", "sliding_window"):
        del text[name]
    del text["shared_experts_intermediate_size"]
    layers = ["full_attention" if kind == "indexed_attention" else kind for kind in text["layer_types"]]
    return {
        **text,
        **{name: value for name, value in raw.items() if name != "text_config"},
        **{f"swa_{name}": value for name, value in SIZES.items()},
        **{"swa_rope_theta": 100.0, "rope_theta": 1e4, "sliding_window_size": 12, "layer_types": layers},
        **{"first_k_dense_replace": 1, "moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1},
        **{"apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "num_nextn_predict_layers": 1},
        **{"swa_attention_gate_type": "headwise", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    }


@pytest.mark.parametrize("is_published", [False, True])
def test_the_text_model_of_a_multimodal_one(is_published: bool, tmp_path: Path) -> None:
    reference = save_whole(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if is_published:  # MTP modules and indexers of windows are not read
        file = tmp_path / "model.safetensors"
        unread = {"mtp.0.eh_proj.weight", "model.layers.4.eh_proj.weight", "model.layers.1.self_attn.indexer.wk.weight"}
        save_file(load_file(file) | {name: torch.zeros(1) for name in unread}, file, metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(published(raw)))
    config = load_config(tmp_path)
    assert config.model_type == "dots3_note_text"
    assert attention_of(config) == attention_of(tiny_config("dots3_note_text"))
    check(reference, tmp_path, 2, make_cases(2, [2], (1, 4), ("a2a",)))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla"])
def test_caches_of_8_bits(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Rows of both widths are rounded; every token before is selected where there is no window."""
    config = tiny_config("dots3_note_text")
    sizes = {layer: {**SIZES, "kv_lora_rank": 256} for layer in (1, 2)}
    fields = {**config.to_dict(), "kv_lora_rank": 128, "index_topk": 128, "per_layer_config": sizes}
    reference = random_model(transformers.Dots3NoteTextConfig(**fields))
    for name, weight in reference.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            weight.data *= 8**-0.5  # two branches of four layers: a rounded row changes no choice of experts
    reference.save_pretrained(tmp_path)
    dcp = DCPConfig(
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        block_size=4,
        kv_cache_dtype=kv_cache_dtype,
        index_cache_dtype="fp8",
    )
    layouts = [dcp, dataclasses.replace(dcp, decode_context_parallel_size=1)]
    sharded, whole = run_ranks(2, serve_layouts, tmp_path, layouts, prompts(), timeout=300)[0]
    assert max(Oracle(reference).errors(prompts(), [sharded])) < 0.2
    for (_, logits), (_, other) in zip(sharded, whole, strict=True):
        assert float((logits - other).norm() / other.norm()) < 1e-2


@pytest.mark.parametrize("scheme", ["block", "compressed_block"])
def test_weights_in_fp8(scheme: str, tmp_path: Path) -> None:
    """W_UK and W_UV stay in 8 bits where their heads' widths allow it, and ranks hold the bytes that are planned."""
    config = tiny_config("dots3_note_text").to_dict()
    config |= {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 256}
    config |= {"shared_experts_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config |= {"v_head_dim": 128, "index_head_dim": 128, "initializer_range": 0.1}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 256, "qk_nope_head_dim": 192}
    config["per_layer_config"] = {layer: sizes for layer in (1, 2)}
    random_model(transformers.Dots3NoteTextConfig(**config)).save_pretrained(tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path / "stored", scheme)
    write_dequantized(tmp_path / "wide", tmp_path / "twin", scheme)
    results = run_ranks(2, outcome, tmp_path / "stored", 2, False)
    check_quantized(results, read_twin(tmp_path / "twin"))
    assert all(kinds == {"BlockFp8"} for _, kinds, *_ in results)
    # The writer stores both wide.
    stored = json.loads((tmp_path / "stored" / "config.json").read_text())
    field = "modules_to_not_convert" if scheme == "block" else "ignore"
    stored["quantization_config"][field] = ["lm_head", "re:.*weights_proj" if field == "ignore" else "weights_proj"]
    (tmp_path / "stored" / "config.json").write_text(json.dumps(stored))
    check_bytes([tmp_path / "stored"], 2)


def test_sizes_of_the_cache_and_of_reads() -> None:
    """Rows have the width of their layer; layers with a window read the window whatever the context."""
    kind = attention_of(tiny_config("dots3_note_text"))
    plan: Any = kind.plan_cache(DCPConfig(block_size=16), [100], torch.float32)
    assert [layer.row_width for layer in plan.layers] == [24, 40, 40, 24]
    cache = plan.allocate(torch.device("cpu"))
    assert sum(memory.numel() * memory.element_size() for memory in cache.tensors) == plan.bytes_per_rank
    for context in (5, 100, 10**6):
        windows = [layer.reads(context).num_rows for layer in kind.layers if isinstance(layer, WindowSpec)]
        assert windows == [min(context, 12)] * 2


def test_the_published_sizes() -> None:
    """13 layers with an index key and a latent of 512, 33 with a latent of 1,024; one gate for each head."""
    size = read_model(load_config(CONFIGS / "dots3_note.json"))
    num_windows = sum(isinstance(layer, WindowSpec) for layer in size.attention.layers)
    assert (size.attention.num_index_layers, num_windows) == (13, 33)
    plan = size.attention.plan_cache(DCPConfig(), [4096], torch.bfloat16)
    assert plan.bytes_per_token == 13 * 2 * (576 + 128) + 33 * 2 * 1088
    gates = [(p.count, p.shape) for p in size.parameters if p.name.endswith("g_proj.weight")]
    assert sorted(gates) == [(13, (128, 5120)), (33, (64, 5120))]


def test_the_times_of_both_kinds_of_layers() -> None:
    """A GPU of 8 multiplies by 128 and 64 heads of the DCP group, and reads rows of 1,152 and 2,176 bytes."""
    model, setting = read_model(load_config(CONFIGS / "dots3_note.json")), Setting(tp=8, dcp=8, kv_cache_dtype="bf16")
    reads = {isinstance(layer, WindowSpec): layer.reads(100_000) for layer in model.attention.sorts}
    selected, window = reads[False], reads[True]
    parts = Deployment(H200X8, model, setting).attention_us(32, 100_000)
    selected_us = attention_us(H200X8, selected, 1152, 128, 32, 8)
    window_us = attention_us(H200X8, window, 2176, 64, 32, 8)
    assert parts["attention"] == pytest.approx(13 * selected_us + 33 * window_us)
    exchange = ExchangeCosts(H200X8, 8, backend="auto")
    combine_us = [exchange.time_us("combine", 32, *widths) for widths in ((128, 512), (64, 1024))]
    assert parts["combine"] == pytest.approx(13 * combine_us[0] + 33 * combine_us[1])
