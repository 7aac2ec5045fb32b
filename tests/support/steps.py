"""The parts of a step that one kind of attention reads."""

from typing import TypeVar

from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step import StepMetadata

Metadata = TypeVar("Metadata")


def part(step: StepMetadata, kind: type[Metadata]) -> Metadata:
    metadata: Metadata = step.kinds[kind]
    return metadata


def selection_of(step: StepMetadata) -> SelectedTokens:
    selection = part(step, SparseMetadata).selection
    assert selection is not None
    return selection
