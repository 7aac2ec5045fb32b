"""The choice of tokens that the next step computes, and of their blocks.

Every rank runs its own scheduler and makes the same decisions: they depend only on the requests, the tokens so far and
the engine's clock, which are the same on all ranks. A token that is being sampled counts like a known one, because only
the search for remembered blocks reads ids.
"""

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.tier import HostTier
from dcpmla.fields import check_fields, option_label, whole
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.costs import TOKEN_COSTS, LoadCosts, PieceCosts, piece_tokens
from dcpmla.runtime.disk_reads import Readiness
from dcpmla.runtime.queues import Queues
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import PrefixReuse


class Scheduler(Queues):
    """Continuous batching: decodes first, then prompts in chunks, first come, first served, with exceptions.

    A request waits for blocks that a running one will compute (`ComingBlocks`) or that are read from disks
    (`DiskReads`), and a prompt with log probabilities waits for room among the scored tokens of a step (`Batch.room`).
    Other requests pass them in the queue.

    A request is admitted when there are blocks for all its known tokens, and one more for each running request: a
    prefill never waits half-way, and is seldom preempted (`Queues`).

    Args:
        allocator: Blocks of the cache.
        max_num_batched_tokens: Limit of a step's tokens.
        max_num_seqs: Limit of requests that run at the same time.
        costs: Model of the time that pieces of prompts take, which bounds them where requests decode.
        enable_prefix_caching: Whether full blocks are remembered for requests that begin with the same tokens.
        tier: Content of host memory; None without.
        load_costs, disk_costs: Choices between loading blocks from host memory, from disks, and computing them.
    Attributes:
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
        tier = tier or HostTier()
        of_loads = load_costs, disk_costs, costs.least_state_tokens if num_states else 0
        super().__init__(allocator, PrefixReuse(allocator, enable_prefix_caching, tier, *of_loads), tier)
        self.costs = costs
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_absorbed_tokens = 0

    def schedule(self, now: float, num_drafts: int = 0, agreed_now: float = 0.0) -> Batch:
        """Return the next step, without pieces if there are no requests.

        Its blocks are allocated, from the youngest requests if necessary; drafts get only blocks that no other request
        needs.

        Args:
            now: Seconds on this rank's clock.
            num_drafts: Limit of the drafts of a request that can draft.
            agreed_now: Seconds on the first rank's clock, the same on all ranks.
        """
        batch = Batch(self.max_num_batched_tokens)
        self._schedule_decodes(batch)
        if num_drafts:
            for index, piece in enumerate(batch.pieces):
                if piece.request.can_draft:
                    batch.set_drafts(index, self.take_room(piece.request, min(num_drafts, batch.budget)))
        if batch.pieces:
            batch.room_us = self.costs.max_prefill_us
        self._schedule_prefills(batch)
        if not batch.pieces:
            self._join_loading(batch)
        self._admit(batch, now, agreed_now)
        batch.arrange(self.costs, self.max_absorbed_tokens)
        return batch

    def _schedule_decodes(self, batch: Batch) -> None:
        index = 0
        while index < len(self.running) and batch.budget:  # growing may shorten the list from its end
            request = self.running[index]
            if request.is_decode and not (request.is_loading or request.is_held) and self.grow(request):
                batch.add(request, 1)
            index += 1

    def _schedule_prefills(self, batch: Batch) -> None:
        for request in self.running:
            is_due = request.is_prefill and not request.is_loading
            if is_due and batch.room(request) and batch.room_us > 0:
                self._add_piece(batch, request)

    def _join_loading(self, batch: Batch) -> None:
        """Add pieces of requests whose blocks are still loading: without other work, their step waits for the parts."""
        for request in self.running:
            if request.loading is not None and request.loading.can_join and batch.room(request):
                self._add_piece(batch, request)

    def _admit(self, batch: Batch, now: float, agreed_now: float) -> None:
        coming = self.reuse.coming_blocks(self.running)
        passed: list[Request] = []
        num_held = 0
        while self.waiting and batch.budget and batch.room_us > 0 and len(self.running) < self.max_num_seqs > num_held:
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
            if not self.take_blocks(request, batch):
                break
            self.running.append(self.waiting.popleft())
            self.release(request)
            self.reuse.add_coming(request, coming)
            if request.loading is None or (request.loading.can_join and not batch.pieces):
                self._add_piece(batch, request)
            if request.scheduled_time is None:
                request.scheduled_time, request.num_cached_tokens = now, request.num_computed_tokens
        self.waiting.extendleft(reversed(passed))

    def _add_piece(self, batch: Batch, request: Request) -> None:
        """Add a piece of a prompt to a step, up to its room for tokens and time (`piece_tokens`)."""
        context, limit = request.num_computed_tokens, min(self.reuse.longest_piece(request), batch.room(request))
        num_tokens = self.reuse.cut_piece(request, piece_tokens(self.costs, context, limit, batch.room_us))
        batch.add(request, num_tokens)
        batch.room_us -= self.costs.piece_us(num_tokens, context)
