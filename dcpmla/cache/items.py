"""The memory of numbered items, blocks or states, inside the tensors of a cache, as bytes to copy (`Items`)."""

from typing import NamedTuple

import torch
from torch import Tensor

_LANES = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first: fewer elements are copied faster


class Items(NamedTuple):
    """The memory of numbered items in one tensor. An item is `num_rows` successive rows, and pages hold the rows.

    Attributes:
        pages: Integers [num_pages, rows_per_page, n] over the memory; the pages and rows need not touch each other.
        num_rows: Rows of an item.
        first_row: First row of item 0.
    """

    pages: Tensor
    num_rows: int = 1
    first_row: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Items":
        """Return the items of a contiguous tensor [num_items, ...]."""
        return cls.in_pages(tensor.flatten(1)[:, None])

    @classmethod
    def in_pages(cls, pages: Tensor, num_rows: int = 1, first_row: int = 0) -> "Items":
        """Return the items in pages [num_pages, rows_per_page, n] of any dtype, whose rows are contiguous."""
        content = pages.view(torch.uint8)
        sizes = content.shape[-1], *content.stride()[:-1], content.data_ptr()
        lane = next(lane for lane in _LANES if all(size % lane.itemsize == 0 for size in sizes))
        return cls(content.view(lane), num_rows, first_row)

    def grouped(self, num_rows: int) -> "Items":
        """Return larger items of num_rows successive rows each. These items must be single rows."""
        if not self.pages.is_contiguous():
            return self._replace(num_rows=num_rows)
        rows = self.pages.flatten(0, 1)[self.first_row :]
        return Items.of(rows[: len(rows) // num_rows * num_rows].view(-1, num_rows * rows.shape[1]))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of an item."""
        return self.num_rows * self.pages.shape[-1] * self.pages.itemsize

    def read(self, items: Tensor, out: Tensor) -> None:
        """Copy items [k], int64 on the device of the memory, into out [k, num_bytes] uint8."""
        out = out.view(self.pages.dtype)
        if self._is_plain:
            torch.index_select(self.pages[:, 0], 0, items, out=out)
        else:
            out.copy_(self.pages[self._locate(items)].view(len(items), -1))

    def write(self, items: Tensor, content: Tensor) -> None:
        """Overwrite items [k], int64 on the device of the memory, with content [k, num_bytes] uint8."""
        content = content.view(self.pages.dtype)
        if self._is_plain:
            self.pages[:, 0].index_copy_(0, items, content)
        else:
            self.pages[self._locate(items)] = content.reshape(-1, self.pages.shape[-1])

    @property
    def _is_plain(self) -> bool:
        """Return whether each item is one page of one row, which is copied by a third of the launches."""
        return self.pages.shape[1] == self.num_rows == 1 and not self.first_row

    def _locate(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page and the row in it of each row of the items [k num_rows]."""
        rows = self.first_row + items[:, None] * self.num_rows + torch.arange(self.num_rows, device=items.device)
        return rows.flatten() // self.pages.shape[1], rows.flatten() % self.pages.shape[1]
