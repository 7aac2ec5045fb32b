"""NIXL between processes that are stopped and killed, and what its import does."""

import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dcpmla.extras import install, needed_by
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.staging import allocate_staging
from tests.support.launchers import Host
from tests.support.transfer_process import Rank, RankProcess

nixl = pytest.importorskip("dcpmla.transfer.nixl", reason="nixl is not installed", exc_type=ImportError)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    stack: ExitStack, kind: type[Outgoing | Incoming], engine: str, seconds: float, host: Host | None = None
) -> RankProcess:
    process = RankProcess(kind, engine, seconds, host)
    stack.callback(process.close)
    return process


def new_rank(stack: ExitStack, kind: type[Outgoing | Incoming], engine: str, seconds: float) -> Rank:
    rank = Rank(kind, engine, seconds)
    stack.callback(rank.side.close)
    return rank


def connect(one: Rank, other: RankProcess) -> None:
    one.connect(other.peer)
    other.call("connect", one.peer)


def join(one: RankProcess, other: RankProcess) -> None:
    one.call("connect", other.peer)
    other.call("connect", one.peer)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_server_ends_or_stops(stack: ExitStack, number: signal.Signals) -> None:
    """Its arrivals fail; those of another one do not."""
    decode = new_rank(stack, Incoming, "d", seconds=1)
    prefill, other = (start(stack, Outgoing, engine, seconds=60) for engine in ("p", "q"))
    for each in (prefill, other):
        connect(decode, each)
    prefill.call("send", 1)
    decode.open(1)
    assert decode.wait(1) == (True, "")
    assert prefill.call("wait", 1) == (True, "")
    prefill.call("send", 2, False)
    decode.open(2)
    decode.open(3)  # it never begins
    decode.wait_for_bytes(2)
    prefill.signal(number)
    succeeded, reason = decode.wait(2)
    assert not succeeded
    assert "p/0" in reason
    assert not decode.wait(3)[0]
    decode.disconnect("p")
    other.call("send", 4)
    decode.open(4, "q")
    assert decode.wait(4) == (True, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_server_ends_or_stops(stack: ExitStack, number: signal.Signals) -> None:
    """Another one goes on while its handoffs wait for the lease, or until it is disconnected."""
    prefill = new_rank(stack, Outgoing, "p", seconds=1)
    decode, other = (start(stack, Incoming, engine, seconds=60) for engine in ("d", "e"))
    for each in (decode, other):
        connect(prefill, each)
    for handoff in (1, 2):
        decode.call("open", handoff)
        prefill.send(handoff, is_whole=False)
        prefill.wait_for_bytes(handoff)
    decode.signal(number)
    other.call("open", 3)
    prefill.send(3)
    assert other.call("wait", 3) == (True, "")
    assert prefill.wait(3) == (True, "")
    assert not prefill.wait(1)[0]
    prefill.disconnect("d")
    assert not prefill.wait(2)[0]
    again = start(stack, Incoming, "d-again", seconds=60)
    connect(prefill, again)
    again.call("open", 4)
    prefill.send(4)
    assert again.call("wait", 4) == (True, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_between_hosts(stack: ExitStack, hosts: tuple[Host, Host], number: signal.Signals) -> None:
    """Over TCP. A prefill server that is killed comes back under another name; one that was stopped goes on."""
    decode = start(stack, Incoming, "d", 2, hosts[0])
    prefill = start(stack, Outgoing, "p", 60, hosts[1])
    join(decode, prefill)
    prefill.call("send", 1)
    decode.call("open", 1)
    assert decode.call("wait", 1) == (True, "")
    assert prefill.call("wait", 1) == (True, "")
    prefill.call("send", 2, False)
    decode.call("open", 2)
    decode.call("wait_for_bytes", 2)
    prefill.signal(number)
    succeeded, reason = decode.call("wait", 2)
    assert not succeeded
    assert "p/0" in reason
    if number == signal.SIGSTOP:
        prefill.signal(signal.SIGCONT)
    else:
        decode.call("disconnect", "p")
        prefill = start(stack, Outgoing, "p-again", 60, hosts[1])
        join(decode, prefill)
    prefill.call("send", 3)
    decode.call("open", 3, prefill.peer.engine)
    assert decode.call("wait", 3) == (True, "")
    assert prefill.call("wait", 3) == (True, "")


def test_wrong_metadata() -> None:
    one, other = (nixl.NixlTransport(name, allocate_staging(torch.device("cpu"), 2, 64)) for name in ("a/0", "b/0"))
    try:
        good = other.metadata()
        for wrong in (good[:-20], good.replace(b"b/0", b"c/0"), good.replace(b"DRAM", b"FILE")):
            with pytest.raises(ValueError, match="the metadata of b/0 is wrong"):
                one.connect("b/0", wrong)
        with pytest.raises(ConnectionError, match="b/0 is not connected"):
            one.send("b/0", b"x")
        one.connect("b/0", good)
        with pytest.raises(ValueError, match="a read of"):
            one.read("b/0", 2, 0, 64, b"x")
        one.disconnect("b/0")
        with pytest.raises(ConnectionError, match="b/0 is not connected"):
            one.read("b/0", 0, 0, 64, b"x")
    finally:
        one.close()
        other.close()


def test_it_prints_nothing_and_leaves_logging_alone() -> None:
    script = """
import logging, torch
before = logging.raiseExceptions, logging.root.level, list(logging.root.handlers)
from dcpmla.transfer.nixl import NixlTransport
from dcpmla.transfer.staging import allocate_staging
NixlTransport("a/0", allocate_staging(torch.device("cpu"), 2, 64)).close()
assert (logging.raiseExceptions, logging.root.level, list(logging.root.handlers)) == before
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dcpmla.transfer.nixl")
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    message = re.escape(f"--role prefill needs the extra disaggregation: {install('disaggregation')}")
    with pytest.raises(ImportError, match=message), needed_by("--role prefill"):
        importlib.import_module("dcpmla.transfer.nixl")
