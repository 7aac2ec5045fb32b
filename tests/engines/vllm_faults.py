"""A real vLLM engine in each rank: MODEL OPTIONS. In one step an exchange of the last rank fails
as in a CUDA graph: a kernel writes the fault word, and nothing is called. Each rank prints a report as a line of JSON.

OPTIONS are the engine's, and `asynchronous`: whether vLLM schedules a step before it has read the tokens of the last.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import SamplingParams

from dcpmla.comm.nccl import AllToAll
from dcpmla.comm.select import ChosenExchange
from dcpmla.integrations.vllm import exchange
from dcpmla.integrations.vllm.names import Worker
from dcpmla.parallel.collectives import PeerFault
from tests.engines.vllm_cases import end, schedule_ahead, start

FAULTY_STEP = 5  # Steps without a forward pass do not count.
WORD = (412 << 32) | (0 << 8) | 1  # exchange 412, `combine`, waited for rank 0 of the group
STATE = {"step": 0}


class FaultyExchange(AllToAll):
    """An exchange that has a fault word, as `direct` does."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.fault = torch.zeros(1, dtype=torch.int64)

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        if STATE["step"] == FAULTY_STEP and dist.get_rank() == dist.get_world_size() - 1:
            self.fault.fill_(WORD)
        return super().combine(out, lse)


def count_steps() -> None:
    """Count the steps that launch the model."""
    launch = Worker.execute_model

    def execute_model(worker: Any, scheduler_output: Any) -> Any:
        STATE["step"] += scheduler_output.total_num_scheduled_tokens > 0
        return launch(worker, scheduler_output)

    Worker.execute_model = execute_model


def main(directory: str, options: dict[str, Any]) -> None:
    if is_asynchronous := options.pop("asynchronous"):
        schedule_ahead()
    exchange.select_exchange = lambda dcp, group, device: ChosenExchange(FaultyExchange(group), "for the test")
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
    llm = start(directory, async_scheduling=is_asynchronous, **sizes | options)
    count_steps()
    engine, num_tokens, error = llm.llm_engine, [], ""
    params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    engine.add_request("first", {"prompt_token_ids": [3, 1, 4]}, params)
    try:
        while engine.has_unfinished_requests():
            num_tokens += [len(output.outputs[0].token_ids) for output in engine.step()]
    except PeerFault as fault:
        error = str(fault)
    report = {
        "tokens": num_tokens[-1],
        "steps": STATE["step"],
        "error": error,
        "runner": 1 + engine.vllm_config.use_v2_model_runner,
        "asynchronous": engine.vllm_config.scheduler_config.async_scheduling,
    }
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    end(reports)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
