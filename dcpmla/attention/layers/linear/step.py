"""The part of a step that layers of linear attention read."""

from typing import NamedTuple

from dcpmla.attention.layers.linear.calls import DeltaPieces, DeltaRequests
from dcpmla.attention.step.long_pieces import PieceSizes
from dcpmla.attention.step.metadata import StepMetadata


class DeltaMetadata(NamedTuple):
    """The requests of a step for layers of linear attention; decodes and prefills alike.

    Attributes:
        recurrent: Rows, positions and states of all requests. A request that attends in chunks has state -1.
        pieces: Requests that attend in chunks; None where none may.
    """

    recurrent: DeltaRequests
    pieces: DeltaPieces | None = None


def delta_metadata(step: StepMetadata) -> DeltaMetadata:
    """Return what layers of linear attention read of a step."""
    table = step.table
    requests = DeltaRequests(table.row_start[:-1], table.begin, table.end, table.states)
    if not len(table.pieces):
        return DeltaMetadata(requests)
    sizes = PieceSizes(len(table.num_tokens), step.num_tokens)
    recurrent, start_loc, token, first, state, chunks, chunk_starts = sizes.split(table.pieces)
    pieces = DeltaPieces(start_loc, token, first, state, chunks.view(-1, 2), chunk_starts)
    return DeltaMetadata(requests._replace(state=recurrent), pieces)
