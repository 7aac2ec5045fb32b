"""Waiting for a prefix: of requests that arrive together and begin alike, one computes what the others then find."""

from collections.abc import Iterable

from dcpmla.runtime.request import Request


class SharedPrefixes:
    """The waiting requests whose first blocks a running one is computing.

    Args:
        block_tokens: of a block.
        has_states: whether a request can go on only from where another's prompt ends, with its state (DeepSeek-V4).
    """

    def __init__(self, block_tokens: int, has_states: bool) -> None:
        self._block_tokens, self._has_states = block_tokens, has_states
        self._awaited: dict[Request, tuple[Request, int]] = {}  # the running one, and how many of its blocks

    def is_coming(self, request: Request, computing: list[Request]) -> bool:
        """Tell whether a running request has yet to compute a block that a waiting one will find then.

        Args:
            computing: the running requests that have tokens of their prompts to compute.
        """
        if request in self._awaited and self._is_ahead(*self._awaited[request], computing):
            return True
        self.forget(request)
        shared = [(other, self._num_shared(request, other)) for other in computing]
        if request.is_scored or not any(self._is_ahead(*pair, computing) for pair in shared):
            return False
        self._awaited[request] = max(shared, key=lambda pair: pair[1])
        return True

    def forget(self, request: Request) -> None:
        """Forget whom a request waits for."""
        self._awaited.pop(request, None)

    @staticmethod
    def _is_ahead(other: Request, num_blocks: int, computing: Iterable[Request]) -> bool:
        return other in computing and other.num_remembered_blocks < num_blocks

    def _num_shared(self, request: Request, other: Request) -> int:
        """Return the blocks of another's prompt that a request can go on from; its last token is computed anyway."""
        mine, theirs, size = request.prompt_token_ids, other.prompt_token_ids, self._block_tokens
        num_blocks = 0
        for start in range(0, min(len(mine) - 1, len(theirs)) - size + 1, size):
            if mine[start : start + size] != theirs[start : start + size]:
                break
            num_blocks += 1
        return num_blocks if not self._has_states or num_blocks == (len(theirs) - 1) // size else 0
