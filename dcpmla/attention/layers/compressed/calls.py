"""The arguments of operators of DeepSeek-V4's attention."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.ownership import Owner
from dcpmla.parallel.quantized import empty_codes


class WindowWrite(NamedTuple):
    """A step's projections, and the windows that their rows are written into.

    Attributes:
        down: Query latents and rows [T, Lq + D], projected from the hidden states; contiguous columns.
        cache: Rows of a layer (`cache/shared_format.py`); the last ring_rows tokens of each request are written.
        q_weight, kv_weight: Weights of the norms, [Lq], [D] float32.
        eps: Epsilon of the norms.
        cos_sin: Angles [T, R] float32 as in `apply_rope`.
        positions, request, seq_lens, states: Columns of `CompressedMetadata`; states of the layer's ring [num_reqs].
        ring_rows: Rows of a request's window.
        quantizes: Whether q_c is also quantized, with the bits of `quantize_rows`; Lq is a multiple of 128 then.
    """

    down: Tensor
    cache: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    eps: float
    cos_sin: Tensor
    positions: Tensor
    request: Tensor
    seq_lens: Tensor
    states: Tensor
    ring_rows: int
    quantizes: bool = False

    def new_results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate the results of `norm_rope_window`."""
        weights = self.q_weight, self.kv_weight
        q_c, rows = (self.down.new_empty(self.down.shape[0], weight.shape[0]) for weight in weights)
        return q_c, rows, *empty_codes(q_c, self.quantizes)


class VisibleTokens(NamedTuple):
    """Tokens, and the rows of windows and entries that they see.

    Attributes:
        positions, request: Positions and requests [n] of the tokens, contiguous.
        states: State of each request [num_reqs], int32; -1 for padding, which sees nothing.
        entry_table: Block table [num_reqs, max_blocks], int32, in blocks of the layer's rows.
        ratio: Ratio of the layer; 0 for windows alone, which do not read the table.
        entries_per_block: Entries of a block on one rank.
        window: Tokens of a window.
        ring_rows: Rows of a request's window.
        owner: This rank, among the ranks that share the rows.
    """

    positions: Tensor
    request: Tensor
    states: Tensor
    entry_table: Tensor
    ratio: int
    entries_per_block: int
    window: int
    ring_rows: int
    owner: Owner

    def new_lists(self) -> tuple[Tensor, Tensor]:
        """Allocate lists of the largest number of rows possible, [n, N], and their numbers of rows [n], int32."""
        num_entries = self.entry_table.shape[1] * self.entries_per_block if self.ratio else 0
        shape = self.positions.shape[0], self.owner.window_bound(self.window) + num_entries
        return self.request.new_empty(shape), self.request.new_empty(shape[0])


class ChunkEntries(NamedTuple):
    """The entries of a chunk that n tokens may attend to, int32.

    Attributes:
        first, end: Range of the entries of the token's request [n], not negative.
        base: Row of the entry `first` [n].
    """

    first: Tensor
    end: Tensor
    base: Tensor
