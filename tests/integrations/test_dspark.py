"""DSpark modules: drafts of the published formulas in plain torch, through engines as users get them."""

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_maker import EngineMaker
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.shortened import shortened
from dcpmla.integrations.speculation import check_speculation
from dcpmla.model.moe import MoE
from dcpmla.parallel.formats import format_name
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_combinations import ALPHABET, check, words_of
from tests.integrations.test_combinations import serve as serve_rows
from tests.integrations.test_handoffs import draw_prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support import recording
from tests.support.combinations import Row, by_ranks
from tests.support.deepseek_v41_files import DSPARK, save_v41
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, tiny_config
from tests.support.oracle import Oracle
from tests.support.plain_dspark import FIELDS, NUM_BLOCKS, PlainDSpark, PlainDSpark41
from tests.support.plan_cases import CONFIGS
from tests.support.ranks import on_ranks, run_ranks
from tests.support.small_tokenizers import ascii_tokenizer
from tests.support.two_jobs import record_drafts, run_jobs
from tests.support.whole_models import load_engine_on_rank, load_on_rank, serve

BLOCK = 5
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 111)]]
NUM_NEW = 9
Record = list[tuple[list[int], list[int]]]


class Outcome(NamedTuple):
    """An engine's prompts and new tokens, its drafts, accepted ones by position, and tokens that it found cached."""

    answers: list[tuple[list[int], list[int]]]
    record: Record
    num_accepted_at: list[int]
    num_cached: int


def load(model: Path, dcp: DCPConfig, num_drafts: int, device: str = "cpu", **options: Any) -> Engine:
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22}
    drafts = {"speculative_method": "dspark", "num_speculative_tokens": num_drafts}
    chosen = EngineOptions(dtype="float32", **limits | drafts | options)
    return load_engine_on_rank(model, dcp, chosen, device_type=device)


def serve_module(
    directories: Sequence[Path], tp: int, dcp_size: int, interleave: int, num_drafts: int, in_graphs: bool, device: str
) -> list[Outcome]:
    """On one rank: serve prompts, then longer ones that begin with them."""
    dcp, outcomes = dcp_config(tp, dcp_size, interleave, block_size=4), []
    for model in directories:
        with pytest.MonkeyPatch.context() as patch:
            if in_graphs and device == "cpu":
                patch.setattr(EngineMaker, "is_captured", True)
                patch.setattr(StepGraph, "capture", lambda graph, *_: recording.capture(graph))
            engine = load(model, dcp, num_drafts, device)
        drafter = engine.speculation.drafter
        record = record_drafts(drafter)
        drafter.reads_tokens = not in_graphs  # else drafts follow tokens that the device alone knows
        requests = serve(engine, PROMPTS, NUM_NEW, ignore_eos=True)
        more = [[*request.prompt_token_ids, *request.token_ids, 9, 8, 7] for request in requests]
        requests += serve(engine, more, NUM_NEW, ignore_eos=True)
        answers = [(request.prompt_token_ids, request.token_ids) for request in requests]
        outcomes.append(Outcome(answers, record, engine.stats.num_accepted_at, engine.stats.num_cached_tokens))
        engine.close()
    return outcomes


class Modules(NamedTuple):
    """Saved models with modules, their oracles and, by the tokens before, drafts by the formula."""

    directories: list[Path]
    oracles: list[Oracle]
    drafts: list[Callable[..., list[int]]]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    v4, folder = PlainDSpark(), tmp_path_factory.mktemp("modules")
    directories = [v4.save(folder / "v4"), folder / "v41"]
    reference = save_v41(directories[1], **DSPARK, engram_layer_ids=[1, 4])
    plain: list[Any] = [v4, PlainDSpark41(reference, reference.model)]
    # Layouts ask for drafts after the same tokens.
    drafts = [cache(lambda *known, module=module: module.drafts([*known], BLOCK)) for module in plain]
    return Modules(directories, [Oracle(v4.base), Oracle(reference)], drafts)


LAYOUTS = [
    (1, 1, 1, BLOCK, False, "cpu"),
    (1, 1, 1, 3, True, "cpu"),
    (2, 1, 1, 3, False, "cpu"),
    (2, 2, 1, BLOCK, False, "cpu"),
    (4, 4, 2, 4, False, "cpu"),
    pytest.param(1, 1, 1, BLOCK, True, "cuda", marks=pytest.mark.gpu),
    pytest.param(2, 2, 1, 3, True, "cuda", marks=pytest.mark.gpu_2),
]


@pytest.mark.parametrize(("tp", "dcp_size", "interleave", "num_drafts", "in_graphs", "device"), LAYOUTS)
def test_drafts_are_those_of_the_formula(
    tp: int, dcp_size: int, interleave: int, num_drafts: int, in_graphs: bool, device: str, modules: Modules
) -> None:
    """So accepted lengths are the same on every layout. Contexts come from pieces of prompts, decodes and states that
    earlier requests left.
    """
    layout = tp, dcp_size, interleave, num_drafts, in_graphs, device
    ranks = run_ranks(tp, serve_module, modules.directories, *layout, device=device)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for oracle, drafts_of, outcome in zip(modules.oracles, modules.drafts, ranks[0], strict=True):
        for prompt, new in outcome.answers:
            oracle.check_tokens(prompt, new)
        assert outcome.num_cached > 0
        assert len(outcome.record) > 20
        assert {len(drafts) for _, drafts in outcome.record} == {*range(1, num_drafts + 1)}
        for known, drafts in outcome.record:
            assert drafts == drafts_of(*known)[: len(drafts)], len(known)


ROWS = [
    Row(family, tuple(f"{layout}, dspark, {levels}".split(", ")))
    for family, layout, levels in (
        ("deepseek_v4", "tp 1", "short steps, prefix hits, host, ample, exact, graphs, grammar, two choices"),
        ("deepseek_v4", "tp 2", "long steps, no reuse, no tiers, preemption, exact, graphs"),
        ("deepseek_v4", "dcp 2 by token", "short steps, prefix hits, disk, ample, exact, graphs, free, two choices"),
        ("deepseek_v41", "tp 1", "long steps, prefix hits, no tiers, preemption, exact, graphs, grammar, two choices"),
        ("deepseek_v41", "dcp 2 in groups", "short steps, prefix hits, host, ample, exact, eager"),
    )
]


def save_drafting(family: str, directory: Path) -> Any:
    """Save a model whose drafts are the two tokens that answers have, so that some are right by chance."""
    if family == "deepseek_v4":
        module = PlainDSpark()
        module.save(directory)
        ascii_tokenizer(VOCAB_SIZE).save_pretrained(directory)
        weights, reference, head = module.base.state_dict(), module.base, "lm_head.weight"
    else:
        reference = save_v41(directory, **DSPARK, engram_layer_ids=[1, 4])
        weights, head = reference.model.tensors, "head.weight"
    file = directory / "model.safetensors"
    stored, others = load_file(file), [token for token in range(VOCAB_SIZE) if token not in ALPHABET]
    for name, weight in stored.items():
        if name == head or name.endswith((".markov_w2.weight", ".markov_head.head.weight")):
            weight[others] *= 0.01
    save_file(stored, file, metadata={"format": "pt"})
    weights[head].data[others] *= 0.01
    return reference


@pytest.mark.parametrize(("family", "rows"), [(family, rows) for family, _, rows in by_ranks(ROWS)])
def test_every_feature(family: str, rows: list[Row], tmp_path: Path) -> None:
    if any(row.has("grammar") for row in rows):
        pytest.importorskip("llguidance")
    oracle = Oracle(save_drafting(family, tmp_path / "model"))
    words = words_of(tmp_path / "model")
    for ranks in run_ranks(rows[0].num_ranks, serve_rows, tmp_path / "model", rows, "cpu", timeout=500):
        for row, served in zip(rows, ranks, strict=True):
            check(row, served, oracle, words)


def test_contexts_move_between_jobs(tmp_path: Path) -> None:
    """The first drafts of a decoding job are those of the module over the whole prompt."""
    meeting, module = tmp_path / "meeting", PlainDSpark()
    meeting.mkdir()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    prompts = [prompt._replace(params=params) for prompt in draw_prompts()]
    layouts = [dcp_config(2, 2, 1, block_size=64), dcp_config(1, 1, 1, block_size=64)]
    drafting = {"speculative_method": "dspark", "num_speculative_tokens": 2}
    _, (decoded,) = run_jobs(module.save(tmp_path / "model"), *layouts, prompts, meeting, **drafting)
    assert (decoded.received.num_done, decoded.num_prefilled) == (3, 0)
    assert len(decoded.drafts) >= 6
    for known, drafts in decoded.drafts:
        assert drafts == module.drafts(known, len(drafts)), len(known)


REFUSED = [
    ({"dspark_block_size": None}, "'dspark', but deepseek_v4 has no DSpark module that is computed"),
    ({"dspark_markov_rank": None}, "dspark_markov_rank is None; it must be a whole number"),
    ({"dspark_target_layer_ids": [1, 4]}, r"dspark_target_layer_ids is \[1, 4\]; it must be ascending layers of .* 4"),
    ({"dspark_target_layer_ids": [2, 1]}, r"dspark_target_layer_ids is \[2, 1\]; it must be ascending"),
    ({"module_ratios": [0, 4, 0]}, r"end in \[0, 4, 0\] for the DSpark module; each must be one of"),
    ({"dspark_noise_token_id": VOCAB_SIZE}, "dspark_noise_token_id is 192; it must be below vocab_size 192"),
    ({"dspark_num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be in"),
    ({"dspark_block_size": 2}, r"num_speculative_tokens \(--num-speculative-tokens\) is 3; .* dspark_block_size 2"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_modules_that_are_not_computed_are_refused(fields: dict[str, Any], message: str) -> None:
    config = PlainDSpark().config
    check_speculation(config, DCPConfig(), "dspark", num_drafts=3)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        check_speculation(config, DCPConfig(), "dspark", num_drafts=3)


def test_other_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mtp', but the config's module is DSpark .* 5\): take dspark"):
        family_of(PlainDSpark().config).check_mtp(PlainDSpark().config)
    with pytest.raises(ValueError, match="'dspark', but deepseek_v3 has no DSpark module"):
        check_speculation(tiny_config("deepseek_v3"), DCPConfig(), "dspark")


def message_of_missing(directory: Path) -> str:
    with pytest.raises(ValueError, match="checkpoint") as caught:
        load(directory, dcp_config(1, 1, 1, block_size=8), 3)
    return str(caught.value)


@pytest.mark.parametrize("name", ["mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight"])
def test_a_checkpoint_without_a_module_is_refused(name: str, tmp_path: Path) -> None:
    module = PlainDSpark()
    del module.own[name]
    (message,) = run_ranks(1, message_of_missing, module.save(tmp_path / "model"))
    last = name.split(".", 2)[2]
    assert message.endswith(f"{last} of the MTP module is missing: leave --speculative-method out, or take ngram")


def test_bytes_as_planned(tmp_path: Path) -> None:
    v4, v41 = PlainDSpark().save(tmp_path / "v4"), tmp_path / "v41"
    save_v41(v41, **DSPARK)
    check_bytes([v4, v41], 2, with_mtp=True)


def test_plan_counts_the_module(tmp_path: Path) -> None:
    module = PlainDSpark()
    directory = module.save(tmp_path / "model")
    plans = []
    for method in ("ngram", "dspark"):
        out = tmp_path / f"{method}.json"
        main(["plan", "--model", str(directory), "-tp", "2", "--speculative-method", method, "--json", str(out)])
        plans.append(json.loads(out.read_text())["settings"][0])
    ngram, dspark = (plan["weight_bytes_per_rank"] for plan in plans)
    assert dspark > ngram
    config = load_config(directory)
    stack = family_of(config).attention(family_of(config).with_mtp_layer(config), True)
    assert [layer.kind.block for layer in stack.layers] == [0] * config.num_hidden_layers + [BLOCK] * NUM_BLOCKS


def test_sizes_as_published(tmp_path: Path) -> None:
    """V4.1-Flash's module has 14 billion parameters. Of V4's config the ratios after the model's are the module's."""
    config = load_config(CONFIGS / "deepseek_v41_flash.json")
    check_speculation(config, DCPConfig(), "dspark", num_drafts=BLOCK)
    with_module, alone = read_model(config, with_mtp=True), read_model(config)
    of_module = num_parameters(with_module) - num_parameters(alone)
    assert 14.2e9 < of_module < 14.3e9
    raw = json.loads((CONFIGS / "deepseek_v4_flash.json").read_text())
    for ratios, num_blocks in (([0, 0], 2), ([], NUM_BLOCKS)):
        fields = FIELDS | {"compress_ratios": raw["compress_ratios"][: raw["num_hidden_layers"]] + ratios}
        (tmp_path / "config.json").write_text(json.dumps(raw | fields))
        v4 = load_config(tmp_path)
        layers = read_model(v4, with_mtp=True).attention.layers
        assert [layer.kind.block for layer in layers] == [0] * raw["num_hidden_layers"] + [BLOCK] * num_blocks


def num_parameters(size: ModelSize) -> int:
    return sum(math.prod(each.shape) * each.count for each in size.parameters)


def serve_dummy(model: Path) -> tuple[list[list[int]], int]:
    """On one rank: answers of random weights, and how many drafts were tried."""
    engine = load(model, dcp_config(2, 2, 1, block_size=8), 3, load_format="dummy")
    engine.speculation.drafter.drafts_always = True
    requests = serve(engine, PROMPTS[:2], 6, ignore_eos=True)
    return [request.token_ids for request in requests], engine.stats.num_draft_tokens


def test_a_config_alone_drafts(tmp_path: Path) -> None:
    directory = PlainDSpark().save(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    first, second = run_ranks(2, serve_dummy, directory)
    assert first == second
    assert first[1] > 0


def serve_to_the_end(model: Path) -> tuple[list[int], Record]:
    """On one rank: fill the longest sequence, of which the cache holds one."""
    options = EngineOptions(dtype="float32", speculative_method="dspark", num_speculative_tokens=BLOCK)
    engine = load_engine_on_rank(model, dcp_config(2, 2, 1, block_size=2), options, 48, seq_lens=[48])
    record = record_drafts(engine.speculation.drafter)
    engine.speculation.drafter.reads_tokens = True
    (request,) = serve(engine, [PROMPTS[2][:30]], 18, ignore_eos=True)
    return request.token_ids, record


def test_a_block_may_pass_the_longest_sequence(tmp_path: Path) -> None:
    module = PlainDSpark()
    (tokens, record), _ = run_ranks(2, serve_to_the_end, module.save(tmp_path / "model"))
    assert len(tokens) == 18
    assert max(len(known) for known, _ in record) >= 46  # Two more positions are left.
    for known, drafts in record:
        assert drafts == module.drafts(known, len(drafts)), len(known)


@on_ranks(1)
def test_a_shortened_model_drafts(tmp_path: Path) -> None:
    """The rehearsal of kernels leaves layers out whose hidden states the module takes, and runs without a cache."""
    directory = PlainDSpark(dspark_target_layer_ids=[1, 2, 3]).save(tmp_path / "model")
    model, _ = load_on_rank(directory, DCPConfig(), load_format="dummy", with_mtp=True)
    decoder: Any = model.hidden_states
    assert decoder.tap.layers == (2, 3, 4)
    with shortened(model):
        assert len(decoder.blocks) == 3
        model.profile(16)
    assert decoder.tap.layers == (2, 3, 4)
    model.profile(16)


def serve_sampled(model: Path) -> list[tuple[list[list[int]], int]]:
    """On one rank: sampled answers without drafts and with them, and how many drafts were accepted."""
    outcomes = []
    for method in ("none", "dspark"):
        engine = load(model, dcp_config(2, 2, 1, block_size=8), BLOCK, speculative_method=method)
        engine.speculation.drafter.drafts_always = True
        bias = dict.fromkeys(ALPHABET, 100.0)
        requests = [
            engine.add(prompt, SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, logit_bias=bias))
            for seed, prompt in enumerate(PROMPTS)
        ]
        list(engine.run())
        outcomes.append(([request.token_ids for request in requests], engine.stats.num_accepted_tokens))
        engine.close()
    return outcomes


def test_sampled_answers_are_those_of_plain_decoding(tmp_path: Path) -> None:
    save_drafting("deepseek_v4", tmp_path / "model")
    for (plain, _), (drafted, num_accepted) in run_ranks(2, serve_sampled, tmp_path / "model"):
        assert drafted == plain
        assert num_accepted > 0


def serve_quantized(model: Path) -> tuple[Record, set[str], bool]:
    """On one rank: drafts, the formats of the module's experts, and whether its projection keeps codes."""
    engine: Any = load(model, dcp_config(2, 2, 1, block_size=4), BLOCK)
    record = record_drafts(engine.speculation.drafter)
    engine.speculation.drafter.reads_tokens = True
    serve(engine, PROMPTS, NUM_NEW, ignore_eos=True)
    module = engine.model.drafts.module
    experts = {format_name(weight) for each in module.modules() if isinstance(each, MoE) for weight in each.experts}
    return record, experts, module.projection.weight_scale is not None


def test_quantized_modules(tmp_path: Path) -> None:
    """Experts of the module stay in 4 bits, and its linear layers in 8, as the checkpoint has them."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128}
    reference = save_v41(tmp_path, is_quantized=True, **DSPARK, **wide)
    module = PlainDSpark41(reference, reference.model)
    first, second = run_ranks(2, serve_quantized, tmp_path)
    assert first == second
    record, experts, has_codes = first
    assert (experts, has_codes) == ({"fp4"}, True)
    assert len(record) > 10
    for known, drafts in record:
        assert drafts == module.drafts(known, len(drafts)), len(known)
