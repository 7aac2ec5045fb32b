"""Rows of `bench sparse`: a selection, timed operation by operation, or attention beside its peer."""

import math
from typing import Any

import torch

from dcpmla.bench.decode_inputs import Answer
from dcpmla.bench.decode_kernels import Kernel, Ours
from dcpmla.bench.runner import num_samples
from dcpmla.bench.sparse_inputs import AttentionInputs, SelectedRows, SelectionInputs, SparseCase
from dcpmla.bench.sparse_kernels import MakePeer
from dcpmla.bench.timing import Timing, largest, time_operation, time_with_result

_OPERATIONS = ("index_scores", "local_candidates", "gather_candidates", "choose_tokens", "selection")
_MOST_DIFFERENT = 0.02  # of the tokens: a sum in another order may turn the last ones of topk
_LARGEST_ERROR = 0.02  # of out or lse, as in `bench decode`
_FEWEST_CALLS = 4  # of a sample
_SAMPLE_SECONDS = 0.1  # that the samples of one operation may take
Row = dict[str, Any]


def selection_row(inputs: SelectionInputs, backend: str, unsharded_us: float | None, device: torch.device) -> Row:
    """Every operation alone, and all together. Collective over the job.

    Args:
        backend: of the exchange.
        unsharded_us: of all together under a DCP size of 1.
    """
    difference = largest(inputs.difference(), device)
    calls = inputs.num_sets * -(-_FEWEST_CALLS // inputs.num_sets)
    timings = {
        name: time_operation(operation, device, calls, num_samples(device), _SAMPLE_SECONDS)
        for name, operation in inputs.operations.items()
    }
    selection = timings["selection"]
    return {
        "part": "selection",
        **_sizes(inputs.case, inputs.dtype),
        "dcp_comm_backend": backend,
        "num_heads": inputs.q.shape[2],
        "index_cache_dtype": inputs.index_cache_dtype,
        "num_sets": inputs.num_sets,
        "in_graph": selection.in_graph,
        **{f"{name}_us": round(timings[name].median_us, 2) if name in timings else None for name in _OPERATIONS},
        "index_bytes": inputs.index_bytes,
        "index_gb_per_s": round(inputs.index_bytes / timings["index_scores"].median_us / 1e3, 1),
        "different": round(difference, 5),
        "speedup_over_dcp_1": None if unsharded_us is None else round(unsharded_us / selection.median_us, 3),
    }


def attention_row(
    case: SparseCase, num_heads: int, rows: SelectedRows, make_peer: MakePeer | None, device: torch.device
) -> Row:
    """Ours, and the peer where it takes the case. Collective over the job."""
    inputs = AttentionInputs(case, num_heads, rows)
    timing, errors = _attend(Ours(inputs), inputs, device)
    row = {
        "part": "attention",
        **_sizes(case, rows.dtype),
        "num_heads": num_heads,
        "kv_cache_dtype": rows.kv_cache_dtype,
        "num_sets": len(rows),
        "in_graph": timing.in_graph,
        "num_selected": round(float(rows.num_slots.double().mean()), 1),
        "attention_us": round(timing.median_us, 2),
        "error": errors[0],
        "lse_error": errors[1],
        "flashmla_us": None,
        "speedup_over_flashmla": None,
    }
    try:
        peer = make_peer(inputs) if make_peer is not None else None
        found = None if peer is None else _attend(peer, inputs, device)
    except Exception as error:  # others' code: whatever it raises, ours was measured
        print(
            f"left out: flashmla of this case: {str(error).strip().partition(chr(10))[0] or type(error).__name__}",
            flush=True,
        )
        found = None
    if found is not None:
        peer_timing, peer_errors = found
        row["flashmla_us"] = round(peer_timing.median_us, 2)
        if is_right(row) and _are_small(peer_errors):
            row["speedup_over_flashmla"] = round(peer_timing.median_us / timing.median_us, 3)
    return row


def is_right(row: Row) -> bool:
    """Whether what is ours computed what it should."""
    if row["part"] == "selection":
        return bool(row["different"] <= _MOST_DIFFERENT)
    return _are_small((row["error"], row["lse_error"]))


def _are_small(errors: tuple[float | None, ...]) -> bool:
    return all(error is not None and error <= _LARGEST_ERROR for error in errors)


def _attend(kernel: Kernel, inputs: AttentionInputs, device: torch.device) -> tuple[Timing, tuple[float | None, ...]]:
    """Its time, and the largest errors of its last timed call on any rank; None for what is not finite, which JSON
    cannot say.
    """
    calls = len(inputs.caches) * -(-_FEWEST_CALLS // len(inputs.caches))
    timing, last = time_with_result(kernel.launch, device, calls, num_samples(device), _SAMPLE_SECONDS)
    errors = (largest(error, device) for error in Answer(inputs, calls - 1).errors(*kernel.result(*last)))
    return timing, tuple(error if math.isfinite(error) else None for error in errors)


def _sizes(case: SparseCase, dtype: torch.dtype) -> Row:
    name = str(dtype).removeprefix("torch.")
    return {"batch": case.batch, "context": case.context, "topk": case.topk, "dcp": case.dcp_size, "dtype": name}
