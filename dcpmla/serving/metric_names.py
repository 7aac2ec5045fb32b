"""The measurements of a server: their names, kinds, texts and labels, and the names and labels of the same numbers in
vLLM 0.33 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

METRICS_NAMES = ("dcpmla", "vllm")  # values of --metrics-names
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))


class Metric(NamedTuple):
    """A measurement.

    Attributes:
        kind: Kind for Prometheus; a "tally" is a histogram with a value for each token.
        text: Text of its `# HELP` line.
        vllm: Its names in vLLM; empty where vLLM does not measure it.
        vllm_labels: Its labels in vLLM, besides the model's name and the engine's number.
        buckets: Bounds of a histogram's buckets.
    """

    kind: Literal["counter", "gauge", "histogram", "tally"]
    text: str
    labels: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    vllm_labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(text: str, *vllm: str, labels: tuple[str, ...] = (), vllm_labels: tuple[str, ...] = ()) -> Metric:
    return Metric("counter", text, labels, vllm, vllm_labels)


def _gauge(text: str, *vllm: str, labels: tuple[str, ...] = (), vllm_labels: tuple[str, ...] = ()) -> Metric:
    return Metric("gauge", text, labels, vllm, vllm_labels)


def _seconds(text: str, vllm: str) -> Metric:
    return Metric("histogram", text, vllm=(vllm,), buckets=_SECONDS)


def _tokens(text: str, vllm: str) -> Metric:
    return Metric("histogram", text, vllm=(vllm,), buckets=_TOKENS)


_MOVES, _DIRECTION = ("tier", "direction"), ("direction",)
METRICS: Mapping[str, Metric] = {
    # Of the HTTP process
    "requests": _counter(
        "Finished requests, by why they ended.",
        "request_success",
        labels=("finish_reason",),
        vllm_labels=("finished_reason",),
    ),
    "refused_requests": _counter("HTTP requests that were refused, by status.", labels=("status",)),
    "prompt_tokens": _counter("Tokens of prompts.", "prompt_tokens", "prefix_cache_queries"),
    "cached_prompt_tokens": _counter(
        "Tokens of prompts that were cached already.", "prompt_tokens_cached", "prefix_cache_hits"
    ),
    "generation_tokens": _counter("New tokens.", "generation_tokens"),
    "kv_transfer_local_prefills": _counter("Requests that no prefill server has computed, so this server does."),
    "time_to_first_token_seconds": _seconds(
        "Seconds from a request to its first token.", "time_to_first_token_seconds"
    ),
    "inter_token_seconds": _seconds(
        "Seconds between two steps with new tokens of a request.", "inter_token_latency_seconds"
    )._replace(kind="tally"),
    "time_per_output_token_seconds": _seconds(
        "Seconds per token after a request's first one.", "request_time_per_output_token_seconds"
    ),
    "request_seconds": _seconds("Seconds from a request to its last token.", "e2e_request_latency_seconds"),
    "request_queue_seconds": _seconds(
        "Seconds that a request waited for its first step.", "request_queue_time_seconds"
    ),
    "request_prefill_seconds": _seconds(
        "Seconds from a request's first step to its first token.", "request_prefill_time_seconds"
    ),
    "request_decode_seconds": _seconds(
        "Seconds from a request's first token to its last one.", "request_decode_time_seconds"
    ),
    "request_inference_seconds": _seconds(
        "Seconds from a request's first step to its last token.", "request_inference_time_seconds"
    ),
    "request_prompt_tokens": _tokens("Tokens of a request's prompt.", "request_prompt_tokens"),
    "request_generation_tokens": _tokens("New tokens of a request.", "request_generation_tokens"),
    # Of the ranks' state
    "requests_running": _gauge("Requests that hold blocks of the cache.", "num_requests_running"),
    "requests_waiting": _gauge("Requests that wait for blocks.", "num_requests_waiting"),
    "stop_string_unseen_tokens": _gauge(
        "New tokens of a request still to be searched for stop strings, of the request with most."
    ),
    "kv_cache_use": _gauge("Part of the cache's blocks that requests hold.", "kv_cache_usage_perc"),
    "cache_info": _gauge(
        "1; its labels have the tokens of a block, over all DCP ranks, and the number of blocks.",
        "cache_config_info",
        labels=("block_tokens", "num_blocks"),
        vllm_labels=("block_size", "num_gpu_blocks"),
    ),
    # Of the ranks' totals (`Report.totals`)
    "compilations": _counter("Kernels that the first rank compiled after its warm-up, while requests waited."),
    "preemptions": _counter("Times that finished requests gave up their blocks.", "num_preemptions"),
    "drafts": _counter("Times that a request had drafts in a step.", "spec_decode_num_drafts"),
    "draft_tokens": _counter("Drafts that steps have tried.", "spec_decode_num_draft_tokens"),
    "accepted_draft_tokens": _counter("Drafts that became tokens.", "spec_decode_num_accepted_tokens"),
    "accepted_draft_tokens_at": _counter(
        "Drafts that became tokens, by their position in the step.",
        "spec_decode_num_accepted_tokens_per_pos",
        labels=("position",),
        vllm_labels=("position",),
    ),
    "synthetic_acceptance_rate": _gauge(
        "Rate at which random numbers accept a draft at its position in the step; none if the model decides.",
        labels=("position",),
    ),
    "kv_event_batches": _counter(
        "Steps' batches of KV events that were sent, or dropped where the publisher's queue is full.",
        labels=("outcome",),
    ),
    "kv_offload_blocks": _counter("Blocks that were copied to and from a tier of memory.", labels=_MOVES),
    "kv_offload_bytes": _counter("Bytes of these copies on the first rank.", labels=_MOVES),
    "kv_offload_seconds": _counter("Seconds of these copies on the first rank.", labels=_MOVES),
    "kv_hot_rows": _counter(
        "Selected latents that were on the first rank's GPU (hit), and those that it fetched from host memory (miss).",
        labels=("layer", "outcome"),
    ),
    "kv_transfer_bytes": _counter("Bytes of transfers with other servers on the first rank.", labels=_DIRECTION),
    "kv_transfer_seconds": _counter("Seconds of transfers with other servers on the first rank.", labels=_DIRECTION),
    "kv_transfer_requests": _counter("Requests whose transfer has ended.", labels=("direction", "outcome")),
}
