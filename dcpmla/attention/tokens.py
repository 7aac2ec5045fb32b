"""Slices of a step's tokens, as a layer projects and rotates them."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.attention.sparse.step import SelectedTokens
from dcpmla.parallel.fp8 import PlainRows


class Tokens(NamedTuple):
    """A slice of a step's tokens: the input of their query projection, and the tokens that they attend to.

    Attributes:
        q_c: Query latents [T, Lq] after their norm, or hidden states [T, hidden] where queries are not compressed.
        cos_sin, query_factor: Rows of `StepMetadata`'s for this slice.
        selection: Selected tokens; None for all tokens before each.
    """

    q_c: PlainRows
    cos_sin: Tensor | None
    query_factor: Tensor | None
    selection: SelectedTokens | None = None

    def rows(self, rows: slice) -> "Tokens":
        selection = None if self.selection is None else self.selection.rows(rows)
        return Tokens(self.q_c[rows], rows_of(self.cos_sin, rows), rows_of(self.query_factor, rows), selection)


class Keys(NamedTuple):
    """The inputs of MHA among a slice of a step's tokens.

    Attributes:
        q: Queries of this rank's heads [T, h, P + R], rotated.
        kv: Keys' nope part and values [T, h (P + V)]; None if they are not projected yet.
        w_kv_b: Up-projection [h, P + V, L].
    """

    q: Tensor
    kv: Tensor | None
    w_kv_b: Tensor

    def rows(self, rows: slice) -> "Keys":
        return Keys(self.q[rows], None if self.kv is None else self.kv[rows], self.w_kv_b)


def rows_of(tensor: Tensor | None, tokens: slice) -> Tensor | None:
    """Return some rows of a tensor, None for none."""
    return None if tensor is None else tensor[tokens]
