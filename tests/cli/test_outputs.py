"""The files that `dcpmla generate` writes, and files that it must not overwrite."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcpmla.__main__ import main
from dcpmla.cli.output import open_output_lines, write_json
from tests.support.commands import generate, mistake

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def test_one_file_for_both_outputs(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert generate(model, "--prompt-ids 5 --json", out, "--logits", tmp_path / "." / "out") == 2
    assert f"--json and --logits are both {out}; give each its own file" in mistake(capfd)
    assert not out.exists()


def hub_model(model: Path, directory: Path) -> Path:
    """Copy a model as the hub's cache has it: links to files elsewhere, under other names."""
    (directory / "blobs").mkdir()
    (directory / "snapshot").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        (directory / "blobs" / str(number)).write_bytes(file.read_bytes())
        (directory / "snapshot" / file.name).symlink_to(directory / "blobs" / str(number))
    return directory / "snapshot"


@pytest.mark.parametrize("option", ["--json", "--logits", "--output-file"])
@pytest.mark.parametrize("way", ["file", "weights", "outside link", "hub's link", "hub's blob"])
def test_no_output_over_the_model(
    option: str, way: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "empty").touch()
    (tmp_path / "link").symlink_to(copy / "config.json")
    if way.startswith("hub"):
        (tmp_path / "hub").mkdir()
        copy = hub_model(copy, tmp_path / "hub")
    names = {"file": "empty", "weights": "model.safetensors", "hub's link": "config.json"}
    target = copy / names[way] if way in names else tmp_path / "link"
    if way == "hub's blob":
        target = (copy / "config.json").resolve()
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"id": 1, "prompt_token_ids": [5]}\n')
    before, given = target.read_bytes(), f"--prompt-file {prompts}" if option == "--output-file" else "--prompt-ids 5"
    assert generate(copy, f"{given} {option}", target) == 2
    error = mistake(capfd)
    assert f"{option} is {target}, " in error
    if way == "file" or option != "--output-file":  # else what the file holds is reason enough
        assert "a file in the model's directory; give the name of another file" in error
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        "bench generate --device cpu --batch 1 --input-len 4 --output-len 2 --model",
        "bench layer --device cpu --geometry",
        "plan --machine h200x8 --model",
    ],
)
def test_no_measurements_over_the_model(
    command: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    target = copy / "model.safetensors"
    before = target.read_bytes()
    assert main([*command.split(), str(copy), "--json", str(target)]) == 2
    assert f"--json is {target}, a file in the model's directory; give the name of another" in mistake(capfd)
    assert target.read_bytes() == before


def test_a_new_output_in_the_model_s_directory(model: Path, tmp_path: Path) -> None:
    """It hurts nothing, and a job's lines may be resumed there."""
    copy, prompts = shutil.copytree(model, tmp_path / "model"), tmp_path / "in.jsonl"
    prompts.write_text('{"id": 1, "prompt_token_ids": [5]}\n')
    for _ in range(2):
        options = ["--prompt-file", prompts, "--output-file", copy / "out.jsonl"]
        assert generate(copy, "--max-new-tokens 1", *options) == 0
    assert len((copy / "out.jsonl").read_text().splitlines()) == 1


def test_a_linked_output_keeps_its_link(model: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    target.write_text("old")
    link.symlink_to(target)
    assert generate(model, "--prompt-ids 5 --max-new-tokens 1 --json", link) == 0
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["outputs"]) == 1


@pytest.fixture(params=[0o077, 0o022, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_new_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    write_json(tmp_path / "new.json", {})
    with open_output_lines(tmp_path / "new.jsonl") as lines:
        lines.append([{"id": 1}])
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.touch()
    file.chmod(0o600)
    write_json(file, {})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
