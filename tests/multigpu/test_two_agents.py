"""Two hosts' worth of GPUs on one host: two torchrun agents, each with half of them, and NCCL over sockets between."""

import json
from pathlib import Path

from tests.support.gpus import on_gpus
from tests.support.launchers import GENERATE, Command, free_port, run_together, torchrun
from tests.support.models import save_tiny


@on_gpus(4, 8)
def test_same_tokens_as_one_agent(num_gpus: int, tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path / "model")
    run_together([(torchrun(generate(num_gpus, tmp_path, "one.json"), num_gpus), {"NVIDIA_TF32_OVERRIDE": "0"})])
    run_together(agents(generate(num_gpus, tmp_path, "two.json"), num_gpus // 2, tmp_path))
    assert read_tokens(tmp_path / "two.json") == read_tokens(tmp_path / "one.json")
    log = "".join(file.read_text(errors="replace") for file in tmp_path.glob("nccl.*"))
    assert "via NET/Socket" in log


def generate(num_gpus: int, directory: Path, out: str) -> list[object]:
    prompts = ["--prompt-ids", "5,6,7", "--prompt-ids", ",".join(map(str, range(1, 60)))]
    cut = ["-tp", num_gpus, "-dcp", num_gpus, "--block-size", 8, "--dcp-comm-backend", "a2a", "--device", "cuda"]
    return [*GENERATE, "--model", directory / "model", *prompts, *cut, "--max-new-tokens", 6, "--json", directory / out]


def agents(program: list[object], num_local: int, directory: Path) -> list[Command]:
    """Start two agents whose ranks NCCL takes for different hosts (NCCL_HOSTID), with only the network between them."""
    options = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    options += ["--local-addr", "localhost"]
    shared = {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_DEBUG": "INFO", "NVIDIA_TF32_OVERRIDE": "0"}
    shared["NCCL_DEBUG_FILE"] = f"{directory}/nccl.%p"
    return [
        (
            torchrun(program, num_local, *options),
            {
                **shared,
                "NCCL_HOSTID": f"agent{agent}",
                "CUDA_VISIBLE_DEVICES": ",".join(str(agent * num_local + gpu) for gpu in range(num_local)),
            },
        )
        for agent in range(2)
    ]


def read_tokens(file: Path) -> list[list[int]]:
    return [output["token_ids"] for output in json.loads(file.read_text())["outputs"]]
