"""The requests of a scheduler, waiting or running, and the blocks and states that they hold (`Queues`)."""

from array import array
from collections import deque

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.tier import HostTier
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.disk_reads import DiskReads
from dcpmla.runtime.loading import Arriving
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import Found, PrefixReuse

# Tokens that a prompt may lack without another job's help: a step hardly takes longer with them.
_SHORT_TOKENS = 64


class Queues:
    """The part of a scheduler that holds requests and their blocks.

    A request takes all blocks of its known tokens when it is admitted, and others when it reaches them. Where no block
    is free, the youngest running request gives way: its blocks are freed, and it is computed again later. Its full
    blocks can be found until they are allocated again.

    Args:
        allocator: Blocks of the cache, and its states.
        reuse: Search for blocks that requests share.
        tier: Content of host memory.
    Attributes:
        waiting, running: Requests, the oldest running one first.
        reads: Blocks of waiting requests on their way from disks; None without disks.
        prefills_elsewhere: Whether other jobs prefill prompts for this one.
    """

    def __init__(self, allocator: BlockAllocator, reuse: PrefixReuse, tier: HostTier) -> None:
        self.allocator, self.reuse, self.tier = allocator, reuse, tier
        self.reads = DiskReads(reuse, tier) if tier.disk.blocks.num_slots else None
        self.prefills_elsewhere = False
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # The request that did not fit, and the numbers of free and remembered blocks at that time.
        self._refused: tuple[Request | None, int, int] = (None, 0, 0)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the whole cache is too small for a request.

        A request that fits is served eventually.
        """
        num_blocks = self._num_blocks(request.max_seq_len)
        if num_blocks > self.allocator.num_blocks:
            raise ValueError(
                f"a prompt of {len(request.prompt_token_ids)} tokens and {request.params.max_new_tokens} new ones "
                f"need {num_blocks} blocks "
                f"of {self.allocator.block_tokens} tokens, but the cache has {self.allocator.num_blocks}; "
                f"raise --kv-cache-memory-bytes, or shard over more ranks (-dcp)"
            )

    def remove(self, request: Request) -> None:
        """Remove a request, running or waiting, and free its blocks."""
        if not request.block_ids:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.free(request)
        self.reuse.remove(request)
        self.release(request)

    def retire(self, request: Request) -> None:
        """Remove a running request, but keep its blocks and its state until `free`."""
        self.running.remove(request)
        self.reuse.remove(request)

    def put_back(self, request: Request) -> None:
        """Free a running request's blocks. It is the next to be admitted, and computed again."""
        self.running.remove(request)
        self.free(request)
        self.waiting.appendleft(request)

    def free(self, request: Request) -> None:
        """Free a request's blocks and its state."""
        if request.sending is not None:
            request.sending.retract()
        self.allocator.free(request.block_ids)
        request.block_ids = array("q")
        if request.state is not None:
            self.allocator.states.free(request.state)
            request.state = None
        if request.loading is not None:
            request.loading.cancel()
            request.loading = None
        request.num_computed_tokens = request.num_remembered_blocks = 0

    def was_refused(self, request: Request) -> bool:
        """Return whether nothing has changed since a request was refused, so that a search for its blocks is futile."""
        refused, num_free, num_remembered = self._refused
        is_full = self.allocator.num_free <= num_free and self.allocator.num_remembered == num_remembered
        return request is refused and is_full

    def take_blocks(self, request: Request, batch: Batch) -> bool:
        """Take blocks for all known tokens, remembered and new ones, and a state if the cache has any; or nothing."""
        found = self.reuse.find(request)
        is_elsewhere = self._is_prefilled_elsewhere(request, found)
        if is_elsewhere:
            found = Found(found.blocks)
        known = found.blocks
        self.allocator.share(known)
        num_new = self._num_blocks(request.num_tokens) - len(known)
        # Each running request may need a block soon. Without one left for it, the new request would be preempted.
        if num_new + len(self.running) > self.allocator.num_free:
            self.allocator.free(known)
            self._refused = request, self.allocator.num_free, self.allocator.num_remembered
            return False
        if self.allocator.states.num_states:
            request.state = self.allocator.states.take()  # there is one for each running request
            assert request.state is not None
            if found.state is not None:
                batch.copies.append((found.state, request.state))
        request.block_ids = array("q", known + self.allocator.allocate(num_new))
        if is_elsewhere:
            request.loading = Arriving()
            batch.arrivals.append(request)
        elif found.keys or found.state_key is not None:
            request.loading = self.reuse.load(found, request.block_ids, request.state)
            batch.loads.append(request)
        request.num_remembered_blocks = len(known)
        request.num_computed_tokens = found.num_blocks * self.allocator.block_tokens
        return True

    def _is_prefilled_elsewhere(self, request: Request, found: Found) -> bool:
        """Return whether another job prefills a prompt: one without new tokens of this job, unless it lacks few."""
        if not self.prefills_elsewhere or request.is_local or request.is_scored or request.keep_logits:
            return False
        num_missing = len(request.prompt_token_ids) - found.num_blocks * self.allocator.block_tokens
        return num_missing > _SHORT_TOKENS and (request.source is not None or not request.token_ids)

    def grow(self, request: Request) -> bool:
        """Take a block for the next token, if it needs one; return False if the request was preempted itself."""
        while len(request.block_ids) < self._num_blocks(request.num_computed_tokens + request.num_tried + 1):
            if self.allocator.num_free:
                request.block_ids.extend(self.allocator.allocate(1))
            else:
                youngest = self.running[-1]
                youngest.num_preemptions += 1
                self.put_back(youngest)
                if youngest is request:
                    return False
        return True

    def take_room(self, request: Request, num_drafts: int) -> int:
        """Return the limit of drafts after a decode's token, and take blocks for them that no other request needs."""
        num_left = request.params.max_new_tokens - request.num_new_tokens - request.num_tried
        num_drafts = min(num_drafts, num_left - 1)
        num_seen = request.num_computed_tokens + request.num_tried + 1
        num_new = self._num_blocks(num_seen + num_drafts) - len(request.block_ids)
        spare = self.allocator.num_free - len(self.running)  # each running request may need one
        if num_new > 0:
            request.block_ids.extend(self.allocator.allocate(max(0, min(num_new, spare))))
        return max(0, min(num_drafts, len(request.block_ids) * self.allocator.block_tokens - num_seen))

    def release(self, request: Request) -> None:
        """Keep nothing for it in host memory."""
        if self.reads is not None:
            self.reads.release(request)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.block_tokens)
