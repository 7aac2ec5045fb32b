"""The exchange of others that `bench exchange` compares with: vLLM's direct all-to-all with its LSE merge."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.bench.decode_kernels import import_file

MAX_TOKENS = 256  # of a call; vLLM takes another way for more


class VllmDirect:
    """Of an exchange `combine` alone, and that without LSE.

    Args:
        make: peer_direct's DirectA2A: the buffers for one number of heads and one width of rows. Collective.
    """

    name = "vllm_direct"

    def __init__(self, make: Callable[..., Any], group: ProcessGroup, device: torch.device) -> None:
        self._make, self._group, self._device = make, group, device
        self._made: dict[tuple[int, int], Any] = {}

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor]:
        """As `Exchange.combine`, without its LSE.

        Raises:
            ValueError: more than MAX_TOKENS tokens.
        """
        num_tokens, num_heads, width = out.shape
        if num_tokens > MAX_TOKENS:
            raise ValueError(f"{self.name} takes {MAX_TOKENS} tokens at most")
        if (num_heads, width) not in self._made:
            heads_per_rank = num_heads // self._group.size()
            self._made[num_heads, width] = self._make(
                self._group, self._device, MAX_TOKENS, heads_per_rank, width, out.dtype
            )
        return (self._made[num_heads, width].reduce(out, lse),)


def load_vllm_direct(directory: Path) -> Callable[[ProcessGroup, torch.device], VllmDirect]:
    """What makes `VllmDirect` for a group.

    Args:
        directory: has direct/peer_direct.py, the operator's caller, and direct/vllm_direct.so.xz, which has the
    operator.
    Raises:
        ValueError: one of the two is not there, or cannot be loaded here.
    """
    caller, library = directory / "direct" / "peer_direct.py", directory / "direct" / "vllm_direct.so.xz"
    for path in (caller, library):
        if not path.is_file():
            raise ValueError(f"--peers is {directory}, which has no direct/{path.name}; give the directory that has it")
    try:
        peer = import_file(caller)
        peer.load(str(library))
    except Exception as error:  # others' code, made for one version of torch and CUDA
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"--peers is {directory}, whose direct/ cannot be loaded here: {reason}") from error
    return partial(VllmDirect, partial(peer.DirectA2A, str(library)))
