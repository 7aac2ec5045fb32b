"""Links between GPUs, with a stand-in for NVML, and messages for groups whose ranks cannot store into each other."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from dcpmla.comm.reach import GpuSite, Nvml, find_peers, judge_links, judge_sites, reach
from tests.support.ranks import run_ranks


class _NvmlError(Exception):
    pass


def nvlink_state(gpu: str, link: int) -> int:
    if link >= 2:
        raise _NvmlError("Invalid Argument")
    return int(gpu != "GPU-2")


def handle(uuid: str) -> str:
    if uuid == "GPU-7":
        raise _NvmlError("Not Found")
    return uuid


# Of a host's GPUs 0 and 1 have two NVLinks each, GPU 2 has none; NVML does not know GPU 7.
NVML = SimpleNamespace(
    NVMLError=_NvmlError,
    NVML_NVLINK_MAX_LINKS=18,
    NVML_FEATURE_ENABLED=1,
    NVML_P2P_CAPS_INDEX_NVLINK=2,
    NVML_P2P_STATUS_OK=0,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=handle,
    nvmlDeviceGetNvLinkState=nvlink_state,
    nvmlDeviceGetP2PStatus=lambda one, other, _: int("GPU-2" in (one, other)),
)


def fake_gpus(patch: pytest.MonkeyPatch, nvml: SimpleNamespace | None, uuids: list[int]) -> None:
    """Show this process GPUs with the given uuids, of which 0 and 2 have no peer access to each other."""
    patch.setitem(sys.modules, "pynvml", nvml)
    patch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[getattr(device, "index", device)]),
    )
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {uuids[one], uuids[other]} != {0, 2})
    patch.setattr(symmetric_memory, "get_backend", lambda _: "CUDA")


@pytest.mark.parametrize("has_nvml", [True, False])
def test_links_between_gpus(has_nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, NVML if has_nvml else None, [0, 1, 2])
    found = Nvml()
    link = "NVLink" if has_nvml else "peer access"
    assert find_peers(found) == [["-", link, "no"], [link, "-", "peer access"], ["no", "peer access", "-"]]
    assert [found.num_nvlinks(f"GPU-{gpu}") for gpu in (0, 1, 2, 7)] == ([2, 2, 0, None] if has_nvml else [None] * 4)


def reach_on_fakes(has_nvml: bool, visible: list[list[int]]) -> str:
    """Run `reach` with some GPUs visible to each rank, its own first."""
    with pytest.MonkeyPatch.context() as patch:
        fake_gpus(patch, NVML if has_nvml else None, visible[dist.get_rank()])
        return reach(dist.group.WORLD, torch.device("cuda", 0))


def reach_on_each() -> list[str]:
    settings = [
        (True, [[0], [1]]),  # as CUDA_VISIBLE_DEVICES lets them see
        (True, [[0, 1], [1, 0]]),
        (True, [[0], [2]]),
        (True, [[0, 2], [2, 0]]),
        (True, [[1], [1]]),
        (True, [[0], [7]]),
        (False, [[0, 1], [1, 0]]),
    ]
    return [reach(dist.group.WORLD, torch.device("cpu")), *(reach_on_fakes(*setting) for setting in settings)]


def test_ranks_hear_the_same_of_their_reach() -> None:
    first, second = run_ranks(2, reach_on_each)
    assert first == second
    assert first == [
        "the ranks are CPUs",
        "",
        "",
        "the GPUs of ranks 0 and 1 have no NVLink between them",
        "the GPUs of ranks 0 and 1 have no peer access to each other",
        "ranks 0 and 1 share a GPU",
        *["the GPUs of ranks 0 and 1 have no NVLink that NVML tells of (it is asked through the package nvidia-ml-py)"]
        * 2,
    ]


def test_hosts_and_links_are_judged() -> None:
    """The group has ranks 4 to 7; the first wrong one is named."""
    sites = [GpuSite(rank, "node1 a", f"GPU-{rank}", True) for rank in range(4, 8)]

    def judged(**changes: object) -> str:
        return judge_sites([*sites[:2], replace(sites[2], **changes), sites[3]])

    assert judged() == ""
    assert judged(host="node1 b") == "ranks 4 and 6 are on different hosts"
    assert judged(gpu="GPU-5") == "ranks 5 and 6 share a GPU"
    assert judged(gpu="") == "the ranks are CPUs"
    assert judged(has_symmetric_memory=False) == "torch has no symmetric memory for the GPU of rank 6"
    missing = [["" for _ in sites] for _ in sites]
    assert judge_links(sites, missing) == ""
    missing[3][1] = "no NVLink between them"
    assert judge_links(sites, missing) == "the GPUs of ranks 7 and 5 have no NVLink between them"


def check_reach_of_gpus() -> tuple[str, list[list[str]]]:
    return reach(dist.group.WORLD, torch.device("cuda", dist.get_rank())), find_peers(Nvml())


@pytest.mark.gpu_2
def test_reach_of_two_gpus() -> None:
    """`reach` agrees with the table of `doctor`."""
    (obstacle, peers), (other, _) = run_ranks(2, check_reach_of_gpus, device="cuda")
    assert obstacle == other
    assert (obstacle == "") == (peers[0][1] == "NVLink"), (obstacle, peers)
