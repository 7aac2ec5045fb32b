"""The commands of docs/plugging_in.md: engines read them, with our plug-ins found by their entry points."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations import sglang, vllm
from tests.engines.sglang_tree import sglang_variables
from tests.engines.trees import VERSIONS, vllm_tree, vllm_variables
from tests.support.launchers import ROOT, run_together

PAGE = (ROOT / "docs" / "plugging_in.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")}
PROGRAM = ROOT / "tests" / "engines" / "read_options.py"


def commands(section: str) -> list[list[str]]:
    """Return the words of each command in a section's blocks, but pip's, which tests/test_snippets.py reads."""
    blocks = re.findall(r"^```\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if not line.startswith("pip install ")]


def options(section: str) -> set[str]:
    """Return the options that a section's prose names."""
    return set(re.findall(r"`(--[a-z][a-z-]*)", SECTIONS[section]))


def understood(model: Path, folder: Path, section: str, *variables: dict[str, str]) -> list[dict[str, Any]]:
    """Return what an engine understands of a section's one command, in each environment, with a tiny model."""
    (command,) = commands(section)
    (name,) = (word for word in command if "/" in word)
    (folder / name).parent.mkdir()
    (folder / name).symlink_to(model)
    programs = [([sys.executable, PROGRAM, folder, *command], each) for each in variables]
    return [json.loads(ended.stdout.splitlines()[-1]) for ended in run_together(programs)]


def test_vllm_reads_its_command(model: Path, tmp_path: Path) -> None:
    trees = [vllm_variables(vllm_tree(version)) for version in VERSIONS]
    for version, read in zip(VERSIONS, understood(model, tmp_path, "vLLM", *trees), strict=True):
        assert read["tp"] == read["dcp"] > 1, version
        assert read["backend"] == f"{vllm.BACKENDS}.CUSTOM", version
        unknown = options("vLLM") - {*read["options"]}
        assert not unknown, f"vLLM {version} has no {unknown}"


def test_sglang_reads_its_command(model: Path, tmp_path: Path) -> None:
    (read,) = understood(model, tmp_path, "SGLang", sglang_variables(tmp_path / "site"))
    assert read["tp"] == read["dcp"] > 1
    assert read["backend"] == sglang.__name__
    unknown = options("SGLang") - {*read["options"]}
    assert not unknown, f"SGLang has no {unknown}"


@pytest.mark.parametrize(
    ("section", "versions"),
    [
        ("vLLM", "vLLM " + " and ".join(version.removesuffix(".0") for version in VERSIONS)),
        ("SGLang", ", ".join(sglang.SUPPORTED)),
    ],
)
def test_the_page_names_the_versions_tested(section: str, versions: str) -> None:
    assert f" {versions}. " in SECTIONS[section]
