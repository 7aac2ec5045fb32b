"""The oracle: transformers' own models, unsharded, in float32.

Same logits, same greedy tokens, for every cut of heads and cache.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla.attention.mla import layer
from dcpmla.config import DCPConfig
from dcpmla.fields import divisors
from dcpmla.integrations.model_files import load_config
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import Answers, answers_of, draw_prompts, load_on_rank, poisoned_cache, serve

PROMPT_LENS = (1, 2, 5, 37, 70)  # shorter than W, one token, and contexts that chunks cut unevenly
NUM_NEW = 4
VARIANTS = (
    (False, False),
    (True, False),
    (True, True),
    (False, False),
    (False, True),
    (True, True),
)  # replicate, project first


@dataclasses.dataclass(frozen=True)
class Case:
    dcp: DCPConfig
    max_num_batched_tokens: int

    def __str__(self) -> str:
        dcp = self.dcp
        return (
            f"tp{dcp.tensor_parallel_size} dcp{dcp.decode_context_parallel_size} I{dcp.cp_kv_cache_interleave_size} "
            f"{dcp.dcp_comm_backend} workspace{dcp.context_workspace_tokens} chunk{self.max_num_batched_tokens}"
            f"{' q_replicate' * dcp.dcp_q_replicate}{' project_before_merge' * dcp.dcp_project_before_merge}"
        )


def prompts() -> list[list[int]]:
    return draw_prompts(PROMPT_LENS)


def run_cases(directory: Path, cases: list[Case], device_type: str) -> list[Answers]:
    """On one rank: for each case, each prompt's new tokens and their logits [NUM_NEW, vocab]."""
    results = []
    layer.PROJECT_FIRST_TOKENS = 3  # among the numbers of decodes in these steps
    for case in cases:
        model, mesh = load_on_rank(directory, case.dcp, device_type)
        seq_lens = [length + NUM_NEW - 1 for length in PROMPT_LENS]
        cache = poisoned_cache(model, case.dcp, seq_lens, 6)
        limits = max(seq_lens) + 1, case.max_num_batched_tokens, 4
        results.append(answers_of(serve(new_engine(model, cache, case.dcp, mesh, *limits), prompts(), NUM_NEW)))
    return results


def make_cases(
    tp: int,
    dcp_sizes: list[int],
    interleaves: tuple[int, ...],
    backends: tuple[str, ...],
    is_compressed: bool = False,
) -> list[Case]:
    cases = []
    for number, (dcp, interleave, backend) in enumerate(itertools.product(dcp_sizes, interleaves, backends)):
        q_replicate, project_before_merge = VARIANTS[number % len(VARIANTS)]
        layout = dcp_config(
            tp,
            dcp,
            interleave,
            dcp_comm_backend=backend,
            block_size=32 if is_compressed else 16,
            context_workspace_tokens=65536,
            dcp_q_replicate=q_replicate,
            dcp_project_before_merge=project_before_merge and not is_compressed,
        )
        small = dataclasses.replace(layout, context_workspace_tokens=5 * layout.chunk_alignment)
        cases.append(Case(small if number % 2 else layout, (13, 1000, 33)[number % 3]))
    return cases


def check(reference: Any, directory: Path, tp: int, cases: list[Case], device_type: str = "cpu") -> None:
    results = run_ranks(tp, run_cases, directory, cases, device_type, device=device_type, timeout=500)
    oracle = Oracle(reference)
    for rank, of_cases in enumerate(results):
        for case, answers in zip(cases, of_cases, strict=True):
            for prompt, answer in zip(prompts(), answers, strict=True):
                oracle.check(prompt, *answer, name=f"rank {rank}, {case}, prompt of {len(prompt)}")


# Families with attention of their own; the others cut heads and cache as DeepSeek-V3.
ON_FOUR = ("deepseek_v3", "longcat_flash", "glm_moe_dsa", "deepseek_v4", "kimi_linear", "glm5_next_text", "hy_v4")
OF_KINDS = (*ON_FOUR[:-1], "deepseek_v32", "mistral_large4_text", "dots3_note_text")
# A size that is no power of two cuts each kind of cache once.
ON_THREE = ("deepseek_v3", "glm_moe_dsa", "longcat_flash", "deepseek_v4")
ON_EIGHT = ("deepseek_v3", "deepseek_v32", "deepseek_v4")
FAMILIES_ON = {1: OF_KINDS, 2: FAMILIES, 3: ON_THREE, 4: ON_FOUR, 8: ON_EIGHT}
# test_eps_of_the_latents_norms has all on one rank, test_combinations.py all layouts of one and two ranks.
QUICK = {1: (), 2: OF_KINDS, 3: ("deepseek_v3", "deepseek_v4"), 8: ("deepseek_v3",)}
QUICK[4] = ("deepseek_v3", "glm_moe_dsa", "deepseek_v4", "glm5_next_text", "hy_v4")
SIZES = [
    pytest.param(tp, family, marks=() if family in QUICK[tp] else pytest.mark.thorough)
    for tp, names in FAMILIES_ON.items()
    for family in names
    if family in FAMILIES
]


@pytest.mark.parametrize(("tp", "family"), SIZES)
def test_logits_and_tokens(family: str, tp: int, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path)
    is_v4 = family == "deepseek_v4"
    interleaves = (1, 2) if is_v4 else {1: (1, 2), 2: (1, 2, 16), 3: (2, 16)}.get(tp, (1, 16))
    if family == "glm5_next_text":  # a block holds 4 pools
        interleaves = (1, 2, 4)
    cases = make_cases(tp, [tp], interleaves, ("ag_rs", "a2a") if tp > 1 else ("auto",), is_v4)
    # Not all pairs of an interleave, an exchange, a variant and a size of chunks: they are independent.
    if tp == 1:
        cases = cases[:2]
    elif family not in OF_KINDS:
        cases = cases[1:3]
    else:
        smaller = divisors(tp)[-2:-1]
        cases = cases[1 : 5 if tp == 2 else 3] + make_cases(tp, smaller, (2,), ("auto",), is_v4)
    check(reference, tmp_path, tp, cases)


def rewrite_config(directory: Path, changes: dict[str, Any]) -> None:
    """Set fields of a saved config; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("interleaved", [True, False, None])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_layout_of_index_keys(family: str, interleaved: bool | None, tmp_path: Path) -> None:
    """The config's indexer_rope_interleave decides, else the family.

    vLLM and SGLang decided: their models of DeepSeek-V3.2 and GLM-5 read the field (`is_neox_style=not
    getattr(config, "indexer_rope_interleave", ...)`), and GLM publishes it as true. transformers' ignore it (its pull
    request 46842): DeepSeek-V3.2's always rotates halves, as DeepSeek does since its commit "rope in indexer is
    not interleaved" (8631a813), and GLM's always pairs. So each is the oracle of one value, for both families.
    DeepSeek-V4 has pairs alone.
    """
    if family == "deepseek_v4":
        reference = save_tiny(family, tmp_path)
    else:
        rotates_pairs = family == "glm_moe_dsa" if interleaved is None else interleaved
        reference = save_tiny("glm_moe_dsa" if rotates_pairs else "deepseek_v32", tmp_path)
        pattern = {"indexer_types": None, "index_topk_pattern": "FSF"}  # DeepSeek-V3.2's name for layers that share
        layers = pattern if rotates_pairs and family == "deepseek_v32" else {}
        mlps = ["dense"] + ["sparse"] * (reference.config.num_hidden_layers - 1)
        rewrite_config(tmp_path, {"model_type": family, "mlp_layer_types": mlps, **layers})
    rewrite_config(tmp_path, {"indexer_rope_interleave": interleaved})
    if family == "deepseek_v4" and interleaved is False:
        with pytest.raises(ValueError, match="indexer_rope_interleave is False; .* it must be True"):
            load_config(tmp_path)
        return
    check(reference, tmp_path, 1, [Case(DCPConfig(block_size=32), 1000)])


def small_latents(family: str, directory: Path) -> Any:
    """Save a model whose latents, and index keys, are about as small as the root of their norms' eps, 1e-6; other
    norms' is 1e-3.
    """
    if family == "kimi_k3":
        return save_tiny(family, directory, latent_factor=1e-3, rms_norm_eps=1e-3)
    model = save_tiny(family, directory, rms_norm_eps=1e-3)
    for name, weight in model.named_parameters():
        if "q_a_proj" in name or "kv_a_proj" in name or name.endswith("indexer.wk.weight"):
            weight.data *= 1e-3
    model.save_pretrained(directory)
    return model


def test_eps_of_the_latents_norms(tmp_path: Path) -> None:
    """The latents' norms have an eps of their own, whatever the config's rms_norm_eps."""
    references = [small_latents(family, tmp_path / family) for family in FAMILIES]
    results = run_ranks(1, run_families, [tmp_path / family for family in FAMILIES], timeout=300)[0]
    for family, reference, (tokens, logits) in zip(FAMILIES, references, results, strict=True):
        Oracle(reference).check(prompts()[3], tokens, logits, family)


def run_families(directories: list[Path]) -> Answers:
    """On one rank: the fourth prompt's new tokens and their logits, by each model."""
    case = Case(DCPConfig(block_size=16), 1000)
    return [run_cases(directory, [case], "cpu")[0][3] for directory in directories]
