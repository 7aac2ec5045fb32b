"""GPUs divided into servers that prefill and servers that decode, under a load, against servers that do both."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from dcpmla.planning.machine import Machine
from dcpmla.planning.search import smallest
from dcpmla.planning.servers import Piece, Server, Traffic

MOST_BUSY = 0.8  # largest share of its time that a server or a link works: above it, queues become long
_DEVIATIONS = 2.33  # a normal distribution's 99th percentile, in standard deviations above its mean
_TAIL = 0.01  # share of the times between tokens that are longer than their 99th percentile


@dataclass(frozen=True, kw_only=True)
class Split:
    """Servers under a load. Predictions that have no value because a queue would grow without end are None.

    Attributes:
        prefill, num_prefill: Setting and number of the servers that prefill; "" and 0 where servers do both.
        decode, num_decode: Setting and number of the servers that decode.
        num_gpus: Number of GPUs of all servers.
        busy: Share of its time that a server spends on steps with prompts.
        link_busy: Share of its time that the busiest GPU's link sends or receives cached rows.
        queue_us: Mean wait of a prompt for the prompts before it.
        time_to_first_token_us: Mean time from a request's arrival to its first token.
        transfer_us: Time from a prompt's last step to the arrival of its last rows at the server that decodes.
        num_running: Number of requests that decode at once on a server, on average.
        prompt_step_share: Share of the steps of a request's answer that also have a piece of another's prompt.
        time_per_token_us, time_per_token_p99_us: Mean and 99th percentile of the time between tokens of a request.
        obstacle: Reason why the servers do not keep up with the load; "" if they do.
    """

    prefill: str
    num_prefill: int
    decode: str
    num_decode: int
    num_gpus: int
    busy: float
    link_busy: float = 0.0
    queue_us: float | None = None
    time_to_first_token_us: float | None = None
    transfer_us: float = 0.0
    num_running: int | None = None
    prompt_step_share: float = 0.0
    time_per_token_us: float | None = None
    time_per_token_p99_us: float | None = None
    obstacle: str = ""

    @property
    def keeps_up(self) -> bool:
        """True if the servers keep up with the load."""
        return not self.obstacle

    def __str__(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode:,} x ({self.decode}) for both"
        return f"{self.num_prefill:,} x ({self.prefill}) for prefill, {self.num_decode:,} x ({self.decode}) for decode"


def predict_split(
    machine: Machine, traffic: Traffic, prefill: Server, num_prefill: int, decode: Server, num_decode: int
) -> Split:
    """Predict servers that prefill and servers that decode. Requests are spread over them at random.

    Prompts wait for a prefill server as in an M/D/1 queue. A step's rows are sent while the next steps run. The first
    token comes from the prefill server, so only the second one waits for the transfer.
    """
    pieces = prefill.pieces(0)
    service_us = _total_us(pieces)
    rate, steps = traffic.request_rate / num_prefill, _num_steps(traffic, decode)
    busy = rate * service_us / 1e6
    num_gpus = num_prefill * prefill.setting.tp + num_decode * decode.setting.tp
    gb_per_s = min(machine.transfer_gb_per_s, link_gb_per_s(machine, num_gpus))
    sent, received = transfer_bytes(prefill, decode, traffic.input_len)
    sent_us, received_us = (num_bytes / gb_per_s / 1e3 for num_bytes in (sent, received))
    link_busy = max(rate * sent_us, traffic.request_rate / num_decode * received_us) / 1e6
    goal = traffic.request_rate / num_decode * steps / 1e6
    num_running = smallest(lambda num: num / decode.decode_us(num) >= goal, _most_running(decode.num_decodes))
    has_room = prefill.num_prompts >= 2
    queue_us = _queue_us(busy, service_us) if has_room else None
    tokens = decode.setting.tokens_a_step
    held = f"a prefill server holds {prefill.num_prompts:,} of 2 prompts"
    obstacles = {
        f"{held}: the next is computed while one is sent": not has_room,
        f"prompts need {busy:.0%} of the prefill servers' time": busy > MOST_BUSY,
        f"transfers need {link_busy:.0%} of a link's time": link_busy > MOST_BUSY,
        _too_many(decode, decode.num_decodes): num_running is None,
    }
    return Split(
        prefill=str(prefill.setting),
        num_prefill=num_prefill,
        decode=str(decode.setting),
        num_decode=num_decode,
        num_gpus=num_gpus,
        busy=busy,
        link_busy=link_busy,
        queue_us=queue_us,
        time_to_first_token_us=None if queue_us is None else queue_us + service_us,
        transfer_us=_exposed_us(pieces, max(sent_us, received_us)),
        num_running=num_running,
        time_per_token_us=None if num_running is None else decode.decode_us(num_running) / tokens,
        time_per_token_p99_us=None if num_running is None else decode.decode_us(_high(num_running)) / tokens,
        obstacle=next((words for words, is_met in obstacles.items() if is_met), ""),
    )


def predict_both(traffic: Traffic, server: Server, num_servers: int) -> Split:
    """Predict servers that do both. Requests are spread over them at random.

    A server computes one prompt at a time, in steps with its decodes; prompts wait as in an M/D/1 queue. Its other
    steps are decodes alone.
    """
    rate, steps = traffic.request_rate / num_servers / 1e6, _num_steps(traffic, server)

    def keeps_up(num: int) -> bool:
        busy = rate * _total_us(server.pieces(num))
        return busy <= MOST_BUSY and num * _step_rate(server, num, rate) >= rate * steps

    num_running = smallest(keeps_up, _most_running(server.num_requests))
    split = Split(
        prefill="",
        num_prefill=0,
        decode=str(server.setting),
        num_decode=num_servers,
        num_gpus=num_servers * server.setting.tp,
        busy=rate * _total_us(server.pieces(num_running or 0)),
    )
    if num_running is None:
        too_busy = f"prompts need {split.busy:.0%} of the servers' time, without decodes"
        return replace(split, obstacle=too_busy if split.busy > MOST_BUSY else _too_many(server, server.num_requests))
    pieces = server.pieces(num_running)
    service_us, high = _total_us(pieces), _high(num_running)
    queue_us = _queue_us(split.busy, service_us)
    assert queue_us is not None
    step_rate, tokens = _step_rate(server, num_running, rate), server.setting.tokens_a_step
    return replace(
        split,
        queue_us=queue_us,
        time_to_first_token_us=queue_us + service_us,
        num_running=num_running,
        prompt_step_share=rate * len(pieces) / step_rate,
        time_per_token_us=1 / step_rate / tokens,
        time_per_token_p99_us=_late_step_us(server, high, rate) / tokens,
    )


def link_gb_per_s(machine: Machine, num_gpus: int) -> float:
    """Return the rate of one GPU's link between servers that have so many GPUs together."""
    return machine.nvlink_gb_per_s if num_gpus <= machine.gpus_per_node else machine.network_gb_per_s


def transfer_bytes(prefill: Server, decode: Server, num_tokens: int) -> tuple[float, float]:
    """Return the bytes of a prompt that the busiest rank of a prefill server sends and a rank of a decode server gets.

    Each rank that decodes gets its part of the rows once, and its part of the state. The replicas of the prefill
    server's cache share the ranks that they serve.
    """
    source, target = prefill.setting, decode.setting
    received = num_tokens * decode.bytes_per_token / target.dcp + decode.bytes_per_state
    ranks_per_replica = ceil(target.tp / (source.tp // source.dcp))
    return ranks_per_replica * received / source.dcp, received


def _exposed_us(pieces: Sequence[Piece], transfer_us: float) -> float:
    """Return the time from a prompt's last step to its last row's arrival, if a whole transfer takes transfer_us."""
    ended, arrived, num_tokens = 0.0, 0.0, sum(piece.num_tokens for piece in pieces)
    for piece in pieces:
        ended += piece.time_us
        arrived = max(arrived, ended) + transfer_us * piece.num_tokens / num_tokens
    return arrived - ended


def _queue_us(busy: float, service_us: float) -> float | None:
    """Return the mean wait in an M/D/1 queue; None if it grows without end."""
    return busy * service_us / (2 * (1 - busy)) if busy < 1 else None


def _step_rate(server: Server, num_decodes: int, rate: float) -> float:
    """Return the steps in a microsecond, with prompts and without, of a server that gets `rate` prompts in it."""
    pieces = server.pieces(num_decodes)
    return rate * len(pieces) + (1 - rate * _total_us(pieces)) / server.decode_us(num_decodes)


def _late_step_us(server: Server, num_decodes: int, rate: float) -> float:
    """Return the 99th percentile of a server's steps, in which so many requests decode."""
    pieces, decode_us = server.pieces(num_decodes), server.decode_us(num_decodes)
    alone = max(0.0, 1 - rate * _total_us(pieces)) / decode_us
    left = _TAIL * (alone + rate * len(pieces))
    for piece in sorted(pieces, key=lambda piece: -piece.time_us):
        left -= rate
        if left < 0:
            return piece.time_us
    return decode_us


def _num_steps(traffic: Traffic, server: Server) -> float:
    """Return the steps of an answer after its first token."""
    return (traffic.output_len - 1) / server.setting.tokens_a_step


def _total_us(pieces: Sequence[Piece]) -> float:
    return sum(piece.time_us for piece in pieces)


def _high(num_running: int) -> int:
    """Return the number of requests that is exceeded in a hundredth of the time: it varies as a Poisson number."""
    return ceil(num_running + _DEVIATIONS * sqrt(num_running))


def _most_running(num_requests: int) -> int:
    """Return the largest mean number of running requests for which there is nearly always room."""
    return bisect_left(range(1, num_requests + 1), num_requests + 1, key=_high)


def _too_many(server: Server, num_requests: int) -> str:
    return f"more requests decode at once than fit: {num_requests:,} at most on a server of {server.setting}"
