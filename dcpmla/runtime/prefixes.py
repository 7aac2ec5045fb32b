"""Shared prefixes: if prompts begin with the same blocks, one request computes them and the others find them."""

from dcpmla.runtime.request import Request


class ComingBlocks:
    """The blocks that running requests will remember next, against which waiting requests are checked.

    A request shares a block exactly if it has the same key at the same index. So one key per running request decides
    whether there is anything to wait for, however long the prompts are.

    Args:
        block_tokens: Tokens of a block.
        has_states: Whether a prefix is reused only up to a remembered state, at the end of a prompt (DeepSeek-V4).
    """

    def __init__(self, block_tokens: int, has_states: bool) -> None:
        self._block_tokens, self._has_states = block_tokens, has_states
        self._keys: dict[int, set[bytes]] = {}  # block's index in its sequence -> keys

    def add(self, request: Request) -> None:
        """Add a running request whose prompt is not computed yet."""
        num_blocks, index = len(request.prompt_token_ids) // self._block_tokens, request.num_remembered_blocks
        if self._has_states:
            num_blocks = (len(request.prompt_token_ids) - 1) // self._block_tokens
            index = max(index, num_blocks - 1)
        if index < num_blocks:
            self._keys.setdefault(index, set()).add(self._key(request, index))

    def include(self, request: Request) -> bool:
        """Return whether a waiting request will find another block if it waits. Scored prompts do not reuse any."""
        num_blocks = (len(request.prompt_token_ids) - 1) // self._block_tokens  # the last token is always computed
        return not request.is_scored and any(
            index < num_blocks and self._key(request, index) in keys for index, keys in self._keys.items()
        )

    def _key(self, request: Request, index: int) -> bytes:
        return request.block_keys(index, index + 1, self._block_tokens)[0]
