"""Totals of a rank's engine since its start, by the names of metrics (`totals_of`)."""

from dcpmla.runtime.engine import Engine


def totals_of(engine: Engine) -> dict[tuple[str, ...], float]:
    """Return `Report.totals`."""
    stats, handoffs = engine.stats, engine.handoffs
    totals: dict[tuple[str, ...], float] = {
        ("preemptions",): stats.num_preemptions,
        ("draft_tokens",): stats.num_draft_tokens,
        ("accepted_draft_tokens",): stats.num_accepted_tokens,
    }
    for labels, copies in () if engine.offload is None else engine.offload.totals().items():
        totals |= {(f"kv_offload_{name}", *labels): total for name, total in vars(copies).items()}
    for direction, side in () if handoffs is None else (("sent", handoffs.sent), ("received", handoffs.received)):
        totals |= {
            ("kv_transfer_bytes", direction): side.bytes,
            ("kv_transfer_seconds", direction): side.seconds,
            ("kv_transfer_requests", direction, "done"): side.num_done,
            ("kv_transfer_requests", direction, "failed"): side.num_failed,
        }
    return totals
