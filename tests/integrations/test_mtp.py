"""Drafts of MTP modules against a module in plain torch, around transformers' own attention and experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.speculation import check_speculation, mtp_graphs
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.mtp import MtpDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import MLA_FAMILIES, tiny_config
from tests.support.plain_mtp import PlainMtp, plain_module
from tests.support.ranks import run_ranks

CPU, NUM_DRAFTS = torch.device("cpu"), 3
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash", "deepseek_v4")
FAMILIES += tuple(family for family in ("hy_v4",) if family in MLA_FAMILIES)
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
Record = list[tuple[list[int], list[int]]]  # known tokens of a request, and the drafts that followed


class Recording(MtpDrafter):
    """It drafts in every step, other numbers for other requests, and notes what."""

    drafts_always = True

    def draft(self, wanted: Any, previous: Any) -> Any:
        wanted = [(request, min(num, max(1, NUM_DRAFTS - request.request_id))) for request, num in wanted]
        drafts = super().draft(wanted, previous)
        flat = drafts.token_ids.tolist()
        for (request, _), num in zip(wanted, drafts.nums, strict=True):
            if num:
                tokens = request.tokens(0, request.num_known_tokens)
                if request.num_in_flight:
                    row = previous.rows[request]
                    num_accepted = 0 if previous.verified is None else int(previous.verified.num_accepted[row])
                    start = previous.starts[row]
                    tokens += previous.message.tokens[start : start + 1 + num_accepted].tolist()
                self.record.append((tokens, flat[:num]))
                flat = flat[num:]
        return drafts


def serve_families(
    directories: list[Path], tp: int, dcp_size: int, num_drafts: int = NUM_DRAFTS, deterministic: bool = False
) -> list[tuple[list[list[int]], Record]]:
    """On one rank: each model's tokens and drafts, eagerly and padded as graphs are."""
    interleave = 64 if deterministic else 1
    rows = {"block_size": 4 * interleave, "context_workspace_tokens": 16 * interleave * dcp_size}
    dcp = dcp_config(tp, dcp_size, interleave, **rows, deterministic=deterministic)
    mesh = init_mesh(tp, dcp_size)
    exchange = select_exchange(dcp, mesh.dcp_group, CPU)
    outcomes = []
    for directory in directories:
        config = load_config(directory)
        family_of(config).check_mtp(config)
        model = load_model(directory, config, dcp, mesh, exchange, torch.float32, CPU, with_mtp=True)
        model.keep_hidden_states(64)
        for with_graph in (False, True):
            plan = model.attention.plan_cache(dcp, [60] * 4, model.dtype, 4, num_drafts)
            cache: Any = plan.allocate(CPU)
            for memory in cache.tensors:
                memory.fill_(torch.nan)
            options: dict[str, Any] = {}
            if with_graph:
                steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
                costs = DrawnCosts(0, absorbs=steps.layout.traits.absorbs_pieces)
                query_len = 1 + num_drafts
                options["costs"] = costs
                common = cache, steps, mesh
                options["graph"] = StepGraph.decodes(model.decode, torch.tensor(0), *common, 4, 100, query_len)
                options["mixed_graph"] = StepGraph.prompts(model, *common, 16, 4, 100, costs.tokens_per_request)
            graphs = [maker.make(cache) for maker in mtp_graphs(num_drafts, model, 4, 100)]
            drafter = Recording(num_drafts, model, cache, mesh, *graphs)
            drafter.record = []
            engine = new_engine(model, cache, dcp, mesh, 100, 16, 4, drafter=drafter, **options)
            params = SamplingParams(max_new_tokens=8, ignore_eos=True)
            requests = [engine.add(prompt, params, request_id=index) for index, prompt in enumerate(PROMPTS)]
            list(engine.run())
            assert engine.allocator.num_free == plan.num_blocks
            outcomes.append(([request.token_ids for request in requests], drafter.record))
    return outcomes


@pytest.mark.parametrize(
    ("tp", "dcp_size", "families", "num_drafts", "deterministic"),
    [
        (2, 2, FAMILIES, NUM_DRAFTS, False),
        (4, 2, ("deepseek_v3",), NUM_DRAFTS, False),
        (2, 2, ("deepseek_v3",), 1, False),
        (2, 2, ("deepseek_v3",), NUM_DRAFTS, True),
    ],
)
def test_drafts_are_those_of_the_module(
    tp: int, dcp_size: int, families: tuple[str, ...], num_drafts: int, deterministic: bool, tmp_path: Path
) -> None:
    modules = [plain_module(family) for family in families]
    directories = [module.save(tmp_path / family) for module, family in zip(modules, families, strict=True)]
    ranks = run_ranks(tp, serve_families, directories, tp, dcp_size, num_drafts, deterministic)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for index, (tokens, record) in enumerate(ranks[0]):
        module = modules[index // 2]
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            with torch.no_grad():
                logits = module.base(torch.tensor([prompt + new[:-1]])).logits[0, len(prompt) - 1 :]
            assert new == logits.argmax(-1).tolist()
        assert len(record) > 10
        for known, drafts in record[:: max(1, len(record) // 6)]:
            assert drafts == module.drafts(known, len(drafts)), (families[index // 2], index % 2, len(known))


def test_models_without_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match="config has no num_nextn_predict_layers: leave --speculative-method mtp out"):
        family_of(tiny_config("mistral4")).check_mtp(tiny_config("mistral4"))
    check_speculation(tiny_config("deepseek_v4"), DCPConfig(), "ngram")
    scaled = DCPConfig(kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ValueError, match="leave --calculate-kv-scales out, or take ngram"):
        check_speculation(tiny_config("longcat_flash"), scaled, "mtp")
    check_speculation(tiny_config("mistral4"), DCPConfig(), "ngram")


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


def test_a_checkpoint_without_a_module_is_refused(tmp_path: Path) -> None:
    module = PlainMtp("deepseek_v3")
    module.own = {}
    directory = module.save(tmp_path / "model")
    with pytest.raises(AssertionError, match=r"model\.layers\.2\.eh_proj\.weight of the MTP module is missing"):
        run_ranks(1, serve_families, [directory], 1, 1)
