"""What the metrics add up, report by report."""

from dcpmla.serving.messages import Output, Report
from dcpmla.serving.metrics import Metrics, Timings


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"dcpmla_{name}", labels)


def test_totals_are_counted_once() -> None:
    metrics, tier, move = Metrics(), ("kv_offload_blocks", "host", "load"), ("kv_transfer_requests", "received", "done")
    for total in (3, 3, 5):
        totals = {("preemptions",): total, ("draft_tokens",): 2 * total, tier: total, move: total}
        metrics.state(Report([], 0, 1, 2, 0.5, totals))
    assert value(metrics, "preemptions_total") == 5
    assert value(metrics, "draft_tokens_total") == 10
    assert value(metrics, "kv_offload_blocks_total", tier="host", direction="load") == 5
    assert value(metrics, "kv_transfer_requests_total", direction="received", outcome="done") == 5
    assert [value(metrics, name) for name in ("requests_running", "requests_waiting", "kv_cache_use")] == [1, 2, 0.5]


def test_requests_are_counted_by_their_ends() -> None:
    metrics, timings = Metrics(), Timings(1.0)
    for request_id, reason in enumerate(("stop", "length", "length", None)):
        metrics.observe(Output(request_id, "a", (7,), finish_reason=reason), timings, 2.0)
    ends = {reason: value(metrics, "requests_total", finish_reason=reason) for reason in ("stop", "length", "abort")}
    assert ends == {"stop": 1, "length": 2, "abort": None}
