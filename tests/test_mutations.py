"""The list of mutations fits the package: `tests/mutations.py` makes them, outside of the suite."""

from collections import Counter
from dataclasses import replace

from tests.mutations import faults_of, read_mutations

GROUPS = {"scheduler", "reuse", "acceptance", "exchange", "tables", "requests", "router"}


def test_every_mutation_can_be_made() -> None:
    mutations = read_mutations()
    assert not faults_of(mutations)
    counts = Counter(mutation.group for mutation in mutations)
    assert len(mutations) >= 150
    assert min(counts[group] for group in GROUPS) >= 10


def test_faults_of_the_list_are_found() -> None:
    first, second, *_ = read_mutations()
    broken = [
        replace(first, old="text that the file does not have"),
        replace(first, old="self", new="this"),
        replace(second, new="("),
        replace(second, name="a file", file="dcpmla/none.py"),
        replace(second, name="a test", tests=("tests/test_mutations.py::test_none",)),
    ]
    faults = faults_of(broken)
    assert len(faults) == len(broken) + 1  # one name occurs twice
    assert faults[-1] == "a test: no test tests/test_mutations.py::test_none"
