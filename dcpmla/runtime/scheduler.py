"""The choice of tokens that the next step computes, and of their blocks.

Every rank runs its own scheduler and makes the same decisions: they depend only on the requests, the tokens so far and
the engine's clock, which are the same on all ranks. A token that is being sampled counts like a known one, because only
the search for remembered blocks reads ids.
"""

from array import array
from collections import deque
from collections.abc import Iterable

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.tier import HostTier
from dcpmla.fields import check_fields, option_label, whole
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.costs import TOKEN_COSTS, LoadCosts, PieceCosts
from dcpmla.runtime.disk_offload import DiskReads, Readiness
from dcpmla.runtime.pieces import PieceSizes, Room
from dcpmla.runtime.progress import Loading
from dcpmla.runtime.request import Request
from dcpmla.runtime.returns import Returns
from dcpmla.runtime.reuse import ComingBlocks, Found, PrefixReuse
from dcpmla.runtime.waiting import Precedence

# Tokens that a prompt may lack without another job's help: a step hardly takes longer with them.
_SHORT_TOKENS = 64


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, first come, first served, with exceptions.

    Prompts that lack little go before the others, up to half of the work (`Precedence`).
    A request waits for blocks that a running one will compute (`ComingBlocks`) or that are read from disks
    (`DiskReads`), and a prompt with log probabilities waits for room among the scored tokens of a step (`Batch.room`).
    Other requests pass them in the queue.

    A request is admitted when there are blocks for all its known tokens, and one more for each running request: a
    prefill never waits half-way, and is seldom preempted. It takes other blocks when it reaches them. Where no block is
    free, the youngest running request gives way: its blocks are freed, and it is computed again later. Its full blocks
    can be found until they are allocated again.

    Args:
        allocator: Blocks of the cache, and its states.
        max_num_batched_tokens: Limit of a step's tokens.
        max_num_seqs: Limit of requests that run at the same time.
        costs: Model of the time that pieces of prompts take, which bounds them where requests decode.
        enable_prefix_caching: Whether full blocks are remembered for requests that begin with the same tokens.
        tier: Content of host memory; None without.
        load_costs, disk_costs: Choices between loading blocks from host memory, from disks, and computing them.
    Attributes:
        waiting, running: Requests, the oldest running one first.
        reuse: Search for blocks that requests share.
        reads: Blocks of waiting requests on their way from disks; None without disks.
        prefills_elsewhere: Whether other jobs prefill prompts for this one.
        max_absorbed_tokens: Tokens of the largest step that is one graph, if all its pieces are absorbed.
    Raises:
        ValueError: A limit is below 1, or the cache has fewer states than max_num_seqs.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        costs: PieceCosts = TOKEN_COSTS,
        tier: HostTier | None = None,
        load_costs: LoadCosts = TOKEN_COSTS,
        disk_costs: LoadCosts = TOKEN_COSTS,
    ) -> None:
        limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
        check_fields(dict.fromkeys(limits, whole(1)), limits, option_label)
        num_states = allocator.states.num_states
        if 0 < num_states < max_num_seqs:
            raise ValueError(
                f"max_num_seqs (--max-num-seqs) is {max_num_seqs}, but the cache has {num_states} states, one for each "
                f"request that runs"
            )
        self.allocator, self.tier, self.costs = allocator, tier or HostTier(), costs
        of_loads = load_costs, disk_costs, costs.least_state_tokens if num_states else 0
        self.reuse = PrefixReuse(allocator, enable_prefix_caching, self.tier, *of_loads)
        self._precedence, self._returns = Precedence(self.reuse, max_num_batched_tokens), Returns(allocator)
        self.reads = DiskReads(self.reuse, self.tier) if self.tier.disk.blocks.num_slots else None
        self.prefills_elsewhere = False
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # The request that did not fit, and the numbers of free and remembered blocks at that time.
        self._refused: tuple[Request | None, int, int] = (None, 0, 0)
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self._sizes = PieceSizes(costs, max_num_batched_tokens)
        self.max_absorbed_tokens, self._agreed_now = 0, 0.0
        self._is_busy = False  # whether the step computes prompts that lack more than little

    def schedule(self, now: float, num_drafts: int = 0, agreed_now: float = 0.0) -> Batch:
        """Return the next step, without pieces if there are no requests.

        Its blocks are allocated, from the youngest requests if necessary; drafts get only blocks that no other request
        needs.

        Args:
            now: Seconds on this rank's clock.
            num_drafts: Limit of the drafts of a request that can draft.
            agreed_now: Seconds on the first rank's clock, the same on all ranks.
        """
        batch, self._agreed_now = Batch(self.max_num_batched_tokens), agreed_now
        self._returns.begin_step(agreed_now, self._is_busy)
        self._is_busy = False
        prefills = self._schedule_decodes(batch)
        if num_drafts:
            for index, piece in enumerate(batch.pieces):
                if piece.request.can_draft:
                    batch.set_drafts(index, self.take_room(piece.request, min(num_drafts, batch.budget)))
        if batch.pieces:
            batch.room_us = self.costs.max_prefill_us
        if prefills or self.waiting or not batch.pieces:
            self._schedule_prompts(batch, prefills, now, agreed_now)
        batch.arrange(self.costs, self.max_absorbed_tokens)
        return batch

    def restart_clock(self) -> None:
        """Forget the times at which contexts were used."""
        self._returns = Returns(self.allocator)

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

    def add(self, request: Request) -> None:
        """Add a request that has arrived."""
        self.waiting.append(request)
        self._returns.come(self.reuse.keys_of_prompt(request), request.arrival_time)

    def remove(self, request: Request) -> None:
        """Remove a request, running or waiting, and free its blocks."""
        if not request.block_ids:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._returns.leave(self.reuse.keys_of_prompt(request), self._agreed_now)
            self.free(request)
        self.reuse.remove(request)
        self.release(request)

    def retire(self, request: Request) -> None:
        """Remove a running request, but keep its blocks and its state until `free`."""
        self.running.remove(request)
        self._returns.leave(self.reuse.keys_of_prompt(request), self._agreed_now)
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
            request.loading = Loading(can_join=False)
            batch.arrivals.append(request)
        elif found.keys or found.state_key is not None:
            request.loading = self.reuse.load(found, request.block_ids, request.state)
            batch.loads.append(request)
        request.num_remembered_blocks = len(known)
        request.num_computed_tokens = found.num_blocks * self.allocator.block_tokens
        return True

    def grow(self, request: Request) -> bool:
        """Take a block for the next token, if it needs one; return False if the request was preempted itself."""
        block_tokens = self.allocator.block_tokens
        while request.num_computed_tokens + request.num_tried >= len(request.block_ids) * block_tokens:
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

    def _schedule_decodes(self, batch: Batch) -> list[Request]:
        """Add decodes to a step; return the running requests whose tokens are computed in pieces, while it has room."""
        index, prefills = 0, list[Request]()
        while index < len(self.running) and batch.budget:  # growing may shorten the list from its end
            request = self.running[index]
            if request.is_decode:
                if not (request.is_loading or request.is_held) and self.grow(request):
                    batch.add(request, 1)
            elif request.is_prefill:
                prefills.append(request)
            index += 1
        batch.num_absorbed = len(batch.pieces)
        return prefills

    def _schedule_prompts(self, batch: Batch, prefills: list[Request], now: float, agreed_now: float) -> None:
        """Add pieces of running prompts to a step, and admit waiting ones."""
        coming = self.reuse.coming_blocks(prefills)
        little, others = list[Request](), list[Request]()
        for request in prefills:
            (little if self._precedence.lacks_little(request) else others).append(request)
        num_first = self._precedence.arrange(self.waiting)
        if others and self._precedence.is_little_first:
            self._add_pieces(batch, little)
            self._admit(batch, coming, now, agreed_now, num_first)
            little.clear()
        self._add_pieces(batch, others + little)
        if not batch.pieces:
            self._join_loading(batch)
        self._admit(batch, coming, now, agreed_now, len(self.waiting))
        self._precedence.settle(bool(others))

    def _add_pieces(self, batch: Batch, prefills: Iterable[Request]) -> None:
        """Add pieces of running prompts to a step while it has room."""
        for request in prefills:
            if not request.is_loading and batch.room(request) and batch.room_us > 0:
                self._add_piece(batch, request)

    def _join_loading(self, batch: Batch) -> None:
        """Add pieces of requests whose blocks are still loading: without other work, their step waits for the parts."""
        for request in self.running:
            if request.loading is not None and request.loading.can_join and batch.room(request):
                self._add_piece(batch, request)

    def _admit(self, batch: Batch, coming: ComingBlocks, now: float, agreed_now: float, num_waiting: int) -> None:
        """Admit requests among so many at the front of the queue while the step has room."""
        passed, num_held = list[Request](), 0
        for _ in range(num_waiting):
            has_slot = len(self.running) < self.max_num_seqs > num_held
            if not (self.waiting and batch.budget and batch.room_us > 0 and has_slot):
                break
            request = self.waiting[0]
            has_room = batch.room(request) > 0
            # A preempted request waits until its token in flight is known, because it would get that token twice.
            if has_room and (request.num_in_flight or self.was_refused(request)):
                break
            is_held = has_room and self.reuse.is_held(request, coming)
            if has_room and not is_held and self.reads is not None:
                readiness = self.reads.check(request, agreed_now, not self.running)
                if readiness is Readiness.NO_ROOM:
                    break
                is_held = readiness is Readiness.COMING
            if is_held or not has_room:
                num_held += is_held
                passed.append(self.waiting.popleft())
                continue
            if self._lets_others_return(request) or not self.take_blocks(request, batch):
                break
            self.running.append(self.waiting.popleft())
            self.release(request)
            self.reuse.add_coming(request, coming)
            if request.scheduled_time is None:
                request.scheduled_time, request.num_cached_tokens = now, request.num_computed_tokens
                self._precedence.admit(request)
            if request.loading is None or (request.loading.can_join and not batch.pieces):
                self._add_piece(batch, request)
        self.waiting.extendleft(reversed(passed))

    def _lets_others_return(self, request: Request) -> bool:
        """Return whether a prompt waits while others run, because it would evict contexts that may be used again soon.
        It waits no longer than other prompts would lose by that (`Returns`).
        """
        is_new = request.scheduled_time is None and not self._precedence.lacks_little(request)
        if not (is_new and self.running) or self.tier.blocks.num_slots:
            return False
        num_found = len(self.allocator.find(self.reuse.keys_of_prompt(request)))
        num_new = self._num_blocks(request.num_tokens) - num_found
        num_free = self.allocator.num_free - self._returns.num_expected(self._agreed_now)
        if num_new + len(self.running) <= num_free:
            return False
        block_tokens = self.allocator.block_tokens
        us = self.costs.piece_us(num_new * block_tokens, num_found * block_tokens)
        return 1e6 * (self._agreed_now - request.arrival_time) < self._returns.delay * us

    def _add_piece(self, batch: Batch, request: Request) -> None:
        """Add a piece of a prompt to a step that has room. If it waits (`PieceSizes`), later prompts wait, too."""
        context, is_first = request.num_computed_tokens, len(batch.pieces) == batch.num_absorbed
        room = Room(batch.num_tokens, batch.room(request), batch.room_us, is_first)
        num_tokens = self._sizes.choose(context, self.reuse.longest_piece(request), room)
        if not num_tokens:
            batch.room_us = 0.0
            return
        num_tokens = self.reuse.cut_piece(request, num_tokens)
        us = self.costs.piece_us(num_tokens, context)
        self._precedence.count(request, num_tokens, us)
        self._is_busy |= not self._precedence.lacks_little(request)
        batch.add(request, num_tokens)
        batch.room_us -= us

    def _is_prefilled_elsewhere(self, request: Request, found: Found) -> bool:
        """Return whether another job prefills a prompt: one without new tokens of this job, unless it lacks few."""
        if not self.prefills_elsewhere or request.is_local or request.is_scored or request.keep_logits:
            return False
        num_missing = len(request.prompt_token_ids) - found.num_blocks * self.allocator.block_tokens
        return num_missing > _SHORT_TOKENS and (request.source is not None or not request.token_ids)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.block_tokens)
