"""Drafts of the MTP modules of GLM-5-Next, dots3 and Ling, against a module in plain torch; answers with drafts, over
prefixes that are found, too; bytes as planned; fields of configs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import family_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.speculation import mtp_graphs
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.mtp import MtpDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_mtp import CPU, FAMILIES, NUM_DRAFTS, PROMPTS, serve_families
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import STATE_FAMILIES, WINDOW_FAMILIES, tiny_config
from tests.support.plain_mtp import PlainMtp, plain_module
from tests.support.ranks import run_ranks

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {})
    for family in ("glm5_next_text", "dots3_note_text", "bailing_hybrid")
    if family in STATE_FAMILIES + WINDOW_FAMILIES
}
if WINDOW_FAMILIES:
    MODULES["dots3_indexed"] = "dots3_note_text", {"mtp_layer_types": ["full_attention"]}
needs_new = pytest.mark.skipif(len(MODULES) < 4, reason="needs a transformers with GLM-5-Next and dots3")


def check_greedy(module: PlainMtp, prompt: list[int], tokens: list[int]) -> None:
    with torch.no_grad():
        logits = module.base(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("tp", "dcp_size"), [(1, 1), (2, 1), (2, 2)])
def test_drafts_are_those_of_the_module(tp: int, dcp_size: int, tmp_path: Path) -> None:
    modules = {name: PlainMtp(family, **fields) for name, (family, fields) in MODULES.items()}
    directories = [module.save(tmp_path / name) for name, module in modules.items()]
    ranks = run_ranks(tp, serve_families, directories, tp, dcp_size, NUM_DRAFTS)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for index, (tokens, record) in enumerate(ranks[0]):
        name = list(modules)[index // 2]
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            check_greedy(modules[name], prompt, new)
        assert len(record) > 10
        long = [each for each in record if len(each[0]) > 31]  # the module selects among its tokens
        for known, drafts in long + record[index % 2 :: max(1, len(record) // 2)]:
            assert drafts == modules[name].drafts(known, len(drafts)), (name, index % 2, len(known))


class Always(MtpDrafter):
    drafts_always = True


def serve_twice(directories: list[Path], dcp: DCPConfig) -> list[tuple[list[list[int]], int, int, int]]:
    """On one rank: tokens of prompts that are served twice, cached tokens, drafts, and accepted drafts."""
    mesh, outcomes = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), []
    exchange = select_exchange(dcp, mesh.dcp_group, CPU)
    for directory in directories:
        model = load_model(directory, load_config(directory), dcp, mesh, exchange, torch.float32, CPU, with_mtp=True)
        model.keep_hidden_states(64)
        cache: Any = model.attention.plan_cache(dcp, [80] * 6, model.dtype, 12, NUM_DRAFTS).allocate(CPU)
        for memory in cache.tensors:
            memory.fill_(torch.nan)
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


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_answers_over_prefixes_with_accepted_drafts(dcp_size: int, tmp_path: Path) -> None:
    """Accepted and rejected drafts move the states; the second answers begin at cached prefixes."""
    modules = {name: PlainMtp(family, **fields).agree(0.006) for name, (family, fields) in MODULES.items()}
    directories = [module.save(tmp_path / name) for name, module in modules.items()]
    dcp = dcp_config(2, dcp_size, dcp_size, block_size=8, context_workspace_tokens=8 * 4 * dcp_size)
    for (tokens, num_cached, num_drafts, num_accepted), module in zip(
        run_ranks(2, serve_twice, directories, dcp)[0], modules.values(), strict=True
    ):
        for prompt, new in zip(PROMPTS * 2, tokens, strict=True):
            check_greedy(module, prompt, new)
        assert num_cached >= 16
        assert 0 < num_accepted < num_drafts


def test_bytes_as_planned(tmp_path: Path) -> None:
    modules = {family: plain_module(family) for family in FAMILIES}
    modules |= {name: PlainMtp(family, **fields) for name, (family, fields) in MODULES.items()}
    check_bytes([module.save(tmp_path / name) for name, module in modules.items()], 2, with_mtp=True)


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
    with pytest.raises(AssertionError, match=r"tensor model\.layers\.4\.embed_tokens\.weight of the MTP module is mis"):
        run_ranks(1, serve_families, [directory], 1, 1)
