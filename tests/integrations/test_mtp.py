"""MTP modules: drafts of a module in plain torch, around transformers' own attention and experts; bytes; configs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import family_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.speculation import check_speculation, draft_graphs
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.modules import ModuleDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.combinations import WITH_MODULE
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, WINDOW_FAMILIES, tiny_config
from tests.support.oracle import Oracle
from tests.support.plain_mtp import PlainMtp, plain_module
from tests.support.plan_cases import CONFIGS
from tests.support.ranks import message_of, run_ranks
from tests.support.two_jobs import known_tokens
from tests.support.whole_models import load_on_rank, poisoned_cache

CPU, NUM_DRAFTS = torch.device("cpu"), 3
# By name, a family and fields of its config.
MODULES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in WITH_MODULE if family in FAMILIES}
if WINDOW_FAMILIES:
    MODULES["dots3_indexed"] = "dots3_note_text", {"mtp_layer_types": ["full_attention"]}
HYBRIDS = [name for name in MODULES if name in ("glm5_next_text", "dots3_note_text", "bailing_hybrid", "dots3_indexed")]
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
Record = list[tuple[list[int], list[int]]]  # known tokens of a request, and the drafts that followed


def module_of(name: str) -> PlainMtp:
    """Return a module of MODULES in plain torch."""
    family, fields = MODULES[name]
    return PlainMtp(family, **fields) if fields else plain_module(family)


class Recording(ModuleDrafter):
    """It drafts in every step, other numbers for other requests, and notes what."""

    drafts_always = True

    def draft(self, wanted: Any, previous: Any) -> Any:
        wanted = [(request, min(num, max(1, NUM_DRAFTS - request.request_id))) for request, num in wanted]
        drafts = super().draft(wanted, previous)
        flat = drafts.token_ids.tolist()
        for (request, _), num in zip(wanted, drafts.nums, strict=True):
            if num:
                self.record.append((known_tokens(request, previous), flat[:num]))
                flat = flat[num:]
        return drafts


def serve_families(
    directories: list[Path], tp: int, dcp_size: int, num_drafts: int = NUM_DRAFTS, deterministic: bool = False
) -> list[tuple[list[list[int]], Record]]:
    """On one rank: each model's tokens and drafts, eagerly and padded as graphs are."""
    interleave = 64 if deterministic else 1
    rows = {"block_size": 4 * interleave, "context_workspace_tokens": 16 * interleave * dcp_size}
    dcp = dcp_config(tp, dcp_size, interleave, **rows, deterministic=deterministic)
    outcomes = []
    for directory in directories:
        config = load_config(directory)
        family_of(config).check_mtp(config)
        model, mesh = load_on_rank(directory, dcp, with_mtp=True)
        assert model.drafts is not None
        model.drafts.keep(64)
        for with_graph in (False, True):
            cache = poisoned_cache(model, dcp, [60] * 4, 4, num_drafts)
            options: dict[str, Any] = {}
            if with_graph:
                steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
                costs = DrawnCosts(0, absorbs=steps.layout.traits.absorbs_pieces)
                query_len = 1 + num_drafts
                options["costs"] = costs
                common = cache, steps, mesh
                options["graph"] = StepGraph.decodes(model.decode, torch.tensor(0), *common, 4, 100, query_len)
                options["mixed_graph"] = StepGraph.prompts(model, *common, 16, 4, 100, costs.tokens_per_request)
            graphs = [maker.make(cache) for maker in draft_graphs(num_drafts, model, 4, 100)]
            drafter = Recording(num_drafts, model.drafts, cache, mesh, *graphs)
            drafter.record = []
            engine = new_engine(model, cache, dcp, mesh, 100, 16, 4, drafter=drafter, **options)
            params = SamplingParams(max_new_tokens=8, ignore_eos=True)
            requests = [engine.add(prompt, params, request_id=index) for index, prompt in enumerate(PROMPTS)]
            list(engine.run())
            assert engine.allocator.num_free == cache.sizes.num_blocks
            outcomes.append(([request.token_ids for request in requests], drafter.record))
    return outcomes


@pytest.mark.parametrize(
    ("tp", "dcp_size", "names", "num_drafts", "deterministic"),
    [
        (2, 2, [*MODULES], NUM_DRAFTS, False),
        pytest.param(1, 1, HYBRIDS, NUM_DRAFTS, False, marks=pytest.mark.thorough),
        pytest.param(2, 1, HYBRIDS, NUM_DRAFTS, False, marks=pytest.mark.thorough),
        pytest.param(4, 2, ("deepseek_v3",), NUM_DRAFTS, False, marks=pytest.mark.thorough),
        (2, 2, ("deepseek_v3",), 1, False),
        (2, 2, ("deepseek_v3",), NUM_DRAFTS, True),
    ],
)
def test_drafts_are_those_of_the_module(
    tp: int, dcp_size: int, names: Sequence[str], num_drafts: int, deterministic: bool, tmp_path: Path
) -> None:
    modules = [module_of(name) for name in names]
    directories = [module.save(tmp_path / name) for module, name in zip(modules, names, strict=True)]
    ranks = run_ranks(tp, serve_families, directories, tp, dcp_size, num_drafts, deterministic)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    oracles = [Oracle(module.base) for module in modules]
    for index, (tokens, record) in enumerate(ranks[0]):
        module, name = modules[index // 2], names[index // 2]
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            oracles[index // 2].check_tokens(prompt, new, name)
        assert len(record) > 10
        checked = record[:: max(1, len(record) // 6)]
        if name in HYBRIDS:
            long = [each for each in record if len(each[0]) > 31]  # the module selects among its tokens
            checked = long + record[index % 2 :: max(1, len(record) // 2)]
        for known, drafts in checked:
            assert drafts == module.drafts(known, len(drafts)), (name, index % 2, len(known))


REFUSED = [
    ("mistral4", None, "config has no num_nextn_predict_layers: leave --speculative-method mtp out"),
    ("axk2", 1, "'mtp', which A.X-K2 does not have"),
    ("kimi_linear", 1, "MTP modules of kimi_linear are not computed: leave --speculative-method mtp"),
    ("mistral_large4_text", 1, r"module \(mtp_dspark\) is not computed: leave --speculative-method mtp out"),
]
MANY = "has num_nextn_predict_layers {!r}, and one module is computed: leave"
REFUSED += [
    (family, number, MANY.format(number)) for family in ("bailing_hybrid", "deepseek_v3") for number in (2, "x")
]


@pytest.mark.parametrize(("family", "num_modules", "message"), [row for row in REFUSED if row[0] in FAMILIES])
def test_models_without_one_module_are_refused(family: str, num_modules: Any, message: str) -> None:
    config = tiny_config(family)
    config.num_nextn_predict_layers = num_modules
    with pytest.raises(ValueError, match=message):
        family_of(config).check_mtp(config)
    check_speculation(config, DCPConfig(), "ngram")


def test_scales_of_first_prompts_are_refused() -> None:
    scaled = DCPConfig(kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ValueError, match="leave --calculate-kv-scales out, or take ngram"):
        check_speculation(tiny_config("longcat_flash"), scaled, "mtp")


@pytest.mark.parametrize(
    ("field", "layers", "window", "other"),
    [
        ("compress_ratios", [0, 4, 128], 0, 4),
        ("compress_ratios", [0, 4, 128], 0, 128),
        ("layer_types", ["sliding_attention"] * 3, "sliding_attention", "compressed_sparse_attention"),
    ],
)
def test_a_module_that_compresses_is_refused(
    field: str, layers: list[Any], window: int | str, other: int | str, tmp_path: Path
) -> None:
    """DeepSeek-V4's config has an entry of its module after the decoder layers'."""
    raw = json.loads(tiny_config("deepseek_v4").to_json_string())
    raw |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "layer_types": None, "mlp_layer_types": None}
    file = tmp_path / "config.json"
    for entries in ([], [window], [window, other]):  # the second module is never loaded
        file.write_text(json.dumps(raw | {field: layers + entries}))
        config = load_config(file)
        family_of(config).check_mtp(config)
        assert family_of(config).with_mtp_layer(config).layer_types[3] == "sliding_attention"
    file.write_text(json.dumps(raw | {field: [*layers, other]}))
    check_speculation(load_config(file), DCPConfig(), "ngram")
    with pytest.raises(ValueError, match=f"--speculative-method.*{field} has {other!r} for the MTP layer; it must be"):
        family_of(load_config(file)).check_mtp(load_config(file))


NO_EMBEDDING = ("dots3_note_text", ["model.mtp.embed_tokens.weight"], "model.layers.4.embed_tokens.weight")


@pytest.mark.parametrize(
    ("family", "left_out", "name"),
    [("deepseek_v3", None, "model.layers.2.eh_proj.weight"), *([NO_EMBEDDING] if WINDOW_FAMILIES else [])],
)
def test_a_checkpoint_without_a_module_is_refused(
    family: str, left_out: list[str] | None, name: str, tmp_path: Path
) -> None:
    """Without all of its tensors, or without dots3's embedding."""
    module = PlainMtp(family)
    for own in left_out or list(module.own):
        del module.own[own]
    directory = module.save(tmp_path / "model")
    (message,) = run_ranks(1, message_of, serve_families, [directory], 1, 1)
    assert f"{name} of the MTP module is missing" in message


def test_bytes_as_planned(tmp_path: Path) -> None:
    check_bytes([module_of(name).save(tmp_path / name) for name in MODULES], 2, with_mtp=True)


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


@pytest.mark.skipif(not WINDOW_FAMILIES, reason="needs a transformers with dots3")
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
