"""MTP modules of GLM-5-Next, dots3 and Ling: answers with drafts, over prefixes that are found, too; bytes as planned;
fields of configs. test_mtp.py has their drafts.
"""

import json
from pathlib import Path

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import family_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.speculation import mtp_graphs
from dcpmla.runtime.mtp import MtpDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_mtp import HYBRIDS, MODULES, NUM_DRAFTS, PROMPTS, module_of, serve_families
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import tiny_config
from tests.support.oracle import Oracle
from tests.support.plain_mtp import PlainMtp
from tests.support.ranks import message_of, run_ranks
from tests.support.whole_models import load_on_rank, poisoned_cache

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
needs_new = pytest.mark.skipif(len(HYBRIDS) < 4, reason="needs a transformers with GLM-5-Next and dots3")


class Always(MtpDrafter):
    drafts_always = True


def serve_twice(directories: list[Path], dcp: DCPConfig) -> list[tuple[list[list[int]], int, int, int]]:
    """On one rank: tokens of prompts that are served twice, cached tokens, drafts, and accepted drafts."""
    outcomes = []
    for directory in directories:
        model, mesh = load_on_rank(directory, dcp, with_mtp=True)
        model.keep_hidden_states(64)
        cache = poisoned_cache(model, dcp, [80] * 6, 12, NUM_DRAFTS)
        graphs = [maker.make(cache) for maker in mtp_graphs(NUM_DRAFTS, model, 4, 100)]
        drafter = Always(NUM_DRAFTS, model, cache, mesh, *graphs)
        engine = new_engine(model, cache, dcp, mesh, 100, 13, 4, drafter=drafter)
        params, requests = SamplingParams(max_new_tokens=9, ignore_eos=True), []
        for _ in range(2):
            requests += [engine.add(prompt, params) for prompt in PROMPTS]
            list(engine.run())
        num_cached = max(request.num_cached_tokens for request in requests[len(PROMPTS) :])
        numbers = num_cached, engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
        outcomes.append(([request.token_ids for request in requests], *numbers))
    return outcomes


@pytest.mark.parametrize("dcp_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_answers_over_prefixes_with_accepted_drafts(dcp_size: int, tmp_path: Path) -> None:
    """Accepted and rejected drafts move the states; the second answers begin at cached prefixes."""
    modules = {name: module_of(name).agree(0.006) for name in HYBRIDS}
    directories = [module.save(tmp_path / name) for name, module in modules.items()]
    dcp = dcp_config(2, dcp_size, dcp_size, block_size=8, context_workspace_tokens=8 * 4 * dcp_size)
    for (tokens, num_cached, num_drafts, num_accepted), module in zip(
        run_ranks(2, serve_twice, directories, dcp)[0], modules.values(), strict=True
    ):
        for prompt, new in zip(PROMPTS * 2, tokens, strict=True):
            Oracle(module.base).check_tokens(prompt, new)
        assert num_cached >= 16
        assert 0 < num_accepted < num_drafts


def test_bytes_as_planned(tmp_path: Path) -> None:
    check_bytes([module_of(name).save(tmp_path / name) for name in MODULES], 2, with_mtp=True)


@needs_new
@pytest.mark.parametrize(
    ("file", "row", "state", "num_billions"),
    [("glm5_next", 2 * (576 + 128 // 16), 4 * 3 * 128, 7.4), ("dots3_note", 2 * 1088, 0, 1.1)],
)
def test_published_sizes_with_a_module(file: str, row: int, state: int, num_billions: float) -> None:
    """A row more for each token, GLM-5-Next's sums of a pool, and the weights of a layer and an embedding."""
    config = load_config(CONFIGS / f"{file}.json")
    sizes = [read_model(config, with_mtp) for with_mtp in (False, True)]
    plans = [size.attention.plan_cache(DCPConfig(), [4096], torch.bfloat16) for size in sizes]
    assert plans[1].bytes_per_token - plans[0].bytes_per_token == row
    assert plans[1].bytes_per_state - plans[0].bytes_per_state == state
    assert round((sizes[1].num_parameters - sizes[0].num_parameters) / 1e9, 1) == num_billions


def test_plan_counts_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("bailing_hybrid")
    config.save_pretrained(tmp_path)
    plans = []
    for method in ("ngram", "mtp"):
        out = tmp_path / f"{method}.json"
        main(["plan", "--model", str(tmp_path), "-tp", "2", "--speculative-method", method, "--json", str(out)])
        plans.append(json.loads(out.read_text())["settings"][0])
    weights, rows = ([plan[name] for plan in plans] for name in ("weight_bytes_per_rank", "kv_bytes_per_token"))
    assert weights[0] < weights[1]
    assert rows == [2 * 24 * 2, 3 * 24 * 2]
    tiny_config("youtu").save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--speculative-method", "mtp"]) == 2
    assert "config has no num_nextn_predict_layers" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["bailing_hybrid", "deepseek_v3"])
@pytest.mark.parametrize("value", [2, "x"])
def test_only_one_module_is_computed(family: str, value: object) -> None:
    config = tiny_config(family)
    config.num_nextn_predict_layers = value
    with pytest.raises(ValueError, match=f"has num_nextn_predict_layers {value!r}, and one module is computed: leave"):
        family_of(config).check_mtp(config)


@needs_new
def test_fields_and_names_of_dots3(tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "dots3_note.json").read_text())
    file = tmp_path / "config.json"
    for types, kind in ((None, "sliding_attention"), (["full_attention"], "indexed_attention")):
        file.write_text(json.dumps(raw | {"mtp_layer_types": types}))
        config = load_config(file)
        family_of(config).check_mtp(config)
        assert family_of(config).with_mtp_layer(config).layer_types[-1] == kind
    file.write_text(json.dumps(raw | {"mtp_layer_types": ["linear_attention"]}))
    with pytest.raises(ValueError, match=r"mtp_layer_types is \['linear_attention'\]; it must be"):
        load_config(file)
    published = "model.language_model.mtp.embed_tokens.weight"
    assert find_family("dots3_note").module_name(published, 46) == "model.layers.46.embed_tokens.weight"


@needs_new
def test_a_checkpoint_without_the_modules_embedding(tmp_path: Path) -> None:
    module = PlainMtp("dots3_note_text")
    del module.own[module.names.embedding]
    directory = module.save(tmp_path / "model")
    (message,) = run_ranks(1, message_of, serve_families, [directory], 1, 1)
    assert "tensor model.layers.4.embed_tokens.weight of the MTP module is missing" in message
