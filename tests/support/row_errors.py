"""The size of errors, relative to the rows that they are in."""

from torch import Tensor


def largest_error(out: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row: the norm of the difference / the norm of the expected row."""
    return float(((out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
