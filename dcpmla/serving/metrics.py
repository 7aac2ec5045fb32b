"""Measurements of a server, as Prometheus reads them."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dcpmla.serving.messages import Output, Report, Started
from dcpmla.serving.metric_names import METRICS, Metric

_ENGINE = "0"  # vLLM numbers the replicas of a server


class Tally(Collector):
    """A histogram of values that come with each token: Prometheus' own is slower, with its lock.

    Args:
        buckets: Bounds of the buckets, ascending, without the last one.
        labelnames: Names of the labels, whose values come from `labels`.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str] = (),
        namespace: str = "",
        *,
        registry: CollectorRegistry,
        buckets: Sequence[float],
    ) -> None:
        self._name, self._text = "_".join(filter(None, (namespace, name))), text
        self._names, self._values = labelnames, tuple[str, ...]()
        self._bounds, self._sum = buckets, 0.0
        self._numbers = [0] * (len(buckets) + 1)
        registry.register(self)

    def labels(self, *values: str) -> "Tally":
        """Give the labels their only values."""
        self._values = values
        return self

    def observe(self, value: float) -> None:
        """Take a value."""
        self._numbers[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram as Prometheus reads it."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        family.add_metric(self._values, [*zip(bounds, accumulate(self._numbers), strict=True)], self._sum)
        yield family


_KINDS: Mapping[str, type[Counter] | type[Gauge] | type[Histogram] | type[Tally]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": Histogram,
    "tally": Tally,
}


@dataclass(slots=True)
class _Progress:
    """The times of a request's first and latest tokens, their number, and its seconds in the queue."""

    first: float
    latest: float
    queued: float
    num_tokens: int = 0


@dataclass
class Timings:
    """The times of requests that were submitted together, on this process's clock.

    Attributes:
        num_prompt_tokens: Tokens of each request's prompt, by id.
        progress: Times of each request that has a token, by id.
    """

    submitted: float
    num_prompt_tokens: dict[int, int] = field(default_factory=dict)
    progress: dict[int, _Progress] = field(default_factory=dict)


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of their own.

    Args:
        names: "dcpmla", or "vllm" for vLLM's names and labels of what it measures, too.
        model: Name of the model, a label in vLLM.
    """

    def __init__(self, names: str = "dcpmla", model: str = "") -> None:
        self.registry = CollectorRegistry()
        self._names, self._of_vllm = names, {"model_name": model, "engine": _ENGINE}
        # Prometheus' objects of each metric, with the values of their constant labels; without labels.
        self._labelled: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
        self._plain: dict[str, list[Any]] = {}
        for name, metric in METRICS.items():
            made = self._make(name, metric)
            if metric.labels:
                self._labelled[name] = made
            else:
                self._plain[name] = [each.labels(*values) if values else each for values, each in made]
        self._seen: dict[tuple[str, ...], float] = {}

    def _make(self, name: str, metric: Metric) -> list[tuple[tuple[str, ...], Any]]:
        """Return an object of Prometheus for each name of a metric, with the values of its constant labels."""
        kind = _KINDS[metric.kind]
        more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        if self._names == "dcpmla" or not metric.vllm:
            return [((), kind(name, metric.text, metric.labels, "dcpmla", registry=self.registry, **more))]
        labels, values = (*self._of_vllm, *metric.vllm_labels), tuple(self._of_vllm.values())
        made = (kind(f"vllm:{each}", metric.text, labels, registry=self.registry, **more) for each in metric.vllm)
        return [(values, each) for each in made]

    def _of(self, name: str, labels: tuple[str, ...]) -> list[Any]:
        """Return Prometheus' objects of a metric with values of its labels."""
        if not labels:
            return self._plain[name]
        return [made.labels(*values, *labels) for values, made in self._labelled[name]]

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter."""
        for counter in self._of(name, labels):
            counter.inc(amount)

    def describe(self, model: Started) -> None:
        """Take the sizes of the cache."""
        num_blocks = model.num_cache_tokens // model.block_tokens
        for gauge in self._of("cache_info", (str(model.block_tokens), str(num_blocks))):
            gauge.set(1)

    def values(self) -> dict[str, float]:
        """Return the values of counters and gauges without labels, by their names in the table."""
        return {
            name: next(iter(made[0].collect())).samples[0].value
            for name, made in self._plain.items()
            if METRICS[name].kind in ("counter", "gauge")
        }

    def state(self, report: Report) -> None:
        """Take the engine's state."""
        state = {
            "requests_running": report.num_running,
            "requests_waiting": report.num_waiting,
            "kv_cache_use": report.cache_use,
            "stop_string_unseen_tokens": report.num_unseen,
        }
        for name, value in state.items():
            for gauge in self._of(name, ()):
                gauge.set(value)
        for key, total in report.totals.items():
            name, *labels = key
            self.count(name, *labels, amount=total - self._seen.get(key, 0))
        self._seen |= report.totals

    def observe(self, output: Output, timings: Timings, now: float) -> None:
        """Take a request's new tokens."""
        self.count("generation_tokens", amount=output.num_tokens)
        progress = timings.progress.get(output.request_id)
        if output.num_tokens:
            if progress is None:
                progress = timings.progress[output.request_id] = _Progress(now, now, output.queue_seconds)
                self._time("time_to_first_token_seconds", now - timings.submitted)
                self.count("prompt_tokens", amount=timings.num_prompt_tokens[output.request_id])
                self.count("cached_prompt_tokens", amount=output.num_cached_tokens)
            else:
                self._time("inter_token_seconds", now - progress.latest)
            progress.latest = now
            progress.num_tokens += output.num_tokens
        if output.finish_reason:
            self._end(output, progress, timings, now)

    def _end(self, output: Output, progress: _Progress | None, timings: Timings, now: float) -> None:
        """Take the end of a request."""
        self.count("requests", str(output.finish_reason))
        self._time("request_seconds", now - timings.submitted)
        self._time("request_prompt_tokens", timings.num_prompt_tokens[output.request_id])
        if progress is None:
            return
        began, decode = timings.submitted + progress.queued, progress.latest - progress.first
        self._time("request_queue_seconds", progress.queued)
        self._time("request_prefill_seconds", max(0.0, progress.first - began))
        self._time("request_decode_seconds", decode)
        self._time("request_inference_seconds", max(0.0, progress.latest - began))
        self._time("request_generation_tokens", progress.num_tokens)
        if progress.latest > progress.first:
            self._time("time_per_output_token_seconds", decode / (progress.num_tokens - 1))

    def _time(self, name: str, value: float) -> None:
        for histogram in self._of(name, ()):
            histogram.observe(value)
