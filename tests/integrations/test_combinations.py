"""Families x features: engines as users get them (`load_engine`, production costs), their logits transformers'.

The engines are the rows of a covering array (`tests/support/combinations.py`): every family has each feature that it
does not refuse, and every two features meet. Each row serves conversations of two turns, and shows that its features
have happened. `--seeds N` runs N arrays. docs/support.md counts what these engines have done.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from dcpmla.attention.layers.pooled import step as pooled_step
from dcpmla.attention.select.entries import PoolUpdate
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.eagle3 import open_eagle3
from dcpmla.integrations.engine_maker import EngineMaker
from dcpmla.integrations.engine_options import OWN_MODULES, SPECULATIVE_METHODS, EngineOptions
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.parallel.mesh import DCPMesh, init_mesh
from dcpmla.runtime.acceptance import Payoff
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.support import recording
from tests.support.combinations import PROPERTY, REFUSED, WITH_MODULE, Row, by_ranks, covering_array
from tests.support.conversation_sizes import MORE_OF_TURNS, NEW_OF_TURNS, NUM_DRAFTS, conversation_sizes
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.oracle import Oracle
from tests.support.plain_mtp import plain_module
from tests.support.ranks import run_ranks
from tests.support.small_tokenizers import ascii_tokenizer
from tests.support.whole_models import device_of, load_engine_on_rank

MAX_LEN = 256
KEPT = 2000  # tokens of host memory
ALPHABET = (3, 7)  # New tokens are two alone: three of them soon repeat, and drafts begin.
FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)
CHOICES = ("abcab", "abd", "cd-ef", "zz9")
SELECTING = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4_text", "dots3_note_text", "glm5_next_text")
SELECTING += ("deepseek_v4", "deepseek_v41")
TOLERANCE = 1e-3  # of logits up to 7, most of them within 1e-5; Kimi-K3's, of 120 tokens, within 3e-4


class Answer(NamedTuple):
    """A request's prompt, new tokens, their logits [n, vocab], and its parameters."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    params: SamplingParams


class Served(NamedTuple):
    """What an engine of a row has served.

    Attributes:
        together, alone: Answers of a turn beside others, and of the same turn by itself.
        num_absorbed: Number of pieces of prompts, of several tokens, that attended with absorbed queries.
    """

    answers: list[Answer]
    together: Answer
    alone: Answer
    num_absorbed: int


def save(family: str, directory: Path) -> Any:
    """Save a tiny checkpoint with a tokenizer, and with an MTP module if the family has one; return its oracle."""
    if family == "deepseek_v41":
        return save_tiny(family, directory, engram_layer_ids=[1, 4])
    if family in WITH_MODULE:
        module = plain_module(family)
        for model in (module.base, module.with_layer):  # Drafts are tokens of the alphabet, and often the model's.
            weight = model.get_output_embeddings().weight.data
            weight[[token for token in range(VOCAB_SIZE) if token not in ALPHABET]] *= 0.01
        module.save(directory)
        reference = module.base
    else:
        reference = save_tiny(family, directory)
    ascii_tokenizer(VOCAB_SIZE).save_pretrained(directory)
    return reference


def draftable(num_new: int) -> SamplingParams:
    """Return parameters with which new tokens are the alphabet's."""
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, logit_bias=dict.fromkeys(ALPHABET, 100.0))


def prompt(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(length)]


def answers(engine: Engine, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Answer]:
    """Serve prompts at the same time."""
    requests = [engine.add(each, own, keep_logits=True) for each, own in zip(prompts, params, strict=True)]
    list(engine.run())
    return [
        Answer(request.prompt_token_ids, request.token_ids, torch.stack(request.logits), request.params)
        for request in requests
    ]


class RowEngines:
    """The engines of a row on one rank, over the same files; an EAGLE3 head is beside the model.

    Args:
        mesh: The ranks' groups.
    """

    def __init__(self, row: Row, directory: Path, disk: Path, device: torch.device) -> None:
        self.row, self.directory, self.disk, self.device = row, directory, disk, device
        self.mesh: DCPMesh = init_mesh(row.num_ranks, row.dcp_size)
        method = next((each for each in SPECULATIVE_METHODS if row.has(each)), "none")
        head = str(directory.with_name("head")) if method == "eagle3" else None
        self.drafts: dict[str, Any] = {"speculative_method": method, "speculative_model": head}
        eagle3 = None if head is None else open_eagle3(head)
        self.kind = read_model(load_config(directory), method in OWN_MODULES, eagle3).attention
        self.dcp = self._layout()
        self.block_tokens = self._plan(1).block_tokens
        self.sizes = conversation_sizes(row, self.block_tokens)
        self.prompts = [prompt(length, length) for length in self.sizes.prompts]
        self.num_absorbed = self.num_drafts = self.num_accepted = 0

    def _layout(self) -> DCPConfig:
        row, size = self.row, self.mesh.dcp_size
        if row.has("deterministic"):
            block = 64
        elif self.device.type == "cuda":
            block = 16 if row.has("8 bits") else 16 // size
        else:
            block = 4
            if row.family == "deepseek_v4" and not row.has("dcp 2 in groups"):
                block = 2  # Its blocks cover four times as many tokens.
            if row.family == "glm5_next_text":
                block = 8  # Its pools have 4 tokens.
        interleave = (64 if row.has("deterministic") else 2) if row.has("dcp 2 in groups") else 1
        options: dict[str, Any] = {"kv_cache_dtype": "fp8" if row.has("8 bits") else "auto", "block_size": block}
        return dcp_config(row.num_ranks, size, interleave, deterministic=row.has("deterministic"), **options)

    def _plan(self, num_tokens: int) -> CachePlan:
        """Return the sizes of a cache of num_tokens tokens."""
        num_drafts = 0 if self.row.has("no drafts") else NUM_DRAFTS
        return self.kind.plan_cache(self.dcp, [num_tokens], torch.float32, num_states=12, num_drafts=num_drafts)

    def _options(self) -> EngineOptions:
        """Return options with a cache of the room that the row asks for."""
        row, bt = self.row, self.block_tokens
        plan = self._plan(self.sizes.num_blocks * bt)
        cache_bytes = plan.num_blocks * plan.bytes_per_block + plan.num_states * plan.bytes_per_state
        # Blocks with padding; a request leaves several states, and few have room beside many blocks.
        host_gib = -(-KEPT // bt) * (9 if plan.num_states else 3) * 2**17 * row.num_ranks / 2**30
        on_disk = {"kv_offloading_path": str(self.disk), "kv_offloading_disk_size": 2 * host_gib}
        tiers: dict[str, Any] = {} if row.has("no tiers") else {"kv_offloading_size": host_gib}
        return EngineOptions(
            dtype="float32",
            kv_cache_memory_bytes=cache_bytes,
            max_num_seqs=4,
            max_num_batched_tokens=24 if row.has("short steps") else 48,
            enable_prefix_caching=not row.has("no reuse"),
            enforce_eager=row.has("eager"),
            **self.drafts,
            **tiers,
            **(on_disk if row.has("disk") else {}),
        )

    def load(self) -> Engine:
        """Load an engine, which counts the pieces of prompts that are absorbed."""
        with ExitStack() as stack:
            if self.device.type == "cpu" and self.row.has("graphs"):
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                _record(patch, self.mesh)
            engine = load_engine_on_rank(self.directory, self.dcp, self._options(), MAX_LEN, self.device.type)
        choose = engine.scheduler.costs.choose_absorbed

        def count(pieces: Sequence[tuple[int, int]]) -> list[bool]:
            are_absorbed = choose(pieces)
            self.num_absorbed += sum(new > 1 and own for (new, _), own in zip(pieces, are_absorbed, strict=True))
            return are_absorbed

        object.__setattr__(engine.scheduler.costs, "choose_absorbed", count)
        return engine

    def serve(self) -> Served:
        """Serve conversations of two turns, and a turn again; assert that the row's features have happened."""
        row, engine = self.row, self.load()
        first = answers(engine, self.prompts, [draftable(self.sizes.num_new)] * 4)
        assert (engine.stats.num_preemptions > 0) == row.has("preemption"), engine.stats
        self.num_drafts, self.num_accepted = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
        fillers = list[Answer]()
        if row.has("host") or (row.has("disk") and row.has("deterministic")):
            room = engine.allocator.num_blocks * engine.allocator.block_tokens
            number = -(-room // 150) if row.has("host") else 1  # After a restart the cache is empty.
            length = min(-(-room // number), 150, room - 12)
            fillers = answers(engine, [prompt(length, 200 + index) for index in range(number)], [FEW] * number)
        if row.has("disk"):
            self.close(engine)
            engine = self.load()
        turns = [
            [*each.prompt, *each.tokens, *prompt(more, more)] for each, more in zip(first, MORE_OF_TURNS, strict=True)
        ]
        params = [draftable(NEW_OF_TURNS)] * 4
        asked: list[Any] = list(turns)
        if fillers:  # In deterministic mode blocks with new tokens are not kept, and the first prompts have no others.
            asked.append([*fillers[0].prompt, *fillers[0].tokens, *prompt(5, 5)])
            params.append(FEW)
        if row.has("grammar"):
            asked.append(prompt(20, 20))
            params.append(SamplingParams(grammar=Grammar("choice", json.dumps(CHOICES))))
        if row.has("two choices"):
            asked += [engine.prompt(prompt(40, 40))] * 2
            params += [SamplingParams(max_new_tokens=5, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2)]
        second = answers(engine, asked, params)
        if row.has("preemption"):  # Nothing of it may be left in a small room.
            second += answers(engine, turns[:1], params[:1])
        (alone,) = answers(engine, turns[:1], params[:1])
        self._check_features(engine)
        assert engine.allocator.num_free == engine.allocator.num_blocks
        self.close(engine)
        return Served([*first, *fillers, *second, alone], second[0], alone, self.num_absorbed)

    def _check_features(self, engine: Engine) -> None:
        row, stats = self.row, engine.stats
        assert (self.num_drafts + stats.num_draft_tokens > 0) == (not row.has("no drafts"))
        assert (self.num_accepted + stats.num_accepted_tokens > 0) == (not row.has("no drafts"))
        assert (stats.num_cached_tokens > 0) == row.has("prefix hits")
        if row.has("host"):
            assert engine.offload is not None
            engine.offload.count()
            assert engine.offload.loaded.blocks > 0, "nothing has come back from host memory"
        if row.has("disk"):
            assert engine.offload is not None
            assert engine.offload.disk is not None
            assert engine.offload.disk.loaded.bytes > 0, "nothing has come back from the disk"

    def close(self, engine: Engine) -> None:
        """Close an engine. On GPUs a deterministic one has captured nothing: kernels do not take heads of these sizes,
        and the torch code, which runs in their place, waits for the GPU. On CPUs a recording holds no collectives.
        """
        is_captured = engine.graph is not None and engine.graph.is_captured
        can_capture = not self.row.has("deterministic") if self.device.type == "cuda" else self.row.num_ranks == 1
        assert is_captured == (self.row.has("graphs") and can_capture)
        engine.close()


def _record(patch: pytest.MonkeyPatch, mesh: DCPMesh) -> None:
    """Let engines on CPUs have the graphs of GPUs, recorded on one rank, and run eagerly over padded steps on two."""

    def capture(graph: StepGraph, *args: object) -> None:
        if mesh.tp_size == 1:
            recording.capture(graph)

    patch.setattr(EngineMaker, "is_captured", True)
    patch.setattr(StepGraph, "capture", capture)


def serve(directory: Path, rows: list[Row], device_type: str) -> list[Served]:
    """On one rank: serve by the engines of all rows."""
    device = device_of(device_type)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)  # What torch.empty returns is NaN then.
    learn = Payoff.learn
    # The times of a busy machine would decide whether drafts pay, and so whether any is accepted.
    Payoff.learn = lambda self, time: learn(self, time._replace(seconds=1.0))  # type: ignore[method-assign]
    served = []
    for index, row in enumerate(rows):
        disk = directory.with_name(f"disk{index}")
        try:
            served.append(RowEngines(row, directory, disk, device).serve())
        except Exception as error:
            error.add_note(f"row: {row}")
            raise
    return served


def rows_of(config: pytest.Config) -> list[Row]:
    """Return the rows of all arrays, each once."""
    seeds = range(config.getoption("--seeds"))
    return sorted({row for seed in seeds for row in covering_array(seed)})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rows" in metafunc.fixturenames:
        groups = list(by_ranks(rows_of(metafunc.config)))
        marks = {1: pytest.mark.gpu, 2: pytest.mark.gpu_2}
        cases = [
            pytest.param(family, rows, device, id=f"{family}-{num_ranks}-{device}", marks=own)
            for family, num_ranks, rows in groups
            for device, own in (("cpu", ()), ("cuda", marks[num_ranks]))
        ]
        metafunc.parametrize(("family", "rows", "device"), cases)


def test_combinations(family: str, rows: list[Row], device: str, tmp_path: Path, record_property: Any) -> None:
    if any(row.has("grammar") for row in rows):
        pytest.importorskip("llguidance")
    oracle = Oracle(save(family, tmp_path / "model"))
    words = words_of(tmp_path / "model")
    num_ranks, arguments = rows[0].num_ranks, (tmp_path / "model", rows, device)
    for ranks in run_ranks(num_ranks, serve, *arguments, device=device, timeout=500):
        for row, served in zip(rows, ranks, strict=True):
            check(row, served, oracle, words)
    for row in rows:
        record_property(PROPERTY, row.line)


def check(row: Row, served: Served, oracle: Oracle, words: list[str]) -> None:
    """Assert that answers have the oracle's logits, and the tokens that follow from their own."""
    logits = torch.cat([answer.logits for answer in served.answers])
    exact = torch.cat([oracle.logits(answer.prompt, answer.tokens) for answer in served.answers])
    (check_rounded if row.has("8 bits") else check_exact)(logits, exact, row)
    for answer in served.answers:
        check_tokens(answer, words)
    if row.has("deterministic"):
        assert torch.equal(served.alone.logits, served.together.logits), row


def check_exact(logits: torch.Tensor, exact: torch.Tensor, row: Row) -> None:
    """Assert that logits [n, vocab] are the oracle's. Where two scores of an indexer differ by the last bits, another
    token may be selected: a few rows then differ by little.
    """
    errors = (logits - exact).abs().amax(-1)
    if row.family in SELECTING:
        assert float((errors > TOLERANCE).float().mean()) < 0.08, (row, errors)
        assert float(errors.max()) < 0.1, (row, errors)
    else:
        assert float(errors.max()) < TOLERANCE, (row, errors)


def check_tokens(answer: Answer, words: list[str]) -> None:
    """Assert that tokens are the best that are allowed; drawn ones are any."""
    if answer.params.grammar is not None:
        text = ""
        for token, row in zip(answer.tokens, answer.logits, strict=True):
            allowed = [index for index, word in enumerate(words) if word and is_begun(text + word)]
            assert token == (max(allowed, key=row.tolist().__getitem__) if allowed else VOCAB_SIZE - 1)
            text += words[token] if allowed else ""
        assert text in CHOICES
    elif answer.params.logit_bias:
        assert answer.tokens == [ALPHABET[index] for index in answer.logits[:, ALPHABET].argmax(-1)]
    elif not answer.params.temperature:
        assert answer.tokens == answer.logits.argmax(-1).tolist()


def is_begun(text: str) -> bool:
    return any(choice.startswith(text) for choice in CHOICES)


def words_of(directory: Path) -> list[str]:
    """Return the text of each token in ASCII, "" for special ones."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    words = tokenizer.convert_ids_to_tokens(range(min(VOCAB_SIZE, len(tokenizer))))
    return ["" if word in tokenizer.all_special_tokens else word for word in words]


def check_rounded(logits: torch.Tensor, exact: torch.Tensor, row: Row) -> None:
    """Assert that rounded latents have changed logits, and most rows by little: some tokens get other experts."""
    errors = (logits - exact).norm(dim=-1) / exact.norm(dim=-1).square().mean().sqrt()
    assert 1e-3 < float(errors.median()) < 0.25, (row, errors)


def cut_by_width(step: StepMetadata, positions: torch.Tensor) -> tuple[PoolUpdate, ...]:
    """Cut parts with a fault: as many as a segment has tokens, though an absorbed piece may have more."""
    decode, num_sums, tokens = step.decode, step.layout.traits.plan.num_copies, (positions, step.tokens.request)
    first, end, states = step.table.begin, step.table.end, step.table.states
    num_decodes, num_parts = (0, 1) if decode is None else (len(decode.block_table), decode.max_query_len)
    parts = []
    for _ in range(num_parts):
        part_end = torch.cat([torch.minimum(first + 1, end)[:num_decodes], end[num_decodes:]])
        source, target = (states * num_sums + (each - 1) % num_sums for each in (first, part_end))
        parts.append(PoolUpdate(*tokens, first, part_end, source, target))
        first = part_end
    return tuple(parts)


def serve_with_fault(directory: Path, rows: list[Row]) -> list[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_step, "pool_updates", cut_by_width)
        return serve(directory, rows, "cpu")


def test_the_array_finds_lost_sums(tmp_path: Path) -> None:
    """A fault that no test had found: with drafts, GLM-5-Next's prompts beyond the selected tokens got other logits."""
    rows = [row for row in covering_array() if row.family == "glm5_next_text" and not row.has("no drafts")]
    row = next(row for row in rows if row.has("exact"))
    oracle = Oracle(save(row.family, tmp_path / "model"))
    (served,) = run_ranks(row.num_ranks, serve_with_fault, tmp_path / "model", [row])[0]
    with pytest.raises(AssertionError, match="glm5_next_text"):
        check(row, served, oracle, words_of(tmp_path / "model"))


def test_refusals_name_the_option(tmp_path: Path) -> None:
    families = {family for family, _ in REFUSED}
    for family in families:
        save(family, tmp_path / family)
    run_ranks(1, check_refused, tmp_path)


def check_refused(directory: Path) -> None:
    for (family, level), message in REFUSED.items():
        dcp = DCPConfig(kv_cache_dtype="fp8") if level == "8 bits" else DCPConfig(deterministic=True)
        with pytest.raises(ValueError, match=message):
            load_engine_on_rank(directory / family, dcp, max_model_len=MAX_LEN)
