"""Whole models in 8 and 4 bits as they are published: transformers' logits on the dequantized weights, and weights that
stay as they are stored.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.transformers import load_model
from dcpmla.model.moe import MoE
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine
from tests.support.models import SPARSE_FAMILIES, VOCAB_SIZE
from tests.support.quantized_models import save_wide, write_dequantized, write_quantized
from tests.support.ranks import run_ranks

PROMPT_LENS = (1, 5, 37)
NUM_NEW = 3
CASES = [  # family, how it is stored, what its experts are then
    ("deepseek_v3", "block", "BlockFp8"),
    ("deepseek_v3", "ue8m0", "BlockFp8"),
    ("deepseek_v32", "block", "BlockFp8"),
    ("glm_moe_dsa", "compressed_block", "BlockFp8"),
    ("glm4_moe_lite", "modelopt", "BlockFp8"),
    ("longcat_flash", "compressed_channel", "Tensor"),
    ("deepseek_v4", "published", "GroupFp4"),
    ("deepseek_v3", "int4", "GroupInt4"),
    ("deepseek_v3", "mxfp4", "GroupFp4"),
    ("deepseek_v2", "int4_all", "GroupInt4"),
    *([("axk2", "block", "BlockFp8")] if "axk2" in SPARSE_FAMILIES else []),
]


def outcome(
    directory: Path, tp: int, enable_expert_parallel: bool, expert_dtype: str = "auto"
) -> tuple[list[tuple[list[int], torch.Tensor]], set[str], int, int]:
    """On one rank: tokens and logits of each prompt, the kinds of experts, and the linear layers that keep codes or
    not.
    """
    dcp, cpu = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=tp, block_size=4), torch.device("cpu")
    mesh = init_mesh(tp, tp)
    selection = select_exchange(dcp, mesh.dcp_group, cpu)
    model = load_model(
        directory,
        load_config(directory),
        dcp,
        mesh,
        selection,
        torch.float32,
        cpu,
        enable_expert_parallel,
        expert_dtype=expert_dtype,
    )
    cache = model.attention.plan_cache(dcp, [48] * 4, model.dtype, num_states=6).allocate(cpu)
    engine = new_engine(model, cache, dcp, mesh, 48, 64, max_num_seqs=3)
    params, generator = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True), torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    requests = [engine.add(prompt, params, keep_logits=True) for prompt in prompts]
    list(engine.run())
    modules = list(model.hidden_states.modules())
    experts = {type(weight).__name__ for moe in modules if isinstance(moe, MoE) for weight in moe.experts}
    linears = [module.weight_scale is not None for module in modules if isinstance(module, Linear)]
    generated = [(request.prompt_token_ids + request.token_ids, torch.stack(request.logits)) for request in requests]
    return generated, experts, sum(linears), len(linears)


def check(results: list[Any], twin: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    for generated, *_ in results:
        for tokens, logits in generated:
            with torch.no_grad():
                expected = reference(torch.tensor([tokens[:-1]])).logits[0, -NUM_NEW:]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
            assert tokens[-NUM_NEW:] == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("family", "scheme", "experts"), CASES)
def test_logits_on_two_ranks(family: str, scheme: str, experts: str, tmp_path: Path) -> None:
    save_wide(family, tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path / "stored", scheme)
    write_dequantized(tmp_path / "wide", tmp_path / "twin", scheme)
    results = run_ranks(2, outcome, tmp_path / "stored", 2, False)
    check(results, tmp_path / "twin")
    for _, kinds, num_quantized, num_linears in results:
        assert kinds == {experts}
        assert num_quantized / num_linears >= (0.5 if experts == "BlockFp8" or scheme == "published" else 0)


@pytest.mark.parametrize(
    ("family", "scheme", "enable_expert_parallel", "expert_dtype"),
    [
        ("deepseek_v3", "block", True, "auto"),
        ("deepseek_v4", "published", False, "fp8"),
        ("deepseek_v3", "int4", True, "auto"),
    ],
    ids=["whole experts", "4 bits in 8", "whole experts in 4 bits"],
)
def test_other_experts(
    family: str, scheme: str, enable_expert_parallel: bool, expert_dtype: str, tmp_path: Path
) -> None:
    save_wide(family, tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path / "stored", scheme)
    write_dequantized(tmp_path / "wide", tmp_path / "twin", scheme)
    results = run_ranks(2, outcome, tmp_path / "stored", 2, enable_expert_parallel, expert_dtype)
    check(results, tmp_path / "twin")
    assert all(kinds == {"GroupInt4" if scheme == "int4" else "BlockFp8"} for _, kinds, *_ in results)


@pytest.mark.parametrize("scheme", ["wide", "int4"])
def test_experts_that_are_not_in_e2m1_are_not_re_encoded(scheme: str, tmp_path: Path) -> None:
    save_wide("deepseek_v3", tmp_path / "wide")
    if scheme == "int4":
        write_quantized(tmp_path / "wide", tmp_path / "int4", "int4")
    with pytest.raises(
        AssertionError, match=r"expert_dtype \(--expert-dtype\) is 'fp8', but the experts model\.layers"
    ):
        run_ranks(1, outcome, tmp_path / scheme, 1, False, "fp8")
