"""A plug-in of vLLM, of the tests: the GPU of rank 0 comes later to a step than its peers wait."""

import os
from functools import partial
from pathlib import Path
from typing import Any

LATE_STEP = 5  # Steps count from when the file "go" exists, if they have a forward pass.
TIMEOUT = 20  # seconds, more than a rank is late while kernels compile beside other work
LATE_CYCLES = 50_000_000_000  # 25 seconds or more
_METADATA = "Metadata-Version: 2.1\nName: dcpmla-late-rank\nVersion: 0\n"
_ENTRY_POINT = "[vllm.general_plugins]\nlate_rank = tests.engines.vllm_late:register\n"


def write_entry_point(folder: Path) -> None:
    """Write the metadata by which vLLM finds this plug-in, where the folder is on PYTHONPATH."""
    dist_info = folder / "dcpmla_late_rank-0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(_METADATA)
    (dist_info / "entry_points.txt").write_text(_ENTRY_POINT)


def register() -> None:
    """Give exchanges a short timeout, and delay one step. Called once in each of vLLM's processes, maybe again."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    from dcpmla.config import DCPConfig
    from dcpmla.integrations.vllm import exchange

    if exchange.DCPConfig is not DCPConfig:
        return
    exchange.DCPConfig = partial(DCPConfig, exchange_timeout=TIMEOUT)
    launch, steps, go = Worker.execute_model, [], Path(os.environ["DCPMLA_TEST_GO"])

    def execute_model(worker: Any, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens and go.exists():
            steps.append(scheduler_output)
            if len(steps) == LATE_STEP and worker.rank == 0:
                torch.cuda._sleep(LATE_CYCLES)
        return launch(worker, scheduler_output)

    Worker.execute_model = execute_model
