"""The exchange of others (a peer) that `bench exchange` compares with ours."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.peers import import_file

_MAX_TOKENS = 256  # tokens of a call; vLLM takes another way for more


class VllmDirect:
    """vLLM's direct all-to-all with its LSE merge: of an exchange `combine` alone, without its LSE.

    Args:
        make: DirectA2A of peer_direct: the buffers for one number of heads and one width of rows. Collective.
    """

    name = "vllm_direct"

    def __init__(self, make: Callable[..., Any], group: ProcessGroup, device: torch.device) -> None:
        self._make, self._group, self._device = make, group, device
        self._made: dict[tuple[int, int], Any] = {}

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor]:
        """Merge as `Exchange.combine` does; return the rows.

        Raises:
            ValueError: More than 256 tokens.
        """
        num_tokens, num_heads, width = out.shape
        if num_tokens > _MAX_TOKENS:
            raise ValueError(f"{self.name} takes {_MAX_TOKENS} tokens at most")
        if (num_heads, width) not in self._made:
            sizes = _MAX_TOKENS, num_heads // self._group.size(), width
            self._made[num_heads, width] = self._make(self._group, self._device, *sizes, out.dtype)
        return (self._made[num_heads, width].reduce(out, lse),)


def load_vllm_direct(directory: Path) -> Callable[[ProcessGroup, torch.device], VllmDirect]:
    """Return the maker of `VllmDirect` for a group.

    Args:
        directory: Folder with direct/peer_direct.py, the operator's caller, and direct/vllm_direct.so.xz, the operator.
    Raises:
        ValueError: Either file is missing, or cannot be loaded here.
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
