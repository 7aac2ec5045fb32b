"""Bytes of weights as planned, against those that ranks hold."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.eagle3 import Eagle3Files
from dcpmla.integrations.families.routing import num_routed_experts
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.deployment import expected_experts
from dcpmla.planning.machine import H200X8
from tests.support.deepseek_v41_files import save_v41
from tests.support.models import FAMILIES, LARGE4_FAMILIES, random_model, save_tiny, tiny_config
from tests.support.plan_cases import CONFIGS, deployed, read_published, read_v4
from tests.support.quantized_models import save_wide, write_quantized
from tests.support.ranks import run_ranks

# Families whose checkpoints hold more than ranks do, or a tied head once.
STORED_OTHERWISE = ("longcat_flash", "youtu", "minicpm3", "mistral_large4_text", "kimi_k3", "glm5_next_text")


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return a module's own weights: parameters, buffers that are saved, tensors in other attributes (experts)."""
    passing = module._non_persistent_buffers_set
    saved = [tensor for name, tensor in module._buffers.items() if name not in passing]
    others = [value for name, value in vars(module).items() if not name.startswith("_")]
    return [leaf for leaf in tree_leaves([*module._parameters.values(), saved, others]) if isinstance(leaf, Tensor)]


def held_bytes(model: ShardedModel) -> int:
    tensors = {
        id(tensor): tensor for root in model.modules() for module in root.modules() for tensor in tensors_of(module)
    }
    return sum(tensor.nbytes for tensor in tensors.values())


def load_and_weigh(
    directories: list[Path], tp_size: int, expert_dtype: str, with_mtp: bool, eagle3: Eagle3Files | None
) -> list[tuple[int, int]]:
    """On one rank: bytes held of each model, with experts cut and, where it has any, spread."""
    dcp, mesh, cpu = DCPConfig(tensor_parallel_size=tp_size), init_mesh(tp_size, 1), torch.device("cpu")
    exchange, found = select_exchange(dcp, mesh.dcp_group, cpu), []
    for directory in directories:
        config = load_config(directory)
        options: Any = {"expert_dtype": expert_dtype, "with_mtp": with_mtp, "eagle3": eagle3}
        cut, spread = (
            held_bytes(load_model(directory, config, dcp, mesh, exchange, None, cpu, is_spread, **options))
            for is_spread in (False, num_routed_experts(config) > 0)
        )
        found.append((cut, spread))
    return found


def check(
    directories: list[Path],
    tp_size: int,
    expert_dtype: str = "auto",
    with_mtp: bool = False,
    eagle3: Eagle3Files | None = None,
) -> None:
    ranks = run_ranks(tp_size, load_and_weigh, directories, tp_size, expert_dtype, with_mtp, eagle3)
    for directory, *held in zip(directories, *ranks, strict=True):
        model = read_model(load_config(directory), with_mtp, eagle3).with_expert_dtype(expert_dtype)
        planned = tuple(model.weight_bytes(tp_size, is_spread)["total"] for is_spread in (False, True))
        assert (directory.name, max(held)) == (directory.name, planned)


def test_every_family(tmp_path: Path) -> None:
    """One rank has the bytes of the checkpoint, and two have those that are planned for two."""
    directories = [tmp_path / family for family in FAMILIES]
    for directory in directories:
        save_tiny(directory.name, directory)
        if directory.name not in STORED_OTHERWISE:
            with safe_open(directory / "model.safetensors", "pt") as file:
                stored = sum(file.get_tensor(name).nbytes for name in sorted(file.keys()))
            planned = read_model(load_config(directory)).weight_bytes(1)["total"]
            assert (directory.name, planned) == (directory.name, stored)
    save_v41(tmp_path / "v41")
    check([*directories, tmp_path / "v41"], 2)


@pytest.fixture(scope="module")
def quantized_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save models with quantized weights, the last two of DeepSeek-V4; return their directories."""
    schemes = [("deepseek_v32", "block"), ("longcat_flash", "tensor"), ("deepseek_v3", "compressed_channel")]
    schemes += [("deepseek_v3", "int4"), ("deepseek_v3", "mxfp4"), ("glm4_moe_lite", "int4_all")]
    schemes += [("deepseek_v3", "awq"), ("deepseek_v3", "mixed"), ("deepseek_v32", "nvfp4"), ("deepseek_v2", "gptq")]
    schemes += [("deepseek_v3", "w4a8")]
    schemes += [("axk2", "block")] if "axk2" in FAMILIES else []
    schemes += [("deepseek_v4", "published_32"), ("deepseek_v4", "published")]
    folder = tmp_path_factory.mktemp("quantized")
    for family in {family for family, _ in schemes}:
        save_wide(family, folder / family)
    directories = [folder / f"{family}_{scheme}" for family, scheme in schemes]
    for directory, (family, scheme) in zip(directories, schemes, strict=True):
        write_quantized(folder / family, directory, scheme)
    return directories


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_quantized_models(tp_size: int, quantized_models: list[Path]) -> None:
    """Two ranks cut between blocks; four cut through blocks of experts and of queries, and hold these dequantized."""
    check(quantized_models[:-2] if tp_size == 4 else quantized_models, tp_size)
    if tp_size == 2:
        check(quantized_models[-1:], tp_size, "fp8")


def test_routers_in_float32(tmp_path: Path) -> None:
    """LongCat's are published so, beside a model in bfloat16."""
    config = tiny_config("longcat_flash")
    config.rounter_params_dtype = "float32"
    model = random_model(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("classifier.weight"):
            parameter.data = torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    check([tmp_path], 2)


def test_experts_in_integers() -> None:
    """Kimi-K2-Thinking is published as 594 GB; its experts' scales are an eighth of their codes."""
    kimi = read_published("kimi_k2_thinking")
    routed = sum(p.count * prod(p.shape) for p in kimi.parameters if p.is_expert)
    held = kimi.weight_bytes(1)
    assert round(held["total"] / 1e9) == 594
    shared = sum(p.count * prod(p.shape) * 2 for p in kimi.parameters if p.is_shared_expert)
    assert held["experts"] == routed // 2 * 9 // 8 + shared
    assert kimi.weight_bytes(8)["experts"] == (routed // 2 * 9 // 8 + shared) // 8


@pytest.mark.skipif("kimi_k3" not in FAMILIES, reason="needs a transformers with Kimi Linear")
def test_kimi_k3() -> None:
    """It is published as 2.78 T parameters in 1,561 GB, its image encoder's among them. Of 16 ranks each holds a
    sixteenth of a request's states: 69 layers of 96 memories of 128 x 128 in float32, and three tokens of the
    convolution's inputs.
    """
    size = read_published("kimi_k3")
    assert sum(p.count * prod(p.shape) for p in size.parameters) // 10**9 == 2779
    assert round(size.weight_bytes(1)["total"] / 1e9) == 1560
    dcp = DCPConfig(tensor_parallel_size=16, decode_context_parallel_size=16)
    plan = size.attention.plan_cache(dcp, [4096], torch.bfloat16)
    assert plan.bytes_per_state == 69 * 6 * (128 * 128 * 4 + 3 * 3 * 128 * 2)


@pytest.mark.skipif(not LARGE4_FAMILIES, reason="needs a transformers with Mistral Large 4")
def test_mistral_large4() -> None:
    """The name says 1 T parameters, 52 G active; the config has transformers' defaults."""
    size = read_published("mistral_large4")
    total = sum(p.count * prod(p.shape) for p in size.parameters)
    routed = sum(p.count * prod(p.shape) for p in size.parameters if p.is_expert)
    assert total // 10**9 == 1050
    assert round((total - routed * 124 / 128 - 204800 * 6144) / 1e9) == 52
    plan = size.attention.plan_cache(DCPConfig(), [4096], torch.bfloat16)
    assert plan.bytes_per_token == 72 * (576 + 128) * 2


def test_where_a_config_says_that_experts_are_in_fp4() -> None:
    """DeepSeek-V4's own config does; transformers 5.23 moves the field to quantization_config."""
    config, wanted = load_config(CONFIGS / "deepseek_v4_flash.json"), read_v4()
    quantization = dict(config.quantization_config)
    quantization.pop("expert_dtype", None)
    for own, of_quantization in (("fp4", {}), (None, {"expert_dtype": "fp4"})):
        config.expert_dtype, config.quantization_config = own, quantization | of_quantization
        assert read_model(config) == wanted
    config.quantization_config = quantization
    assert read_model(config) != wanted


def test_experts_in_fp8() -> None:
    """DeepSeek-V4-Flash on 8 ranks: 17 bytes for 32 values of experts become 32 and a scale for 128 x 128; steps of
    small batches, which read weights, take as much longer.
    """
    config, flash = load_config(CONFIGS / "deepseek_v4_flash.json"), read_v4()
    wide = flash.with_expert_dtype("fp8")
    routed = sum(p.count * prod(p.shape) for p in flash.parameters if p.is_expert)
    packed, codes = routed // 8 * 17 / 32, routed // 8 * (1 + 4 / BLOCK**2)
    stored, held = (size.weight_bytes(8)["experts"] for size in (flash, wide))
    assert held - stored == codes - packed
    before, after = (deployed(size, 8, 1).step_us(8, 1024)["rest"] for size in (flash, wide))
    read, rate = expected_experts(256, 6, 8), H200X8.hbm_gb_per_s * 1e3
    times = codes / H200X8.product_read_share / rate, packed / H200X8.packed_read_share / rate
    assert after - before == pytest.approx(read * (times[0] - times[1]))
    with pytest.raises(ValueError, match=r"\(--expert-dtype\) is 'fp8', but the model's experts are not in e2m1"):
        read_model(tiny_config("deepseek_v3")).with_expert_dtype("fp8")
    config.moe_intermediate_size = 192
    with pytest.raises(ValueError, match=r"with tensor_parallel_size \(-tp\) 2 a rank's experts are not whole blocks"):
        read_model(config).with_expert_dtype("fp8").weight_bytes(2)
