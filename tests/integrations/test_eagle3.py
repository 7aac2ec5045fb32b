"""EAGLE3 heads with MLA: drafts of the published formula in plain torch, around transformers' own attention."""

from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.modules import ModuleDrafter
from tests.support.layouts import dcp_config
from tests.support.oracle import Oracle
from tests.support.plain_eagle3 import DRAFT_VOCAB, PlainEagle3, base_model
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank, serve

NUM_DRAFTS = 3
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
# By name: numbers of layers whose inputs the head takes, and fields of its config.
HEADS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "as published": ((2, 3, 4), {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
    "EAGLE 3.1": (
        (3, 2, 4),
        {"fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 2, 4]}},
    ),
    "no q_lora": ((2, 2, 1), {"norm_before_residual": True, "q_lora_rank": None}),  # by default 2, n // 2, n - 3
}
Record = list[tuple[list[int], list[int]]]


def record_drafts(drafter: ModuleDrafter) -> Record:
    """Let a drafter draft in every step, and note each request's tokens and the drafts after them."""
    draft, record = drafter.draft, Record()

    def recording(wanted: Any, previous: Any) -> Any:
        drafts = draft(wanted, previous)
        flat = drafts.token_ids.tolist()
        for (request, _), num in zip(wanted, drafts.nums, strict=True):
            if num:
                assert not request.num_in_flight  # else tokens are on the device alone
                record.append((request.tokens(0, request.num_known_tokens), flat[:num]))
            flat = flat[num:]
        return drafts

    drafter.drafts_always, drafter.draft, drafter.reads_tokens = True, recording, True
    return record


def serve_heads(
    directories: list[tuple[Path, Path]], tp: int, dcp_size: int, interleave: int, deterministic: bool
) -> list[tuple[list[list[int]], Record, list[int]]]:
    """On one rank: each engine's tokens, drafts, and accepted drafts by position."""
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
        assert isinstance(drafter, ModuleDrafter)
        record = record_drafts(drafter)
        requests = serve(engine, PROMPTS, 9, ignore_eos=True)
        outcomes.append(([request.token_ids for request in requests], record, engine.stats.num_accepted_at))
        engine.close()
    return outcomes


@pytest.mark.parametrize(
    ("tp", "dcp_size", "interleave", "deterministic"),
    [(1, 1, 1, False), (2, 2, 1, False), (2, 1, 1, False), (4, 4, 2, False), (2, 2, 64, True)],
)
def test_drafts_are_those_of_the_formula(
    tp: int, dcp_size: int, interleave: int, deterministic: bool, tmp_path: Path
) -> None:
    base = base_model()
    model = tmp_path / "model"
    base.save_pretrained(model)
    heads = {name: PlainEagle3(base, inputs, **fields) for name, (inputs, fields) in HEADS.items()}
    folders = [head.save(tmp_path / name, has_embedding=name == "as published") for name, head in heads.items()]
    directories = [(model, folder) for folder in folders]
    ranks = run_ranks(tp, serve_heads, directories, tp, dcp_size, interleave, deterministic)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for (name, head), (tokens, record, _) in zip(heads.items(), ranks[0], strict=True):
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            Oracle(base).check_tokens(prompt, new, name)
        assert len(record) > 10
        assert {len(drafts) for _, drafts in record} == {1, 2, 3}
        for known, drafts in record:
            assert drafts == head.drafts(known, len(drafts)), (name, len(known))
