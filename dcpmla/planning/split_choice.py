"""The division of GPUs to take for a load: the shortest times between tokens that keep up with it, and why."""

from collections.abc import Sequence

from dcpmla.planning.machine import Machine
from dcpmla.planning.servers import Server, Traffic
from dcpmla.planning.split import Split, predict_both, predict_split
from dcpmla.planning.words import ms

_CLOSE = 0.02  # times within this share of each other count as equal


def all_splits(machine: Machine, traffic: Traffic, servers: Sequence[Server], num_gpus: int) -> list[Split]:
    """Predict every division of GPUs into servers that prefill and servers that decode, or that do both.

    Servers that prefill and servers that decode have one format of the cache. GPUs that are too few for one more server
    that decodes are left over.
    """
    splits = []
    for decode in servers:
        if decode.setting.tp <= num_gpus:
            splits.append(predict_both(traffic, decode, num_gpus // decode.setting.tp))
        for prefill in servers:
            if prefill.setting.kv_cache_dtype == decode.setting.kv_cache_dtype:
                for num_prefill in range(1, (num_gpus - decode.setting.tp) // prefill.setting.tp + 1):
                    num_decode = (num_gpus - num_prefill * prefill.setting.tp) // decode.setting.tp
                    splits.append(predict_split(machine, traffic, prefill, num_prefill, decode, num_decode))
    return splits


def recommend_split(splits: Sequence[Split]) -> tuple[Split | None, str]:
    """Choose a split, and give the reason in sentences.

    Returns:
        Of the splits that keep up, the one with the shortest 99th percentile of the time between tokens; among those
        within 2 % of it, the one with the shortest time to the first token. None if none keeps up.
    """
    apart, both = ([split for split in splits if bool(split.num_prefill) == is_apart] for is_apart in (True, False))
    best = _fastest(splits)
    if best is None:
        return None, "No division keeps up: " + "; ".join(_nearest(group) for group in (apart, both) if group) + "."
    reason = f"{_late(best)}, and the first token takes {ms(best.time_to_first_token_us)} ms on average"
    kind = both if best.num_prefill else apart
    other = _fastest(kind)
    if not kind:
        return best, f"{reason}. The GPUs are too few for two servers of the sizes in tensor_parallel_size (-tp)."
    if other is None:
        return best, f"{reason}. {_nearest(kind)}."
    against = f"With {other}, {_late(other)}, and the first token takes {ms(other.time_to_first_token_us)} ms"
    return best, f"{reason}. {against}. {_cause(best, other)}"


def _cause(best: Split, other: Split) -> str:
    """Return the reason why a split is better than the best one of the other kind."""
    both = other if best.num_prefill else best
    share = f"{both.prompt_step_share:.1%} of the steps of servers that do both have a piece of a prompt"
    if best.num_prefill:
        return f"{share}, for which decodes wait."
    return f"Only {share}, and all GPUs decode."


def _fastest(splits: Sequence[Split]) -> Split | None:
    """Return the split with the shortest times between tokens, as `recommend_split` does; None if there is none."""
    fitting = [split for split in splits if split.keeps_up]
    shortest = min((_late_us(split) for split in fitting), default=0.0)
    close = [split for split in fitting if _late_us(split) <= shortest * (1 + _CLOSE)]
    return min(close, key=lambda split: (split.time_to_first_token_us or 0.0, _late_us(split)), default=None)


def _late_us(split: Split) -> float:
    """Return the 99th percentile of the time between tokens of a split that keeps up."""
    assert split.time_per_token_p99_us is not None
    return split.time_per_token_p99_us


def _nearest(splits: Sequence[Split]) -> str:
    """Describe the split that comes nearest to the load, and its obstacle."""
    nearest = min(splits, key=lambda split: (split.num_running is None, max(split.busy, split.link_busy)))
    return f"{nearest} cannot keep up: {nearest.obstacle}"


def _late(split: Split) -> str:
    return f"99 % of the times between tokens are at most {ms(split.time_per_token_p99_us)} ms"
