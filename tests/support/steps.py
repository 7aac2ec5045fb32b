"""What layers of one kind share in a step."""

from typing import TypeVar

from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.metadata import StepMetadata

Metadata = TypeVar("Metadata")


def part(step: StepMetadata, kind: type[Metadata]) -> Metadata:
    metadata: Metadata = step.shared[kind]
    return metadata


def selection_of(step: StepMetadata) -> SelectedTokens:
    selection = part(step, SparseMetadata).selection
    assert selection is not None
    return selection
