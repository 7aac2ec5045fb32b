"""vLLM's real engine on CPUs, after an exchange of one rank has failed in the middle of a step."""

from pathlib import Path

import pytest

from tests.engines.forked import report_of

LINE = "combine failed on rank {rank} of the group {group}: nothing came from rank {peer} for 60 s, in exchange 412"


@pytest.mark.parametrize(
    ("runner", "is_asynchronous", "num_ranks", "line"),
    [
        (2, False, 2, LINE.format(rank=1, group=[0, 1], peer=0)),
        (2, True, 4, LINE.format(rank=3, group=[2, 3], peer=2)),
        (1, False, 2, LINE.format(rank=1, group=[0, 1], peer=0)),
    ],
    ids=["second runner", "scheduled ahead, in another DCP group than the first rank's", "first runner"],
)
def test_no_token_of_a_failed_step_leaves(
    model: Path, runner: int, is_asynchronous: bool, num_ranks: int, line: str
) -> None:
    """All ranks, the first one too, whose own exchange is sound, raise what the last one's kernel found."""
    variables = {"DCPMLA_VLLM": "default", "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    options = {"decode_context_parallel_size": 2, "block_size": 16, "asynchronous": is_asynchronous}
    reports, _ = report_of("vllm_faults.py", num_ranks, model, options, **variables)
    for report in reports:
        assert (report["runner"], report["asynchronous"]) == (runner, is_asynchronous)
        assert report["error"] == line
        assert report["tokens"] == 4, "the step before the fault makes the fourth token; the prompt takes one step"
        assert report["steps"] == (6 if is_asynchronous else 5), "one step is ahead"
