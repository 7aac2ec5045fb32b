"""A.X-K2 beyond the tests of all families: routing without groups, names, caches, mistakes, kernels of its gates."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcpmla.integrations.families.table import attention_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.model.norm_gate import gate_norm
from tests.attention.test_small_kernels import compile_for_hopper, randn
from tests.integrations.test_transformers import check, make_cases, prompts
from tests.support.interpreter import convert_as_torch
from tests.support.layouts import dcp_config
from tests.support.models import SPARSE_FAMILIES, random_model, tiny_config
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.shared_memory import run_interpreted
from tests.support.whole_models import serve_layouts

pytestmark = pytest.mark.skipif("axk2" not in SPARSE_FAMILIES, reason="needs a transformers with A.X-K2")


def test_without_groups(tmp_path: Path) -> None:
    """With corrections of both signs, and layers whose MLPs alternate; tensors have their published names."""
    config = tiny_config("axk2")
    config.n_group = config.topk_group = None
    config.num_hidden_layers, config.mlp_layer_types = 3, ["sparse", "dense", "sparse"]
    config.layer_types = config.layer_types[:1] * 3
    reference = random_model(config)
    for layer in (0, 2):
        reference.get_submodule(f"model.layers.{layer}.mlp.gate").e_score_correction_bias.normal_(0, 0.2)
    reference.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.layers.1.input_layernorm.W_up.weight", "model.layers.1.self_attn.q_b_proj.weight"} <= names
    check(reference, tmp_path, 2, make_cases(2, [2], (1, 2), ("auto",)))


def test_caches_of_8_bits_and_prefixes(tmp_path: Path) -> None:
    """Every token and every expert is selected, because rounding may change a choice; e4m3 keeps three bits."""
    config = tiny_config("axk2")
    config.index_topk, config.num_experts_per_tok, config.kv_lora_rank = 128, 4, 128
    config.topk_group = config.n_group
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    plain = dcp_config(2, 2, 2, block_size=16, dcp_comm_backend="a2a")
    fp8 = replace(plain, kv_cache_dtype="fp8", kv_cache_scale=0.02, index_cache_dtype="fp8", index_hadamard=True)
    layouts = [plain, fp8, replace(plain, kv_cache_dtype="fp8_ds_mla", index_cache_dtype="fp8")]
    layouts.append(replace(layouts[-1], decode_context_parallel_size=1))
    exact, *rounded = run_ranks(2, serve_layouts, tmp_path, layouts, prompts(), 2)[0]
    assert max(Oracle(reference).errors(prompts(), [exact])) < 1e-4
    assert max(Oracle(reference).errors(prompts(), rounded)) < 0.2
    for (_, logits), (_, whole) in zip(*rounded[1:], strict=True):
        assert float((logits - whole).norm() / whole.norm()) < 1e-2


def test_sizes_of_the_light_model() -> None:
    """Values are the defaults of transformers' config: 20.3 billion parameters."""
    model = read_model(load_config(Path(__file__).parents[1] / "planning" / "configs" / "axk2_light.json"))
    assert round(sum(p.count * prod(p.shape) for p in model.parameters) / 1e8) == 203


def test_gates_without_query_latents() -> None:
    config = attention_of(tiny_config("axk2")).config
    with pytest.raises(ValueError, match="query_gates is True, which needs a q_lora_rank, .* they are None"):
        replace(config, q_lora_rank=None)


def test_no_mtp_module() -> None:
    with pytest.raises(ValueError, match="'mtp', which A.X-K2 does not have"):
        find_family("axk2").check_mtp(tiny_config("axk2"))


def check_gates(device: str) -> None:
    """Check the norms' kernel against plain torch, also for sizes that are no powers of two."""
    convert_as_torch()
    from dcpmla.model.kernels.norm_gate import gate_norm as gate_norm_kernel

    for num_rows, width, rank in ((3, 48, 6), (70, 256, 16), (5, 136, 130)):
        x, low, up = (
            randn(*shape, seed=i).to(device)
            for i, shape in enumerate(((num_rows, width), (num_rows, rank), (width, rank)))
        )
        got, *codes = gate_norm_kernel(x, low, up, width % 128 == 0)
        expected, *expected_codes = gate_norm.reference(x, low, up, width % 128 == 0)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        values, want = (
            (parts[0].float().unflatten(1, (-1, 128)) * parts[1][..., None] if width % 128 == 0 else parts[0].float())
            for parts in (codes, expected_codes)
        )
        torch.testing.assert_close(values, want, atol=1e-2, rtol=0.07)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(1, check_gates, "cpu")


@pytest.mark.gpu
def test_kernels() -> None:
    check_gates("cuda")


def test_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from dcpmla.model.kernels.norm_gate import gate_kernel as norm_kernel

    sizes = {"WIDTH": 2048, "RANK": 16, "ROWS": 64, "RANKS": 16}
    compile_for_hopper(norm_kernel, "bf16", sizes, codes_ptr="*fp8e4nv", scales_ptr="*fp32")
