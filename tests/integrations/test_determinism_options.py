"""Deterministic mode with the options of an engine: its own drafters, formats of weights and caches, experts, tiers."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dcpmla.cli.determinism import ALONE, Answer, Case, draw_cases, serve
from dcpmla.config import DCPConfig
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.open_model import ModelFiles, check_layout
from dcpmla.runtime import offload
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_determinism import FEW, MAX_LEN, Outcome, check, compare, load, save
from tests.support.models import VOCAB_SIZE, save_tiny, tiny_config
from tests.support.plain_mtp import PlainMtp
from tests.support.quantized_models import SCHEMES, save_wide, write_quantized
from tests.support.ranks import run_ranks
from tests.support.two_jobs import Prompt, run_jobs

SHORT = {"max_num_batched_tokens": 50}


def change(directory: Path, **fields: Any) -> None:
    """Change fields of a saved model's config."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class Setup(NamedTuple):
    """A layout, its exchange and an engine's options."""

    dcp_size: int
    backend: str
    options: Mapping[str, Any]


def serve_itself(loaded: Engine, cases: Sequence[Case]) -> list[Answer]:
    """Serve prompts together with an engine's own scheduler and drafter, which drafts in every step."""
    loaded.speculation.drafter.drafts_always = True
    requests = [loaded.add(token_ids, params, keep_logits=True) for token_ids, params in cases]
    list(loaded.run())
    return [Answer(request.token_ids, torch.stack(request.logits)) for request in requests]


def compare_engines(directory: Path, tp: int, setups: Sequence[Setup]) -> tuple[Outcome, int]:
    """On a rank: compare answers of engines with drafters to one without, twice each: without and with blocks of
    earlier requests. Return the number of accepted drafts, too.
    """
    cases, outcome, num_accepted = draw_cases(VOCAB_SIZE, MAX_LEN, (2, 70)), Outcome(), 0
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    cases += [Case([7, 9, 30, 31] * 20, params), Case([7, 9, 30, 31] * 16, params)]
    engine = load(directory, tp, 1, "auto", {})
    expected = serve(engine, ALONE, cases)
    engine.close()
    for dcp_size, backend, options in setups:
        engine = load(directory, tp, dcp_size, backend, options)
        for name in ("first", "again"):
            answers = serve_itself(engine, cases)
            equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
            outcome[f"{dcp_size} {options} {name}"] = equal, sum(len(right.logits) for right in expected)
        num_accepted += engine.stats.num_accepted_tokens
        engine.close()
    return outcome, num_accepted


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("longcat_flash", marks=pytest.mark.thorough)])
def test_drafts_of_the_engine(family: str, tmp_path: Path) -> None:
    """MTP modules and n-grams draft, over other blocks and with queries of all heads, too: tokens and logits are those
    without drafts.
    """
    module = PlainMtp(family, max_position_embeddings=MAX_LEN).agree(0.2)
    directory = module.save(tmp_path / "model")
    setups = [
        Setup(1, "auto", {"speculative_method": "ngram"}),
        Setup(2, "a2a", {"speculative_method": "mtp", "num_speculative_tokens": 2}),
        Setup(1, "auto", {"block_size": 16}),
        Setup(2, "a2a", {"dcp_q_replicate": True, "block_size": 128, "check_exchange": True} | SHORT),
    ]
    outcomes = run_ranks(2, compare_engines, directory, 2, setups)
    check([outcome for outcome, _ in outcomes])
    assert outcomes[0][1] > 0


def test_whole_experts_and_cache_in_fp8(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    options = {"enable_expert_parallel": True, "kv_cache_dtype": "fp8", "kv_cache_scale": 0.02, "dtype": "float16"}
    check(run_ranks(2, compare, tmp_path, 2, [(1, "auto"), (2, "a2a")], (1, 70, 130), FEW, options))


@pytest.mark.parametrize("scheme", ["block", "tensor"])
def test_weights_in_fp8(scheme: str, tmp_path: Path) -> None:
    save_wide("deepseek_v3", tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path / "model", scheme)
    change(tmp_path / "model", max_position_embeddings=MAX_LEN)
    check(run_ranks(2, compare, tmp_path / "model", 2, [(1, "auto"), (2, "a2a")], (1, 70), FEW))


def test_cache_in_fp8_ds_mla(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "max_position_embeddings": MAX_LEN}
    save_tiny("deepseek_v3", tmp_path, **sizes, qk_head_dim=8 + 64)
    options = {"kv_cache_dtype": "fp8_ds_mla", "dtype": "bfloat16"}
    check(run_ranks(2, compare, tmp_path, 2, [(1, "auto"), (2, "a2a")], (65,), FEW[:1], options))


Scores = list[tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]]


def score(directory: Path) -> list[Scores]:
    """On a rank: return tokens, their log probabilities and the prompts', one by one, together, and over known blocks
    in chunks.
    """
    shared = random.Random(0).choices(range(VOCAB_SIZE), k=130)
    kinds: tuple[dict[str, Any], ...] = (
        {"prompt_logprobs": 3, "logprobs": 0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1, "logprobs": 5},
        {"temperature": 1.3, "min_p": 0.01, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 3, "min_tokens": 4, "logit_bias": {5: 1.5}},
    )
    params = [SamplingParams(max_new_tokens=6, ignore_eos=True, **kind) for kind in kinds]
    cases = [Case(shared[:length], each) for length in (130, 70, 7) for each in params]
    answers, ways = [], ((1, 8192), (32, 8192), (32, 50))
    for max_num_seqs, max_num_batched_tokens in ways:
        options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        engine = load(directory, 1, 1, "auto", options)
        for _ in range(2):
            requests = [engine.add(*case) for case in cases]
            list(engine.run())
            answers.append([(each.token_ids, each.logprobs, each.prompt_logprobs) for each in requests])
        engine.close()
    return answers


def test_logprobs_and_samples(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    ((expected, *again),) = run_ranks(1, score, tmp_path)
    assert len({tuple(tokens) for tokens, *_ in expected}) > len(expected) // 2
    for scores in again:
        assert scores == expected


def compare_tiers(directory: Path, disk: Path) -> tuple[Outcome, list[int]]:
    """On a rank: compare answers over blocks from host memory, then, after a restart, from disks. Return the numbers of
    cached tokens, too.
    """
    offload._STORED_TOGETHER = 2
    cases, outcome, num_cached = draw_cases(VOCAB_SIZE, MAX_LEN, (300, 430, 509)), Outcome(), []
    engine = load(directory, 2, 1, "auto", {})
    expected = serve(engine, ALONE, cases)
    engine.close()
    tiers = {"kv_offloading_size": 0.06, "kv_offloading_path": str(disk), "kv_offloading_disk_size": 0.08}
    for name in ("memory", "disk"):
        engine = load(directory, 2, 2, "a2a", {**tiers, "kv_cache_memory_bytes": 110_000, "max_num_seqs": 2})
        for _ in range(2 if name == "memory" else 1):
            requests = [engine.add(token_ids, params, keep_logits=True) for token_ids, params in cases]
            list(engine.run())
            answers = [Answer(each.token_ids, torch.stack(each.logits)) for each in requests]
            equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
            outcome[name] = equal, sum(len(right.logits) for right in expected)
            num_cached.append(sum(each.num_cached_tokens for each in requests))
        if name == "memory":
            assert engine.offload is not None
            engine.offload.count()
            num_cached.append(engine.offload.loaded.blocks)
        engine.close()
    return outcome, num_cached


def test_blocks_from_memory_and_disks(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path / "model")
    outcomes = run_ranks(2, compare_tiers, tmp_path / "model", tmp_path / "disk")
    check([outcome for outcome, _ in outcomes])
    first, again, num_loaded, restarted = outcomes[0][1]
    assert first == 0
    assert min(again, num_loaded, restarted) > 0


def score_alone(directory: Path, prompts: Sequence[Prompt]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """On a rank: return new tokens and log probabilities of prompts, one by one."""
    engine = load(directory, 2, 1, "auto", {"max_num_seqs": 1})
    requests = [engine.add(*prompt) for prompt in prompts]
    list(engine.run())
    engine.close()
    return [(each.token_ids, each.logprobs) for each in requests]


def test_prompts_of_another_job(tmp_path: Path) -> None:
    model, meeting = tmp_path / "model", tmp_path / "meeting"
    meeting.mkdir()
    save("deepseek_v3", model)
    cases = draw_cases(VOCAB_SIZE, MAX_LEN, (70, 129))
    prompts = [Prompt(token_ids, replace(params, logprobs=2)) for token_ids, params in cases]
    (alone, _) = run_ranks(2, score_alone, model, prompts)
    layouts = [layout({"deterministic": True}, 2, size) for size in (2, 1)]
    _, decoded = run_jobs(model, *layouts, prompts, meeting)
    for each in decoded:
        assert each.num_prefilled == 0
        assert [(answer.token_ids, answer.logprobs) for answer in each.answers] == alone


@pytest.mark.parametrize(
    ("scheme", "words"), [("int4", "int4"), ("mxfp4", "MXFP4"), ("e8m0_32", "MXFP8"), ("block", ""), ("tensor", "")]
)
def test_formats_of_weights(scheme: str, words: str) -> None:
    """Others than fp8 are refused by name, before any weight is read."""
    config = tiny_config("deepseek_v3")
    config.quantization_config = SCHEMES[scheme].config
    files = ModelFiles(Path(), config, None, "", 256, {})
    if not words:
        return check_layout(files, DCPConfig(deterministic=True))
    with pytest.raises(ValueError, match=f"does not support weights in {words} .* blocks of 128 x 128"):
        check_layout(files, DCPConfig(deterministic=True))
    return check_layout(files, DCPConfig())
