"""DeepSeek-V4.1's checkpoints as they are published, against float64."""

from pathlib import Path

import pytest

from dcpmla.fields import divisors
from tests.integrations.test_transformers import check, make_cases
from tests.support.deepseek_v41_files import save_v41


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_and_tokens(tp: int, tmp_path: Path) -> None:
    """Candidate blocks of four are whole on a rank."""
    reference = save_v41(tmp_path)
    cases = make_cases(tp, [tp], (4, 8), ("ag_rs", "a2a") if tp > 1 else ("auto",), is_compressed=True)
    cases += make_cases(tp, divisors(tp)[:-1], (4,), ("auto",), is_compressed=True)
    check(reference, tmp_path, tp, cases)
