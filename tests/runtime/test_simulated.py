"""Simulated acceptance: how many drafts random numbers accept, at which positions, and what is said about it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.simulated import SimulatedDrafter, rates_of_length, rates_of_share
from dcpmla.runtime.speculation import Speculation
from dcpmla.serving.loop import _totals
from dcpmla.serving.messages import Report
from dcpmla.serving.metrics import Metrics
from tests.runtime.test_drafts import make_engine
from tests.support.hash_model import VOCAB_SIZE, HashDrafter
from tests.support.models import save_tiny


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1, (0, 0, 0)), (1.25, (0.25, 0, 0)), (3, (1, 1, 0)), (3.5, (1, 1, 0.5)), (4, (1, 1, 1))],
)
def test_rates_of_a_length_are_vllms(length: float, rates: tuple[float, ...]) -> None:
    """Its steps have `length` tokens on average, and lengths next to it alone."""
    assert rates_of_length(length, 3) == pytest.approx(rates)
    assert 1 + sum(rates) == pytest.approx(length)


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("rates", [rates_of_length(2.5, 4), rates_of_share(0.8, 3), (0.9, 0.9, 0.3)])
def test_drafts_are_accepted_at_their_positions_rates(
    rates: tuple[float, ...], with_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts that are all wrong, or missing; steps without room for all drafts do not count."""
    lengths, accept = list[int](), Speculation.accept

    def accepting(speculation: Speculation, piece: Any, drafts: Any, num_accepted: int) -> int:
        lengths.extend([num_accepted] * (len(drafts) == len(rates)))
        return accept(speculation, piece, drafts, num_accepted)

    monkeypatch.setattr(Speculation, "accept", accepting)
    wrong = HashDrafter(len(rates), share=0.0, ahead=True)
    drafter = SimulatedDrafter(wrong, rates, VOCAB_SIZE, torch.device("cpu"), drafts_always=True)
    engine = make_engine(num_blocks=90, drafter=drafter, with_graph=with_graph)
    for prompt in ([1, 2, 3], [4], [5, 6]) * 20:
        engine.add(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True))
    list(engine.run())
    assert len(lengths) > 400
    for position, rate in enumerate(rates):
        found = sum(length > position for length in lengths) / len(lengths)
        assert found == pytest.approx(rate, abs=0.08 if 0 < rate < 1 else 0), (position, found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"synthetic_acceptance_length": 4.5}, r"synthetic_acceptance_length .* is 4.5, .* must be in \[1, 4\]"),
        ({"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": (1, 1, 1)}, "without rates"),
        ({"synthetic_acceptance_length": 2, "speculative_method": "none"}, "with drafts and without rates"),
        ({"synthetic_acceptance_rates": (0.5, 0.4)}, "a rate for each of 3 drafts"),
        ({"synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "none above the one before"),
        ({"synthetic_acceptance_rates": (1.5, 0.6, 0.1)}, "synthetic_acceptance_rates .* must be a tuple"),
    ],
)
def test_rates_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**{"speculative_method": "ngram", **fields})


def test_results_say_that_acceptance_was_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_process_on_cpu: None
) -> None:
    save_tiny("deepseek_v3", tmp_path / "model")
    out = tmp_path / "out.json"
    command = f"generate --model {tmp_path / 'model'} --prompt-ids 5,9,2,7 --max-new-tokens 40 --json {out}"
    drafts = "--speculative-method ngram --num-speculative-tokens 2 --synthetic-acceptance-length 3"
    assert main([*command.split(), *drafts.split()]) in (0, None)
    written = json.loads(out.read_text())
    assert written["synthetic_acceptance_rates"] == [1.0, 1.0]
    assert written["num_accepted_tokens"] == written["num_draft_tokens"] > 0
    assert "accepted by random numbers" in capsys.readouterr().out


def test_metrics_say_it_too() -> None:
    """By position, and nothing where the model decides."""
    for rates in ((), (1.0, 0.25)):
        drafter: Drafter = HashDrafter(2, share=0.5)
        if rates:
            drafter = SimulatedDrafter(drafter, rates, VOCAB_SIZE, torch.device("cpu"))
        metrics, totals = Metrics(), _totals(make_engine(num_blocks=90, drafter=drafter))
        for _ in range(2):
            metrics.state(Report([], 0, 0, 0, 0.0, totals))
        samples = [sample for each in metrics.registry.collect() for sample in each.samples]
        found = [sample.value for sample in samples if sample.name == "dcpmla_synthetic_acceptance_rate"]
        assert tuple(found) == rates
