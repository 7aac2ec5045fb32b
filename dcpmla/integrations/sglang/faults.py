"""The check that SGLang's scheduler makes before it uses a step's tokens."""

from contextlib import nullcontext
from functools import wraps
from typing import Any

from sglang.srt.managers.scheduler import Scheduler

from dcpmla.comm.faults import StepFaults

_CHECK = "check_dcpmla_faults"  # attribute of a result between the step and its use


def guard(faults: StepFaults) -> None:
    """Make this process's scheduler raise PeerFault instead of using a step's tokens, if one of its exchanges failed on
    any rank of the TP group. That ends all processes of SGLang.

    Each rank has a scheduler, and all make the same steps. `run_batch` launches one, with the overlap schedule on a
    separate stream; `process_batch_result` takes its result later.
    """
    run_batch, process_batch_result = Scheduler.run_batch, Scheduler.process_batch_result

    @wraps(run_batch)
    def run(scheduler: Any, *args: Any, **options: Any) -> Any:
        result = run_batch(scheduler, *args, **options)
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            setattr(result, _CHECK, faults.start())
        return result

    @wraps(process_batch_result)
    def process(scheduler: Any, batch: Any, result: Any) -> Any:
        check = vars(result).pop(_CHECK, None)
        if check is not None:
            check()
        return process_batch_result(scheduler, batch, result)

    Scheduler.run_batch, Scheduler.process_batch_result = run, process
