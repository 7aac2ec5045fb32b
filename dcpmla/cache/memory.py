"""Memory of caches: zeros, so that a row that nothing has written holds no NaN."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on CPUs a page is taken when it is first written, as a cache is planned for all free memory."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)  # torch.zeros writes every page
    return torch.from_numpy(memory).view(dtype).view(*shape)
