"""The rows of a cache that move between jobs: rows of positions under block ids, and rows of states."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.cache.items import Items


class TokenRows(NamedTuple):
    """Rows under block ids in one tensor, or in one plane of it.

    Attributes:
        name: Name of the content.
        rows: Rows as items: item b * per_block + o is the row at offset o of block b.
        per_block: Rows of a block on a rank.
        span: Consecutive positions of a row. Row e of a sequence represents positions [e span, (e + 1) span), and rows
            are sharded over the DCP ranks as `dcpmla.ownership` shards positions.
        is_shared: Whether every rank has all rows.
        num_shares: Number of shares of a row's columns, by heads. The DCP groups of a TP group have them in order, as
            many successive groups each share; 1 if every group has all columns.
    """

    name: str
    rows: Items
    per_block: int
    span: int = 1
    is_shared: bool = False
    num_shares: int = 1

    @classmethod
    def of(cls, name: str, tensor: Tensor, span: int = 1, is_shared: bool = False) -> "TokenRows":
        """Return the rows of a tensor [num_blocks, per_block, width]."""
        pages = tensor.flatten(0, 1)[:, None] if tensor.is_contiguous() else tensor
        return cls(name, Items.in_pages(pages), tensor.shape[1], span, is_shared)

    @property
    def blocks(self) -> Items:
        """Return whole blocks as items."""
        return self.rows.grouped(self.per_block)


class StateRows(NamedTuple):
    """Rows of states in one tensor, or in one plane of it.

    Attributes:
        name: Name of the content.
        rows: Rows as items: item s * num_rows + r is row r of state s.
        num_rows: Rows of a state; the position p has row p % num_rows.
        num_last: Number of latest positions whose rows a request continues from.
        num_parts: Number of equal groups of columns. The TP ranks cut each group by heads; 0 if every rank has the same
            columns.
    """

    name: str
    rows: Items
    num_rows: int
    num_last: int
    num_parts: int = 0

    @property
    def states(self) -> Items:
        """Return whole states as items."""
        return self.rows.grouped(self.num_rows)
