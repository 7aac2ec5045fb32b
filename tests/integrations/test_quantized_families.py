"""Whole models in 8 and 4 bits as they are published: transformers' logits on the dequantized weights, and weights that
stay as they are stored.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpmla.config import DCPConfig
from dcpmla.model.moe import MoE
from dcpmla.parallel.formats import format_name
from dcpmla.parallel.linear import Linear
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.engines import new_engine
from tests.support.models import FAMILIES
from tests.support.oracle import Oracle
from tests.support.packers import PACKERS
from tests.support.plain_mtp import PlainMtp
from tests.support.quantized_models import AWQ, save_wide, write_dequantized, write_quantized
from tests.support.ranks import message_of, run_ranks
from tests.support.whole_models import draw_prompts, load_on_rank, poisoned_cache, serve

PROMPT_LENS = (1, 5, 37)
NUM_NEW = 3
IN_4_BITS = ("int4_all", "awq", "gptq", "int4_asymmetric", "int4_channel", "nvfp4", "nvfp4_ct")  # most matrices
CASES = [  # family, how it is stored, what its experts are then
    ("deepseek_v3", "block", "fp8"),
    pytest.param("deepseek_v3", "ue8m0", "fp8", marks=pytest.mark.thorough),
    ("deepseek_v32", "block", "fp8"),
    ("glm_moe_dsa", "compressed_block", "fp8"),
    ("glm4_moe_lite", "modelopt", "fp8"),
    ("longcat_flash", "compressed_channel", "plain"),
    ("deepseek_v4", "published", "fp4"),
    ("deepseek_v4", "published_32", "fp4"),
    ("deepseek_v3", "block_32", "plain"),  # cuts over heads run through blocks
    ("deepseek_v3", "e8m0_32", "plain"),
    ("deepseek_v3", "int4", "int4"),
    ("deepseek_v3", "mxfp4", "fp4"),
    ("deepseek_v2", "int4_all", "int4"),
    ("deepseek_v3", "mixed", "int4"),
    ("deepseek_v3", "w4afp8", "int4"),
    ("deepseek_v3", "awq", "int4"),
    ("deepseek_v2", "gptq", "int4"),
    ("glm_moe_dsa", "int4_asymmetric", "int4"),
    ("deepseek_v3", "int4_channel", "int4"),
    ("deepseek_v32", "nvfp4", "nvfp4"),
    ("glm4_moe_lite", "nvfp4_ct", "nvfp4"),
    ("axk2", "block", "fp8"),
    pytest.param("axk2", "compressed_block", "fp8", marks=pytest.mark.thorough),
    pytest.param("axk2", "compressed_channel", "plain", marks=pytest.mark.thorough),
    ("mistral_large4_text", "block", "fp8"),  # W_UK is in 8 bits in layers without positions
    ("dots3_note_text", "block", "fp8"),  # W_UK and W_UV are in 8 bits where their heads' widths allow it
    ("dots3_note_text", "compressed_block", "fp8"),
    ("glm5_next_text", "compressed_block", "fp8"),  # of linear attention, too
]


def outcome(
    directory: Path, tp: int, enable_expert_parallel: bool, expert_dtype: str = "auto"
) -> tuple[list[tuple[list[int], torch.Tensor]], set[str], int, int]:
    """On one rank: tokens and logits of each prompt, the kinds of experts, and the linear layers that keep codes or
    not.
    """
    dcp = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=tp, block_size=4)
    options = {"enable_expert_parallel": enable_expert_parallel, "expert_dtype": expert_dtype}
    model, mesh = load_on_rank(directory, dcp, **options)
    engine = new_engine(model, poisoned_cache(model, dcp, [48] * 4, 6), dcp, mesh, 48, 64, max_num_seqs=3)
    requests = serve(engine, draw_prompts(PROMPT_LENS), NUM_NEW, ignore_eos=True)
    modules = list(model.hidden_states.modules())
    experts = {format_name(weight) for moe in modules if isinstance(moe, MoE) for weight in moe.experts}
    linears = [module.weight_scale is not None for module in modules if isinstance(module, Linear)]
    generated = [(request.prompt_token_ids + request.token_ids, torch.stack(request.logits)) for request in requests]
    return generated, experts, sum(linears), len(linears)


def check(results: list[Any], reference: Any) -> None:
    oracle = Oracle(reference)
    for generated, *_ in results:
        for tokens, logits in generated:
            oracle.check(tokens[:-NUM_NEW], tokens[-NUM_NEW:], logits)


def check_pair(family: str, scheme: str, directory: Path, *options: Any) -> list[Any]:
    """Check the logits of a stored model on two ranks against transformers' of its values; return all outcomes."""
    if family not in FAMILIES:
        pytest.skip("an older transformers")
    model_class = type(save_wide(family, directory / "wide"))
    write_quantized(directory / "wide", directory / "stored", scheme)
    write_dequantized(directory / "wide", directory / "twin", scheme)
    results = run_ranks(2, outcome, directory / "stored", 2, *options)
    check(results, model_class.from_pretrained(directory / "twin", dtype=torch.float32).eval())
    if family in ("mistral_large4_text", "dots3_note_text"):  # tests/planning has others
        check_bytes([directory / "stored"], 2)
    return results


@pytest.mark.parametrize(("family", "scheme", "experts"), CASES)
def test_logits_on_two_ranks(family: str, scheme: str, experts: str, tmp_path: Path) -> None:
    results = check_pair(family, scheme, tmp_path, False)
    for _, kinds, num_quantized, num_linears in results:
        assert kinds == {experts}
        assert num_quantized / num_linears >= (
            0.5 if experts == "fp8" or "published" in scheme or scheme in IN_4_BITS else 0
        )


@pytest.mark.parametrize(
    ("family", "scheme", "enable_expert_parallel", "expert_dtype"),
    [
        ("deepseek_v3", "block", True, "auto"),
        ("deepseek_v4", "published", False, "fp8"),
        ("deepseek_v3", "int4", True, "auto"),
        ("glm5_next_text", "block", True, "auto"),
    ],
)
def test_other_experts(
    family: str, scheme: str, enable_expert_parallel: bool, expert_dtype: str, tmp_path: Path
) -> None:
    results = check_pair(family, scheme, tmp_path, enable_expert_parallel, expert_dtype)
    assert all(kinds == {"int4" if scheme == "int4" else "fp8"} for _, kinds, *_ in results)


def test_experts_that_are_not_in_e2m1_are_not_re_encoded(tmp_path: Path) -> None:
    save_wide("deepseek_v3", tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path / "int4", "int4")
    for scheme in ("wide", "int4"):
        (message,) = run_ranks(1, message_of, outcome, tmp_path / scheme, 1, False, "fp8")
        assert message.startswith("expert_dtype (--expert-dtype) is 'fp8', but the experts model.layers")


def values_on_rank(directory: Path) -> dict[str, tuple[torch.Tensor, bool]]:
    """On one rank: values of all linear layers of the model and of its MTP module, and whether they are packed."""
    model, _ = load_on_rank(directory, DCPConfig(block_size=4), with_mtp=True)
    assert model.drafts is not None
    roots = {name: root for name, root in vars(model).items() if isinstance(root, torch.nn.Module)}
    roots["_mtp"] = model.drafts.module
    return {
        f"{root}.{name}": (part.product(torch.eye(part.in_features)), part.weight.dtype == torch.uint8)
        for root, module in roots.items()
        for name, part in module.named_modules()
        if isinstance(part, Linear)
    }


@pytest.mark.parametrize("of_module", [False, True])
def test_an_mtp_module_in_another_format(of_module: bool, tmp_path: Path) -> None:
    """The tensors decide: only the module is packed in AWQ, or only the model."""
    module = PlainMtp("deepseek_v3", hidden_size=256, intermediate_size=512, kv_lora_rank=128, q_lora_rank=128)
    module.save(tmp_path / "twin")
    block, stored, twin = f".layers.{module.config.num_hidden_layers}.", {}, {}
    for name, tensor in load_file(tmp_path / "twin" / "model.safetensors").items():
        is_linear = name.endswith("_proj.weight") and tensor.ndim == 2 and "eh_proj" not in name
        stored[name] = twin[name] = tensor
        if is_linear and (block in name) == of_module and tensor.shape[1] % 64 == 0 == tensor.shape[0] % 8:
            values, parts = PACKERS["awq"](stored.pop(name), 64)
            stored |= {name.removesuffix("weight") + other: part.contiguous() for other, part in parts.items()}
            twin[name] = values
    (tmp_path / "stored").mkdir()
    module.config.quantization_config = AWQ
    module.config.save_pretrained(tmp_path / "stored")
    for directory, tensors in (("stored", stored), ("twin", twin)):
        save_file(tensors, tmp_path / directory / "model.safetensors")
    (found,), (expected,) = (run_ranks(1, values_on_rank, tmp_path / name) for name in ("stored", "twin"))
    assert found.keys() == expected.keys()
    for name, (values, is_packed) in found.items():
        torch.testing.assert_close(values, expected[name][0], rtol=1e-5, atol=1e-6)
        assert not is_packed or name.startswith("_mtp") == of_module
    assert any(is_packed for _, is_packed in found.values())
