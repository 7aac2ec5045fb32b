"""Measurements of a server, as Prometheus reads them."""

from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dcpmla.serving.messages import Output, Report

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

# Texts and labels of the engine's totals (`Report.totals`).
_TOTALS = {
    "compilations": ("Kernels that the first rank compiled after its warm-up, while requests waited.",),
    "preemptions": ("Times that finished requests gave up their blocks.",),
    "draft_tokens": ("Drafts that steps have tried.",),
    "accepted_draft_tokens": ("Drafts that became tokens.",),
    "kv_event_batches": (
        "Batches of KV events, of a step each; where the publisher's queue is full they are dropped.",
        "outcome",
    ),
    "kv_offload_blocks": ("Blocks that were copied to and from a tier of memory.", "tier", "direction"),
    "kv_offload_bytes": ("Bytes of these copies on the first rank.", "tier", "direction"),
    "kv_offload_seconds": ("Seconds of these copies on the first rank.", "tier", "direction"),
    "kv_transfer_bytes": ("Bytes of transfers with other servers on the first rank.", "direction"),
    "kv_transfer_seconds": ("Seconds of transfers with other servers on the first rank.", "direction"),
    "kv_transfer_requests": ("Requests whose transfer has ended.", "direction", "outcome"),
}


@dataclass
class Timings:
    """The times of requests that were submitted together, on this process's clock.

    Attributes:
        first: Time of each request's first token and the tokens so far, by id.
    """

    submitted: float
    first: dict[int, tuple[float, int]] = field(default_factory=dict)


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of their own.

    Attributes:
        requests: Finished requests, by the reason of their end.
        refused: HTTP requests that got an error, by status.
        prompt_tokens: Tokens of prompts.
        local_prefills: Requests that no prefill server computes.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="dcpmla", registry=self.registry)
        gauge = partial(Gauge, namespace="dcpmla", registry=self.registry)
        histogram = partial(Histogram, namespace="dcpmla", buckets=_SECONDS, registry=self.registry)
        self.requests = counter("requests", "Finished requests, by why they ended.", ["finish_reason"])
        self.refused = counter("refused_requests", "HTTP requests that were refused, by status.", ["status"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts that were cached already.")
        self._new_tokens = counter("generation_tokens", "New tokens.")
        self._totals = {name: counter(name, text, labels) for name, (text, *labels) in _TOTALS.items()}
        self._seen: dict[tuple[str, ...], float] = {}
        local = "Requests that no prefill server has computed, so this server does."
        self.local_prefills = counter("kv_transfer_local_prefills", local)
        self._running = gauge("requests_running", "Requests that hold blocks of the cache.")
        self._waiting = gauge("requests_waiting", "Requests that wait for blocks.")
        unseen = "New tokens of a request still to be searched for stop strings, of the request with most."
        self._unseen = gauge("stop_string_unseen_tokens", unseen)
        self._cache_use = gauge("kv_cache_use", "Part of the cache's blocks that requests hold.")
        self._first_token = histogram("time_to_first_token_seconds", "Seconds from a request to its first token.")
        self._per_token = histogram("time_per_output_token_seconds", "Seconds per token after a request's first one.")
        self._end_to_end = histogram("request_seconds", "Seconds from a request to its last token.")

    def state(self, report: Report) -> None:
        """Take the engine's state."""
        self._running.set(report.num_running)
        self._waiting.set(report.num_waiting)
        self._cache_use.set(report.cache_use)
        self._unseen.set(report.num_unseen)
        for key, total in report.totals.items():
            name, *labels = key
            counter = self._totals[name].labels(*labels) if labels else self._totals[name]
            counter.inc(total - self._seen.get(key, 0))
        self._seen |= report.totals

    def observe(self, output: Output, timings: Timings, now: float) -> None:
        """Take a request's new tokens."""
        self._new_tokens.inc(output.num_tokens)
        if output.request_id not in timings.first and output.num_tokens:
            timings.first[output.request_id] = now, 0
            self._first_token.observe(now - timings.submitted)
            self._cached_tokens.inc(output.num_cached_tokens)
        first, num_tokens = timings.first.get(output.request_id, (now, 0))
        timings.first[output.request_id] = first, num_tokens + output.num_tokens
        if output.finish_reason:
            self.requests.labels(output.finish_reason).inc()
            self._end_to_end.observe(now - timings.submitted)
            if num_tokens:
                self._per_token.observe((now - first) / num_tokens)
