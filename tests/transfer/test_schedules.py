"""Handoffs in random schedules over a transport in memory: whatever happens, no cache holds wrong content, all
transfers end, and no slot is lost.
"""

from collections.abc import Iterable
from itertools import count
from random import Random

import pytest
import torch

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.outgoing import Outgoing
from tests.support.fake_transport import Clock, Network
from tests.support.plain_cache import new_layout
from tests.support.transfer_jobs import LEASE, SILENCE, Job, Prompt, connect

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 4), (4, 2, 2), (4, 4, 1)]  # tp, dcp, interleave


def any_layout(random: Random) -> CacheLayout:
    return new_layout(*random.choice(LAYOUTS), random.choice([1, 2]))


class Schedule:
    """Two or three jobs, and prompts that go from the first one to the others in a random order of calls."""

    def __init__(self, seed: int, clock: Clock, num_decoders: int = 1) -> None:
        torch.manual_seed(seed)
        self.random, self.clock = Random(seed), clock
        self.network = Network(self.random)
        num_slots = self.random.randint(1, 5)
        self.prefill = Job(Outgoing, "p", any_layout(self.random), self.network, num_slots)
        self.decoders = [
            Job(Incoming, f"d{number}", any_layout(self.random), self.network, self.random.randint(1, 5))
            for number in range(num_decoders)
        ]
        for decoder in self.decoders:
            connect(self.prefill, decoder)
        self.prompts: list[Prompt] = []
        self.names = count()

    @property
    def jobs(self) -> list[Job]:
        return [self.prefill, *self.decoders]

    def add(self, decoder: Job | None = None) -> Prompt:
        decoder = decoder or self.random.choice(self.decoders)
        prompt = Prompt(f"h{next(self.names)}", self.prefill, decoder, self.random)
        self.prompts.append(prompt)
        return prompt

    def poll_all(self, number: int = 1) -> None:
        for _ in range(number):
            ranks = [(job, rank) for job in self.jobs for rank in range(job.layout.tp_size)]
            self.random.shuffle(ranks)
            for job, rank in ranks:
                job.poll(rank)
            self.clock.now += 0.01

    def act(self, prompt: Prompt, faults: Iterable[str]) -> None:
        """Make one of the calls that are possible, rarely a fault."""
        calls = []
        if not prompt.is_sent:
            if prompt.num_computed < prompt.num_tokens:
                calls.append(prompt.compute)
            elif not prompt.is_finished:
                calls.append(prompt.finish)
            elif all(handoff.is_done for handoff in prompt.handoffs):
                calls.append(prompt.end_handoff)
            if prompt.sent is not None and not prompt.is_finished and self.random.random() < 0.2:
                calls.append(prompt.retract)
            if "cancel" in faults and prompt.handoffs is not None and self.random.random() < 0.04:
                calls.append(prompt.cancel_handoff)
        if prompt.got is None:
            calls.append(prompt.open)
        elif not prompt.is_got:
            if all(arrival.is_done for arrival in prompt.got.arrivals):
                calls.append(prompt.end_arrival)
            elif "cancel" in faults and self.random.random() < 0.04:
                calls.append(prompt.cancel_arrival)
        if calls:
            self.random.choice(calls)()

    def run(self, faults: Iterable[str], num_prompts: int, limit: int = 4000) -> None:
        """Make calls until all prompts have ended on both sides, where the jobs live."""
        fault = self.random.randrange(150)
        for step in range(limit):
            if step == fault:
                self.break_something(faults)
            if step > fault + 400:
                self.clock.now += 0.5
                for job in self.jobs:
                    job.stopped = False
            while len([prompt for prompt in self.prompts if not self.has_ended(prompt)]) < 3 and num_prompts:
                self.add()
                num_prompts -= 1
            open_prompts = [prompt for prompt in self.prompts if not self.has_ended(prompt)]
            if not open_prompts:
                break
            self.act(self.random.choice(open_prompts), faults)
            self.poll_all(self.random.randint(0, 2))
        else:
            raise AssertionError([(prompt.name, prompt.is_sent, prompt.is_got) for prompt in open_prompts])
        self.poll_all(20)
        for job in self.jobs:
            job.check_free_blocks()

    def break_something(self, faults: Iterable[str]) -> None:
        """Stop a job for longer than the lease, or lose one of its ranks, and let the others know or not."""
        job = self.random.choice(self.jobs)
        if "stop" in faults:
            job.stopped = True
            self.clock.now += self.random.choice([1, SILENCE + 1, LEASE + 1])
        if "lose" in faults:
            self.network.lost.add(self.random.choice(job.names))
            if self.random.random() < 0.5:
                for other in {self.prefill, *self.decoders} - {job}:
                    for side in other.sides:
                        side.disconnect(job.engine)

    def has_ended(self, prompt: Prompt) -> bool:
        def is_lost(job: Job) -> bool:
            return not self.network.lost.isdisjoint(job.names)

        return (prompt.is_sent or is_lost(prompt.prefill)) and (prompt.is_got or is_lost(prompt.decode))

    def check_slots(self) -> None:
        """Check that all slots are free after the lease."""
        for job in self.jobs:
            job.stopped = False
        self.clock.now += LEASE
        self.poll_all(20)
        for job in self.jobs:
            for side in job.sides:
                assert side._staging.num_free == len(side._transport.memory)


FAULTS: dict[str, tuple[set[str], int]] = {  # and number of prompts
    "none": (set(), 6),
    "cancelled transfers": ({"cancel"}, 12),
    "a stopped job": ({"stop", "cancel"}, 10),  # which may wake when its slots hold other content
    "a lost rank": ({"lose"}, 10),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("fault", FAULTS)
def test_any_schedule(fault: str, seed: int, clock: Clock) -> None:
    schedule, (faults, num_prompts) = Schedule(seed, clock, num_decoders=1 + seed % 2), FAULTS[fault]
    schedule.run(faults, num_prompts)
    if not faults:
        reasons = [arrival.reason for prompt in schedule.prompts for arrival in prompt.got.arrivals]
        assert all(prompt.has_arrived for prompt in schedule.prompts), reasons
        assert not any(handoff.has_failed for prompt in schedule.prompts for handoff in prompt.handoffs)
    if "lose" not in faults:
        schedule.check_slots()
