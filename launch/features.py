"""The features that recorded tests have shown, by family (`collect`).

Processes of a recorded run write what they observe (`tests/support/observed/observe_features.py`), one JSON object a
line: {"test", "family", "device", "tp", "dcp"} with "features" or "refused", lists of the names in `FEATURES`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path
from typing import TypedDict

FEATURES = {
    "tp": "TP",
    "dcp": "DCP",
    "chunks": "chunks",
    "prefix hits": "prefix hits",
    "drafts": "drafts",
    "graphs": "graphs",
    "8-bit caches": "8-bit caches",
    "host": "host",
    "disk": "disk",
    "transfers": "transfers",
    "deterministic": "deterministic",
    "vLLM": "inside vLLM",
    "SGLang": "inside SGLang",
}
REFUSED = "refused"
_MAX_NAMES = 5


class Shown(TypedDict):
    """The tests of a family and a feature that have ended alike.

    Attributes:
        count: Number of tests.
        tests: Names of the first ones.
        ranks: Largest number of TP ranks.
    """

    count: int
    tests: list[str]
    ranks: int


# By family (a model type), feature, and outcome: "cpu", the name of a card, or `REFUSED`.
Features = dict[str, dict[str, dict[str, Shown]]]


def collect(directory: Path, passed: Set[str]) -> Features:
    """Return what tests have shown.

    Args:
        directory: Folder with the files of a run's processes.
        passed: Tests that count, as pytest names them.
    """
    ranks: dict[tuple[str, str, str], dict[str, int]] = {}
    for path in directory.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            test = line["test"]
            if test not in passed:
                continue
            shown = [(feature, line["device"]) for feature in line.get("features", ())]
            shown += [(feature, REFUSED) for feature in line.get("refused", ())]
            for feature, outcome in shown:
                tests = ranks.setdefault((line["family"], feature, outcome), {})
                tests[test] = max(tests.get(test, 1), line["tp"])
    features: Features = {}
    for (family, feature, outcome), tests in sorted(ranks.items()):
        cell = Shown(count=len(tests), tests=_choose(tests), ranks=max(tests.values()))
        features.setdefault(family, {}).setdefault(feature, {})[outcome] = cell
    return features


def _choose(tests: Iterable[str]) -> list[str]:
    """Return a few names, of as many files as there are."""
    numbers: Counter[str] = Counter()
    ordered = []
    for test in sorted(tests):
        file = test.partition("::")[0]
        ordered.append((numbers[file], test))
        numbers[file] += 1
    return sorted(test for _, test in sorted(ordered)[:_MAX_NAMES])
