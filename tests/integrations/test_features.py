"""Families x features: engines as users get them (`load_engine`, production costs), their logits transformers'.

One engine has all features that leave results as they are: TP and DCP, prompts in chunks, prefix hits, drafts, graphs,
host memory. Others have an 8-bit cache, and deterministic mode. docs/support.md counts what these engines have done.
"""

import functools
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers

from dcpmla.comm.select import select_exchange
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.families.table import attention_kind
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.open_model import open_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from tests.support.deepseek_v41_files import save_v41
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.sarvam_files import save_sarvam

ALL = (*FAMILIES, "deepseek_v41", *(["sarvam_mla"] if hasattr(transformers, "SarvamMLAConfig") else []))
# Options that a family refuses, with the words of the message.
INDEXED = r"deterministic \(--deterministic\) does not support an indexer or a window"
LINEAR = r"deterministic \(--deterministic\) does not support linear attention"
V4 = r"\) {}does not go with DeepSeek-V4's attention"
REFUSED = {
    **{(family, "deterministic"): INDEXED for family in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")},
    **{(family, "deterministic"): INDEXED for family in ("mistral_large4_text", "dots3_note_text", "glm5_next_text")},
    **{(family, "deterministic"): LINEAR for family in ("kimi_linear", "kimi_k3", "bailing_hybrid")},
    **{(family, "deterministic"): r"\(--deterministic" + V4.format("") for family in ("deepseek_v4", "deepseek_v41")},
    **{(family, "fp8"): r"\(--kv-cache-dtype" + V4.format("fp8 ") for family in ("deepseek_v4", "deepseek_v41")},
}
# A known fault: drafts of longer prompts change logits. This family drafts in an engine of its own, with short prompts.
DRAFTS_APART = ("glm5_next_text",)
MAX_LEN = 160
CACHED, KEPT = 200, 2000  # tokens of the cache and of host memory
NUM_NEW = 14
ALPHABET = (3, 7)  # New tokens are two alone: three of them soon repeat, and drafts begin.
DRAFTABLE = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logit_bias=dict.fromkeys(ALPHABET, 100.0))
TOLERANCE = 1e-3  # of logits up to 7, most of them within 1e-5; Kimi-K3's, of 120 tokens, within 3e-4
FEW = SamplingParams(max_new_tokens=6, ignore_eos=True)


class Answer(NamedTuple):
    """A request's prompt, new tokens and their logits [n, vocab]."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


class Served(NamedTuple):
    """The answers of a family's engines: of all features, of drafts alone, of an fp8 cache, of deterministic mode."""

    plain: list[Answer]
    drafted: list[Answer]
    fp8: list[Answer]
    together: list[Answer]
    alone: list[Answer]


def save(family: str, directory: Path) -> Any:
    """Save a tiny checkpoint, and return its oracle."""
    if family == "deepseek_v41":
        return save_v41(directory, engram_layer_ids=[1, 4])
    return save_sarvam(directory) if family == "sarvam_mla" else save_tiny(family, directory)


def prompt(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(length)]


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """Serve prompts at the same time."""
    requests = [engine.add(list(tokens), params, keep_logits=True) for tokens in prompts]
    list(engine.run())
    return [Answer(request.prompt_token_ids, request.token_ids, torch.stack(request.logits)) for request in requests]


def load(directory: Path, num_ranks: int, device: torch.device, layout: dict[str, Any], **options: Any) -> Engine:
    dcp = dcp_config(num_ranks, num_ranks, **layout)
    mesh = init_mesh(num_ranks, num_ranks)
    chosen = select_exchange(dcp, mesh.dcp_group, device)
    defaults: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 4}
    defaults["max_num_batched_tokens"] = 16  # many steps, so that loads pay on all machines
    engine_options = EngineOptions(**(defaults | options))
    return load_engine(open_model(str(directory), MAX_LEN), dcp, mesh, chosen, device, engine_options)


def block_size_of(family: str, num_ranks: int, device: torch.device) -> int:
    """Return a size with which several blocks hold a prompt; DeepSeek-V4's cover four times as many tokens."""
    if device.type == "cuda":
        return 16 // num_ranks
    return 2 if family == "deepseek_v4" else 4


def serve_plain(directory: Path, family: str, num_ranks: int, device: torch.device) -> list[Answer]:
    """Serve conversations of two turns, which the cache does not hold together, and a turn again; with drafts."""
    layout = {"block_size": block_size_of(family, num_ranks, device)}
    kind = attention_kind(load_config(directory))
    dcp, has_drafts = dcp_config(num_ranks, num_ranks, **layout), family not in DRAFTS_APART
    plan = kind.plan_cache(dcp, [CACHED], torch.float32, num_states=12, num_drafts=3 * has_drafts)
    host_bytes = -(-KEPT // plan.block_tokens) * 3 * 2**17 * num_ranks  # blocks with padding
    cache_bytes = plan.num_blocks * plan.bytes_per_block + plan.num_states * plan.bytes_per_state
    options: dict[str, Any] = {"kv_cache_memory_bytes": cache_bytes, "kv_offloading_size": host_bytes / 2**30}
    options["speculative_method"] = "ngram" if has_drafts else "none"
    engine = load(directory, num_ranks, device, layout, **options)
    first = answers(engine, [prompt(length, length) for length in (58, 63, 60, 1)], DRAFTABLE)
    turns = [[*each.prompt, *each.tokens, *prompt(23 + index, index)] for index, each in enumerate(first)]
    second = answers(engine, turns, DRAFTABLE)
    third = answers(engine, turns[-1:], DRAFTABLE)
    assert (engine.stats.num_draft_tokens > 0) == has_drafts
    assert engine.stats.num_cached_tokens > 0
    assert engine.offload is not None
    engine.offload.count()
    assert engine.offload.loaded.blocks > 0, "nothing has come back from host memory"
    assert engine.allocator.num_free == engine.allocator.num_blocks
    close(engine, device)
    return [*first, *second, *third]


def close(engine: Engine, device: torch.device) -> None:
    """Close an engine, which has captured its steps if it is on a GPU and not deterministic: then kernels do not take
    heads of these sizes, and the torch code, which runs in their place, waits for the GPU.
    """
    is_captured = engine.graph is not None and engine.graph.is_captured
    assert is_captured == (device.type == "cuda" and not engine.dcp.deterministic)
    engine.close()


def serve(directory: Path, family: str, device_type: str) -> Served:
    """On one rank: serve by all engines of a family."""
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")
    num_ranks = dist.get_world_size()
    plain = serve_plain(directory, family, num_ranks, device)
    drafted, fp8, together, alone = list[Answer](), list[Answer](), list[Answer](), list[Answer]()
    if family in DRAFTS_APART:
        layout = {"block_size": block_size_of(family, num_ranks, device)}
        engine = load(directory, num_ranks, device, layout, speculative_method="ngram")
        drafted = answers(engine, [prompt(3, 0), prompt(2, 1)], DRAFTABLE)
        assert engine.stats.num_draft_tokens > 0
        close(engine, device)
    eight_bits = {"kv_cache_dtype": "fp8", "block_size": 16}
    if (family, "fp8") in REFUSED:
        check_refused(directory, family, "fp8", num_ranks, device, eight_bits)
    else:
        engine = load(directory, num_ranks, device, eight_bits)
        fp8 = answers(engine, [prompt(17, 0), prompt(3, 1)], FEW)
        close(engine, device)
    fixed = {"deterministic": True, "block_size": 64, "interleave": 64}
    if (family, "deterministic") in REFUSED:
        check_refused(directory, family, "deterministic", num_ranks, device, fixed)
    else:
        engine = load(directory, num_ranks, device, fixed)
        prompts = [prompt(100, 0), prompt(40, 1), prompt(2, 2)]
        together = answers(engine, prompts, FEW)
        engine.reset()
        alone = [answer for tokens in prompts for answer in answers(engine, [tokens], FEW)]
        close(engine, device)
    return Served(plain, drafted, fp8, together, alone)


def check_refused(
    directory: Path, family: str, option: str, num_ranks: int, device: torch.device, layout: dict[str, Any]
) -> None:
    """Assert that a family refuses a layout with a message that names the option."""
    with pytest.raises(ValueError, match=REFUSED[family, option]):
        load(directory, num_ranks, device, layout)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    ("num_ranks", "device"),
    [
        (2, "cpu"),
        pytest.param(1, "cuda", marks=pytest.mark.gpu),
        pytest.param(2, "cuda", marks=pytest.mark.gpu_2),
    ],
)
def test_features(family: str, num_ranks: int, device: str, tmp_path: Path) -> None:
    reference = save(family, tmp_path)
    oracle = functools.cache(lambda *tokens: reference(torch.tensor([tokens])).logits[0])
    for served in run_ranks(num_ranks, serve, tmp_path, family, device, device=device, timeout=500):
        for answer in (*served.plain, *served.drafted):
            torch.testing.assert_close(answer.logits, expected(oracle, answer), atol=TOLERANCE, rtol=0)
            assert answer.tokens == [ALPHABET[index] for index in answer.logits[:, ALPHABET].argmax(-1)]
        assert bool(served.fp8) == ((family, "fp8") not in REFUSED)
        if served.fp8:
            check_rounded(served.fp8, [expected(oracle, answer) for answer in served.fp8])
        assert bool(served.alone) == ((family, "deterministic") not in REFUSED)
        for one, among in zip(served.alone, served.together, strict=True):
            assert torch.equal(one.logits, among.logits)
            torch.testing.assert_close(one.logits, expected(oracle, one), atol=TOLERANCE, rtol=0)


def expected(oracle: Any, answer: Answer) -> torch.Tensor:
    """Return transformers' logits of an answer's tokens."""
    with torch.no_grad():
        return oracle(*answer.prompt, *answer.tokens[:-1])[len(answer.prompt) - 1 :]


def check_rounded(served: list[Answer], exact: list[torch.Tensor]) -> None:
    """Assert that rounded latents have changed logits, and most rows by little: some tokens get other experts."""
    rows, exact_rows = torch.cat([answer.logits for answer in served]), torch.cat(exact)
    errors = (rows - exact_rows).norm(dim=-1) / exact_rows.norm(dim=-1)
    assert 1e-3 < float(errors.median()) < 0.25, errors
