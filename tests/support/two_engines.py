"""A decoding engine and a prefilling one in this process, and what servers do between them (`Pair`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from tests.support.hash_model import make_engine
from tests.support.wire import Wire


@dataclass
class Pair:
    """A decoding engine, a prefilling one, and what a server does between them: late, in any order, and not always.

    Args:
        share_lost: Part of the prefills that are lost.
    """

    here: Engine
    there: Engine
    wire: Wire
    rng: Random
    share_lost: float = 0.0
    latest: int = 6
    num_wanted: int = 0
    _late: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    _prefills: dict[Request, Request] = field(default_factory=dict)
    _begun: dict[str, Request] = field(default_factory=dict)
    _now: int = 0

    def later(self, action: Callable[[], object]) -> None:
        self._late.append((self._now + self.rng.randint(0, self.latest), action))

    def step(self) -> list[Request]:
        """Let everything go on a little; return finished requests of the decoding engine."""
        self._now += 1
        due = [action for time, action in self._late if time <= self._now]
        self._late = [late for late in self._late if late[0] > self._now]
        for action in due:
            action()
        self.wire.advance()
        finished = []
        if self.there.has_requests or self.there.has_transfers:
            events = self.there.step()
            finished = events.finished
            for request in events.wanted:
                self._want(request)
        if self.here.has_requests or self.here.has_transfers:
            for prefilled in self.here.step().finished:
                self._answer(prefilled)
        return finished

    def _want(self, request: Request) -> None:
        self.num_wanted += 1
        if self.rng.random() < self.share_lost:
            is_local = self.rng.random() < 0.5
            self.later(lambda: self.there.handoffs.lose(request, is_local))
            return
        handoff = f"{request.request_id} {self.num_wanted}"
        self.later(lambda: self._prefill(request, handoff))
        self.later(lambda: self._pull(request, handoff))

    def _prefill(self, request: Request, handoff: str) -> None:
        prompt, params = request.prompt_token_ids, request.params
        prefill = self.here.add(prompt, params, handoff=handoff, request_id=request.request_id)
        self._prefills[prefill] = request
        self._begun[handoff] = prefill

    def _pull(self, request: Request, handoff: str) -> None:
        self.there.handoffs.pull(request, "prefill", handoff)
        prefill = self._begun.get(handoff)
        if prefill is not None and self.rng.random() < self.share_lost:
            self.later(lambda: self._die(prefill, request))

    def _die(self, prefill: Request, request: Request) -> None:
        if not prefill.finish_reason:
            self.here.abort(prefill)
            self.there.handoffs.lose(request, self.rng.random() < 0.5)

    def _answer(self, prefill: Request) -> None:
        assert len(prefill.token_ids) == 1
        request = self._prefills[prefill]
        self.later(lambda: self.there.take_first(request, prefill.token_ids[0]))


def make_pair(
    num_blocks: int = 60, num_blocks_here: int = 60, share_failing: float = 0.0, seed: int = 0, **options: object
) -> Pair:
    rng = Random(seed)
    here, there = make_engine(num_blocks_here, 16), make_engine(num_blocks, **options)
    return Pair(here, there, Wire(here, there, rng, share_failing), rng)


def run(pair: Pair) -> None:
    """Step until nothing is left to do."""
    num_steps = 0
    while pair.there.has_requests or pair.here.has_requests or pair.there.has_transfers or pair.here.has_transfers:
        pair.step()
        num_steps += 1
        assert num_steps < 5000
    for engine in (pair.here, pair.there):
        assert engine.allocator.num_free == engine.allocator.num_blocks
