"""Run an engine to the end with a live line."""

from collections.abc import Iterator

from tqdm import tqdm

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request


def run_with_bar(engine: Engine, name: str, num_requests: int, is_first: bool) -> Iterator[list[Request]]:
    """Step until no request is left; gives what each step finished. The line (rank 0's) counts that once it is
    dealt with.

    Raises:
        RuntimeError: in place of a ValueError: all that a user can get wrong has been checked, this one wants its
            traceback.
    """
    with tqdm(total=num_requests, desc=name, unit="request", disable=not is_first) as bar:
        while engine.has_requests:
            try:
                finished = engine.step()
            except ValueError as error:
                raise RuntimeError(f"{name} failed") from error
            yield finished
            bar.set_postfix_str(_status(engine, bar.format_dict["elapsed"]), refresh=False)
            bar.update(len(finished))


def _status(engine: Engine, seconds: float) -> str:
    scheduler, rate = engine.scheduler, engine.stats.num_new_tokens / max(seconds, 1e-9)
    num_waiting = len(scheduler.waiting)
    return f"{rate:,.0f} tok/s, {len(scheduler.running)} running, {num_waiting} waiting, cache {engine.cache_use():.0%}"
