"""EAGLE3 heads: drafts of the published formula in plain torch, around transformers' own attention."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpmla.__main__ import main
from dcpmla.attention.step import metadata
from dcpmla.integrations.eagle3 import open_eagle3
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.model_files import load_config
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_combinations import ALPHABET, check, save, words_of
from tests.integrations.test_combinations import serve as serve_rows
from tests.integrations.test_handoffs import draw_prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.combinations import Row, by_ranks
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, save_tiny, tiny_config
from tests.support.oracle import Oracle
from tests.support.plain_eagle3 import DRAFT_VOCAB, PlainEagle3, base_model
from tests.support.ranks import run_ranks
from tests.support.two_jobs import record_drafts, run_jobs
from tests.support.whole_models import load_engine_on_rank, serve

NUM_DRAFTS = 3
MORE = [21, 4, 33]  # of the second turn
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
IDS_NAME = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e3, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
# By name: numbers of layers whose inputs the head takes, and fields of its config.
HEADS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "as published": ((2, 3, 4), {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
    "EAGLE 3.1": (
        (3, 2, 4),
        {"fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 2, 4]}},
    ),
    "no q_lora": ((2, 2, 1), {"norm_before_residual": True, "q_lora_rank": None}),  # by default 2, n // 2, n - 3
    "MHA": ((2, 3, 4), {"is_dense": True, "draft_vocab_size": DRAFT_VOCAB, **{IDS_NAME: [1, 2, 3]}}),
    "GQA": ((2, 2, 1), {"is_dense": True, "num_key_value_heads": 4, "fc_norm": True, "norm_output": True}),
    "one head of keys": ((2, 2, 1), {"is_dense": True, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "YaRN": ((2, 2, 1), {"is_dense": True, "num_key_value_heads": 2, "rope_parameters": YARN}),
}
Record = list[tuple[list[int], list[int]]]


def serve_heads(
    directories: list[tuple[Path, Path]], tp: int, dcp_size: int, interleave: int, deterministic: bool
) -> list[tuple[list[list[int]], Record, list[int]]]:
    """On one rank: each engine's tokens of two turns, drafts, and accepted drafts by position."""
    if (dcp_size, interleave) == (2, 1):
        metadata.PART_ROWS = 100  # so that steps attend part by part
    rows = {"block_size": 4 * interleave, "deterministic": deterministic}
    dcp, outcomes = dcp_config(tp, dcp_size, interleave, **rows), []
    for model, head in directories:
        options = EngineOptions(
            speculative_method="eagle3",
            speculative_model=str(head),
            num_speculative_tokens=NUM_DRAFTS,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 20,
            dtype="float32",
        )
        engine = load_engine_on_rank(model, dcp, options)
        drafter = engine.speculation.drafter
        record = record_drafts(drafter)
        drafter.reads_tokens = True  # so that the host knows all tokens before each draft
        requests = serve(engine, PROMPTS, 9, ignore_eos=True)
        prompts = [[*request.prompt_token_ids, *request.token_ids, *MORE] for request in requests]
        assert engine.stats.num_cached_tokens == 0
        requests += serve(engine, prompts, 5, ignore_eos=True)
        assert engine.stats.num_cached_tokens >= 32 or interleave == 64  # blocks of which none is full
        outcomes.append(([request.token_ids for request in requests], record, engine.stats.num_accepted_at))
        engine.close()
    return outcomes


class Heads(NamedTuple):
    """A saved model, its oracle, and heads beside it: folders and, by the tokens before, drafts by the formula."""

    model: Path
    oracle: Oracle
    folders: dict[str, Path]
    drafts: dict[str, Callable[..., list[int]]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    base, folder = base_model(), tmp_path_factory.mktemp("heads")
    base.save_pretrained(folder / "model")
    plain = {name: PlainEagle3(base, inputs, **fields) for name, (inputs, fields) in HEADS.items()}
    folders = {name: head.save(folder / name, has_embedding=name == "as published") for name, head in plain.items()}
    # Layouts ask for drafts after the same tokens.
    drafts = {name: cache(lambda *known, head=head: head.drafts([*known], NUM_DRAFTS)) for name, head in plain.items()}
    return Heads(folder / "model", Oracle(base), folders, drafts)


# TP, DCP, interleave, whether it is deterministic, and heads: each on one rank, and each way to share its rows.
LAYOUTS: list[tuple[int, int, int, bool, tuple[str, ...]]] = [
    (1, 1, 1, False, tuple(HEADS)),
    (2, 2, 1, False, ("no q_lora", "MHA", "GQA")),
    (2, 1, 1, False, ("EAGLE 3.1", "one head of keys", "YaRN")),
    (4, 4, 2, False, ("as published", "MHA", "one head of keys")),
    (4, 2, 1, False, ("EAGLE 3.1", "GQA", "one head of keys", "YaRN")),
    (2, 2, 64, True, ("as published", "GQA")),
]


@pytest.mark.parametrize(("tp", "dcp_size", "interleave", "deterministic", "names"), LAYOUTS)
def test_drafts_are_those_of_the_formula(
    tp: int, dcp_size: int, interleave: int, deterministic: bool, names: tuple[str, ...], heads: Heads
) -> None:
    directories = [(heads.model, heads.folders[name]) for name in names]
    ranks = run_ranks(tp, serve_heads, directories, tp, dcp_size, interleave, deterministic)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for name, (tokens, record, _) in zip(names, ranks[0], strict=True):
        turns = [*PROMPTS, *([*prompt, *new, *MORE] for prompt, new in zip(PROMPTS, tokens[:3], strict=True))]
        for prompt, new in zip(turns, tokens, strict=True):
            heads.oracle.check_tokens(prompt, new, name)
        assert len(record) > 16
        assert {len(drafts) for _, drafts in record} == {1, 2, 3}
        for known, drafts in record:
            assert drafts == heads.drafts[name](*known)[: len(drafts)], (name, len(known))


IDS = {IDS_NAME: [2, 1]}
ROWS = [
    Row(family, tuple(f"{layout}, eagle3, {levels}".split(", ")))
    for family, layout, levels in (
        ("deepseek_v3", "dcp 2 by token", "short steps, prefix hits, host, ample, 8 bits, any order, graphs, free"),
        ("deepseek_v3", "dcp 2 in groups", "short steps, prefix hits, disk, ample, exact, deterministic, grammar"),
        ("deepseek_v3", "tp 1", "long steps, no reuse, no tiers, preemption, exact, graphs, grammar, two choices"),
        ("deepseek_v32", "dcp 2 in groups", "short steps, prefix hits, no tiers, preemption, 8 bits, two choices"),
        ("kimi_linear", "dcp 2 by token", "short steps, prefix hits, host, ample, exact, graphs"),
        ("longcat_flash", "tp 2", "long steps, prefix hits, no tiers, ample, 8 bits, graphs"),
        ("mistral4", "tp 1", "short steps, prefix hits, disk, ample, exact, graphs"),
    )
    if family in FAMILIES
]


KINDS = {"deepseek_v32": [True], "kimi_linear": [True], "longcat_flash": [False], "mistral4": [True]}  # else both
CASES = [(family, rows, kind) for family, _, rows in by_ranks(ROWS) for kind in KINDS.get(family, [False, True])]


@pytest.mark.parametrize(("family", "rows", "is_dense"), CASES)
def test_every_feature(family: str, rows: list[Row], is_dense: bool, tmp_path: Path) -> None:
    """Drafts are the two tokens that answers have, so that some are right by chance."""
    if any(row.has("grammar") for row in rows):
        pytest.importorskip("llguidance")
    reference = save(family, tmp_path / "model")
    fields = {"is_dense": is_dense, "num_key_value_heads": 4 if is_dense else 8}
    PlainEagle3(reference, (2, 1), tokens=ALPHABET, draft_vocab_size=2, **fields, **IDS).save(tmp_path / "head")
    oracle, words = Oracle(reference), words_of(tmp_path / "model")
    for ranks in run_ranks(rows[0].num_ranks, serve_rows, tmp_path / "model", rows, "cpu", timeout=500):
        for row, served in zip(rows, ranks, strict=True):
            check(row, served, oracle, words)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\]; it must be"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
    ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be a whole number"),
    ({"mla_use_nope": True}, "mla_use_nope is True; it must be false"),
    ({"vocab_size": 100}, "vocab_size is 100; the model's is 192"),
    ({"target_hidden_size": 64}, "target_hidden_size, by default hidden_size, is 64; the model's is 48"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, r"layer_ids is \[2, 9\]; the model has 4 layers"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3; it must be"),
    ({"draft_vocab_size": 95}, r"tensor d2t has shape \(96,\)"),
    ({"fc_norm": True}, "tensor model.fc_norm.0.weight is missing"),
]
DENSE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_bias": True}, "attention_bias is True; it must be false"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1.0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads 8"),
    ({"num_key_value_heads": 2}, r"k_proj.weight has shape \(96, 96\); the model's config asks for \(24, 96\)"),
    ({"head_dim": 5}, "head_dim is 5; it must be an even number"),
    ({"layer_types": ["sliding_attention"]}, "layer_types is .*; it must be a list, each one of full_attention"),
    ({"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "rope_type is 'none'; it must be"),
]


def messages(model: Path, head: Path, fields: Sequence[dict[str, Any]]) -> list[str]:
    """On one rank: return the errors of loading a head with fields of its config changed."""
    file, found = head / "config.json", []
    raw = json.loads(file.read_text())
    options = EngineOptions(speculative_method="eagle3", speculative_model=str(head), kv_cache_memory_bytes=1 << 20)
    for changes in fields:
        file.write_text(json.dumps(raw | changes))
        try:
            load_engine_on_rank(model, dcp_config(1, 1, 1, block_size=4), options)
        except ValueError as error:
            found.append(str(error))
    return found


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    head = PlainEagle3(base, (2, 3, 4), draft_vocab_size=DRAFT_VOCAB, **{IDS_NAME: [2, 3, 4]}).save(tmp_path / "head")
    files, config = open_eagle3(str(head)), load_config(tmp_path / "model")
    with pytest.raises(ValueError, match=r"^speculative_model .* tensor_parallel_size .* 3.* 8 attention heads"):
        files.check(config, dcp_config(3, 3, 1, block_size=4))
    with pytest.raises(ValueError, match=r"deepseek_v4 has no layers of plain MLA, whose cache a head needs"):
        files.check(tiny_config("deepseek_v4"), dcp_config(1, 1, 1, block_size=4))
    dense = PlainEagle3(base, (2, 3, 4), is_dense=True, **{IDS_NAME: [2, 3, 4]}).save(tmp_path / "dense")
    for directory, refused in ((head, REFUSED), (dense, DENSE_REFUSED)):
        (found,) = run_ranks(1, messages, tmp_path / "model", directory, [fields for fields, _ in refused])
        assert len(found) == len(refused)
        for text, (_, message) in zip(found, refused, strict=True):
            assert re.search(message, text), (message, text)
            assert "speculative_model (--speculative-model)" in text


@pytest.mark.skipif("hy_v4" not in FAMILIES, reason="needs a transformers with HY V4")
def test_models_of_several_residuals_are_refused(tmp_path: Path) -> None:
    save_tiny("hy_v4", tmp_path / "model")
    head = PlainEagle3(base_model(), (2, 1), **IDS).save(tmp_path / "head")
    ((message,),) = run_ranks(1, messages, tmp_path / "model", head, [{}])
    assert "this model's layers have several residuals; a head takes models with one" in message


def test_options_of_a_head_belong_together() -> None:
    options: list[dict[str, Any]] = [{"speculative_method": "eagle3"}, {"speculative_model": "x"}]
    for fields in options:
        with pytest.raises(ValueError, match=r"speculative_model .* is .* give a head with eagle3, and with it alone"):
            EngineOptions(**fields)
    with pytest.raises(ValueError, match=r"^speculative_model \(--speculative-model\): model .* 'nowhere'"):
        open_eagle3("nowhere")


def test_bytes_as_planned(tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    for name, fields in (
        ("own", {"draft_vocab_size": DRAFT_VOCAB, "fc_norm": True}),
        ("shared", {"q_lora_rank": None}),
        ("dense", {"is_dense": True}),
        ("one head of keys", {"is_dense": True, "num_key_value_heads": 1}),
    ):
        head = PlainEagle3(base, (2, 3, 4), **fields, **{IDS_NAME: [2, 3, 4]})
        head.save(tmp_path / name, has_embedding=name == "own")
        check_bytes([tmp_path / "model"], 2, eagle3=open_eagle3(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("fields", "dcp_size", "width"),
    [({}, 2, 16), ({"is_dense": True}, 2, 2 * 8 * 12), ({"is_dense": True, "num_key_value_heads": 4}, 1, 2 * 2 * 12)],
)
def test_plan_counts_the_head(fields: dict[str, Any], dcp_size: int, width: int, tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    head = PlainEagle3(base, (2, 3, 4), **fields, **{IDS_NAME: [2, 3, 4]}).save(tmp_path / "head")
    plans, layout = [], ["-tp", "2", "-dcp", str(dcp_size)]
    for options in ([], ["--speculative-method", "eagle3", "--speculative-model", str(head)]):
        out = tmp_path / "plan.json"
        main(["plan", "--model", str(tmp_path / "model"), *layout, *options, "--json", str(out)])
        plans.append(json.loads(out.read_text())["settings"][0])
    weights, rows = ([plan[name] for plan in plans] for name in ("weight_bytes_per_rank", "kv_bytes_per_token"))
    assert weights[0] < weights[1]
    assert rows == [4 * 24 * 2, (4 * 24 + width) * 2]  # of the model's four layers, and of the head


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [(2, 2), (1, 1)]),
        ({"is_dense": True}, [(2, 2), (1, 1)]),
        ({"is_dense": True, "num_key_value_heads": 4}, [(2, 1), (2, 2)]),  # rows of some heads into rows of all
        ({"is_dense": True, "num_key_value_heads": 2}, [(1, 1), (2, 1)]),
    ],
)
def test_rows_of_a_head_move_between_jobs(fields: dict[str, Any], sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    """The first drafts of a decoding job are those of the head over the whole prompt."""
    base, meeting = base_model(), tmp_path / "meeting"
    base.save_pretrained(tmp_path / "model")
    meeting.mkdir()
    head = PlainEagle3(base, (2, 3, 4), **fields, **{IDS_NAME: [2, 3, 4]})
    drafting = {"speculative_model": str(head.save(tmp_path / "head")), "speculative_method": "eagle3"}
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    prompts = [prompt._replace(params=params) for prompt in draw_prompts()]
    layouts = [dcp_config(*size, 1, block_size=64) for size in sizes]
    _, ranks = run_jobs(tmp_path / "model", *layouts, prompts, meeting, **drafting, num_speculative_tokens=2)
    for decoded in ranks:
        assert (decoded.received.num_done, decoded.num_prefilled) == (3, 0)
        assert len(decoded.drafts) >= 6
        for known, drafts in decoded.drafts:
            assert drafts == head.drafts(known, len(drafts)), len(known)


KIMI = {  # fields of heads that are published for Kimi-K2.x
    **{"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "draft_vocab_size": 32000},
    **{"eagle_config": {IDS_NAME: [2, 30, 58], "use_aux_hidden_state": True}, "hidden_act": "silu", "mlp_bias": False},
    **{"hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 262144, "model_type": "llama"},
    **{"num_attention_heads": 64, "num_hidden_layers": 1, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-5},
    **{"rope_scaling": None, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "vocab_size": 163840,
}
KIMI_YARN = {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
KIMI_YARN["original_max_position_embeddings"] = 4096


@pytest.mark.parametrize(
    ("fields", "sizes", "rope_type"),
    [
        ({"head_dim": 128, "num_key_value_heads": 64}, (64, 128), "default"),
        ({"head_dim": None}, (64, 112), "default"),  # by default hidden_size / num_attention_heads
        ({"num_key_value_heads": 8, "rope_scaling": KIMI_YARN, "rope_theta": 5e4}, (8, 112), "yarn"),
        ({"num_key_value_heads": 8, "rope_scaling": LLAMA3}, (8, 112), "llama3"),
    ],
)
def test_fields_as_published(fields: dict[str, Any], sizes: tuple[int, int], rope_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI | fields))
    files = open_eagle3(str(tmp_path))
    layer = files.kind.spec(files.config).config
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (64, *sizes)
    assert files.config.rope_parameters["rope_type"] == rope_type
    assert files.layer_ids(61) == [2, 30, 58]


def serve_dummy(model: Path, head: Path) -> tuple[list[list[int]], int]:
    """On one rank: answers of random weights, and how many drafts were tried."""
    options = EngineOptions(load_format="dummy", speculative_method="eagle3", speculative_model=str(head))
    engine = load_engine_on_rank(model, dcp_config(2, 2, 1, block_size=4), options, seq_lens=[40] * 2)
    engine.speculation.drafter.drafts_always = True
    requests = serve(engine, PROMPTS[:2], 6, ignore_eos=True)
    return [request.token_ids for request in requests], engine.stats.num_draft_tokens


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_config_alone_drafts(is_dense: bool, tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    fields: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB, "fc_norm": True, IDS_NAME: [2, 3, 4]}
    fields["is_dense"] = is_dense
    head = PlainEagle3(base, (2, 3, 4), **fields).save(tmp_path / "head")
    for directory in (tmp_path / "model", head):
        (directory / "model.safetensors").unlink()
    first, second = run_ranks(2, serve_dummy, tmp_path / "model", head)
    assert first == second
    assert first[1] > 0


def test_heads_with_biases_are_refused(tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    head = PlainEagle3(base, (2, 3, 4), is_dense=True, **{IDS_NAME: [2, 3, 4]}).save(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"midlayer.self_attn.q_proj.bias": torch.zeros(96)}, head / "model.safetensors")
    ((message,),) = run_ranks(1, messages, tmp_path / "model", head, [{}])
    assert "tensor q_proj.bias is there; layers with biases or norms are not computed" in message
