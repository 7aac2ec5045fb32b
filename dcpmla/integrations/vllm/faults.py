"""The check that vLLM's worker makes between the end of a step and the moment its tokens leave."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from dcpmla.comm.faults import StepFaults
from dcpmla.integrations.vllm.names import AsyncModelRunnerOutput, Worker

_CHECK = "check_dcpmla_faults"  # attribute of a worker between the two halves of a step


def guard(faults: StepFaults) -> None:
    """Make this process's worker return no output of a step in which an exchange failed on any rank of the TP group.

    A worker launches the model in `execute_model`, which returns None if sampling is left to `sample_tokens`. The words
    are summed between the two, so an output does not wait for drafts of the next step. With asynchronous scheduling the
    output is read later, by `get_output`, maybe in another thread.
    """
    execute_model, sample_tokens = Worker.execute_model, Worker.sample_tokens

    @wraps(execute_model)
    def execute(worker: Any, scheduler_output: Any) -> Any:
        output = execute_model(worker, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return output  # no layer ran
        check = faults.start()
        if output is not None:
            return _checked(output, check)
        setattr(worker, _CHECK, check)
        return None

    @wraps(sample_tokens)
    def sample(worker: Any, grammar_output: Any) -> Any:
        output = sample_tokens(worker, grammar_output)
        check = vars(worker).pop(_CHECK, None)
        return output if check is None else _checked(output, check)

    Worker.execute_model, Worker.sample_tokens = execute, sample


def _checked(output: Any, check: Callable[[], None]) -> Any:
    """Return an output after a check, or one that checks as it is read."""
    if not isinstance(output, AsyncModelRunnerOutput):
        check()
        return output
    read = output.get_output

    def get_output() -> Any:
        content = read()
        check()
        return content

    output.get_output = get_output
    return output
