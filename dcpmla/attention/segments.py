"""Ragged batches: flat rows, request after request, and the keys that belong to them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where the rows of each request start in a flat batch, and where the last one's end.

    Attributes:
        start: [num_reqs + 1], on the host.
        start_loc: [num_reqs + 1] int32, on the device of the rows.
    """

    start: tuple[int, ...]
    start_loc: Tensor

    @property
    def lens(self) -> list[int]:
        """[num_reqs] rows of each request, on the host."""
        return [end - start for start, end in zip(self.start, self.start[1:], strict=False)]


def join_keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """[S, h, P] and [S, R] -> [S, h, P + R], for kernels that want keys in one piece."""
    return torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1)
