"""`dcpmla generate MODEL -tp 2` starts its ranks itself: what it gives, and how it ends, with few lines."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dcpmla.__main__ import build_parser, main
from tests.support.commands import generate, mistake
from tests.support.launchers import free_port
from tests.support.one_command import OneCommand, one_command, tokens

SIZES = ["-tp", 2, "-dcp", 2, "--block-size", 8]
PROMPTS = ["--prompt-ids", "5,6,7", "--prompt-ids", ",".join(map(str, range(1, 60)))]
MANY_PROMPTS = 60 * ["--prompt-ids", "5,6,7"]
LONG = [*MANY_PROMPTS, "--max-new-tokens", 250, "--max-num-seqs", 1, "--kv-cache-memory-bytes", 4 << 20]
AGAIN = "run the same command again"
NO_MODEL = "dcpmla: error: model (--model) is '/no/such/model': no such directory, and no such model could be"


def test_one_command_gives_the_tokens_of_one_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on two hosts, each with one rank; the first one prints."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    files = [tmp_path / f"{name}.json" for name in ("alone", "host", "hosts")]
    assert generate(model, "--block-size 8", *PROMPTS, "--json", files[0]) == 0
    with one_command(tmp_path / "host", "generate", *SIZES, model, *PROMPTS, "--json", files[1]) as job:
        assert job.exit_code() == 0, job.err
        assert job.errors() == []
        assert "ranks: 2 ranks, 2 of them on this host, started by dcpmla, on CPUs\n" in job.out
    nodes = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    command = ["generate", model, *SIZES, *PROMPTS, "--json", files[2], *nodes]
    with (
        one_command(tmp_path / "second", *command, "--node-rank", 1) as second,
        one_command(tmp_path / "first", *command) as first,
    ):
        assert (first.exit_code(), second.exit_code()) == (0, 0), first.err + second.err
        assert first.errors() + second.errors() == []
        assert "ranks: 2 ranks, 1 of them on this host, started by dcpmla, on CPUs\n" in first.out
        assert second.out == ""
    assert tokens(files[0]) == tokens(files[1]) == tokens(files[2])


def interrupt(job: OneCommand) -> None:
    job.send(signal.SIGINT)


def kill_rank(job: OneCommand) -> None:
    job.ranks()[1].kill()


ENDS: dict[str, tuple[Any, int, list[str]]] = {
    "interrupted": (interrupt, 130, [rf"rank [01] was asked to stop \(SIGINT\) in \w+ step \d+ .*: {AGAIN}"]),
    "a rank is killed": (
        kill_rank,
        137,
        [
            rf"rank 1 was killed by SIGKILL: see the lines above and dmesg \(was memory short\?\), then {AGAIN}",
            rf"rank 0 .* in \w+ step .*: rank 1 is missing, last seen \d+ s ago in .*, then {AGAIN}",
        ],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_has_few_lines(name: str, model: Path, tmp_path: Path) -> None:
    end, code, lines = ENDS[name]
    with one_command(tmp_path / "job", "generate", model, *SIZES, *LONG) as job:
        job.wait_for("1 running")
        end(job)
        assert job.exit_code() == code
        errors = sorted(job.errors(), reverse=True)
        assert len(errors) == len(lines), job.err
        for error, line in zip(errors, lines, strict=True):
            assert re.fullmatch(f"dcpmla: error: {line}", error), error


def test_ranks_end_with_a_parent_that_is_killed(model: Path, tmp_path: Path) -> None:
    with one_command(tmp_path / "job", "generate", model, *SIZES, *LONG) as job:
        job.wait_for("1 running")
        assert sorted(job.ranks()) == [0, 1]
        job.send(signal.SIGKILL)
        assert job.exit_code() == -signal.SIGKILL
        assert job.errors() == []


def test_a_host_that_is_lost_takes_the_store_along(model: Path, tmp_path: Path) -> None:
    """The ranks of other hosts say so in a line each, without torch's stack of the connection."""
    nodes = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    command = ["generate", model, *SIZES, *LONG, *nodes]
    with (
        one_command(tmp_path / "second", *command, "--node-rank", 1) as second,
        one_command(tmp_path / "first", *command) as first,
    ):
        first.wait_for("1 running")
        second.ranks()
        first.send(signal.SIGKILL)
        assert second.exit_code() == 1
        (error,) = second.errors()
        assert re.match(
            "dcpmla: error: rank 1 .*: the job's store does not answer: who holds it on the first host", error
        )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["/no/such/model"], NO_MODEL),  # found by the ranks
        (["m", "--frobnicate"], "dcpmla: error: unrecognized arguments: --frobnicate"),  # before there are any
        (
            ["m", "--nnodes", 3, "--master-addr", "n0"],
            "dcpmla: error: tensor_parallel_size (-tp) is 2; it must",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[object], line: str, tmp_path: Path) -> None:
    with one_command(tmp_path / "job", "generate", *arguments, *SIZES, "--prompt-ids", 5) as job:
        assert job.exit_code() == 2
        (error,) = job.errors()
        assert error.startswith(line)


def test_a_launchers_ranks_have_its_hosts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("sys.argv", ["dcpmla", "generate", "m", "--nnodes", "2", "--master-addr", "n0", "-tp", "2"])
    assert main() == 2
    assert "nnodes (--nnodes) is 2, node_rank (--node-rank) 0, but a launcher has started this rank" in mistake(capfd)


@pytest.mark.parametrize("command", ["generate", "serve", "plan", "bench generate"])
def test_the_model_is_an_argument_or_an_option(command: str) -> None:
    def model(*words: str) -> str:
        return str(build_parser().parse_args([*command.split(), *words]).model)

    assert model("m", "-dcp", "1") == model("-dcp", "1", "m") == model("-dcp", "1", "--model", "m") == "m"
    assert model("--model=m") == model("--model", "n", "--model", "m") == "m"
    for words, message in (
        ((), "the following arguments are required: MODEL"),
        (("m", "--model", "n"), "unrecognized arguments: m"),
        (("--model", "n", "--frobnicate", "3"), "unrecognized arguments: --frobnicate 3"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*words)


@pytest.mark.parametrize("command", ["doctor", "bench exchange", "bench reduce", "bench turns"])
def test_commands_of_any_number_of_ranks_start_them(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's ranks and a command without -tp go on as they are."""
    started = []
    monkeypatch.setattr("dcpmla.cli.options.run_local_ranks", lambda num_ranks, hosts: started.append(num_ranks) or 7)
    args, alone = (build_parser().parse_args([*command.split(), *words]) for words in (["-tp", "3"], []))
    assert (args.launch(args), alone.launch(alone), started) == (7, None, [3])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert (args.launch(args), started) == (None, [3])


def test_doctor_has_no_model_unless_it_is_given() -> None:
    assert build_parser().parse_args(["doctor"]).model is None
    assert build_parser().parse_args(["doctor", "--determinism", "m"]).model == "m"
