"""Versions of other packages: the script that records what passed with them, and the README's claims."""

import argparse
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.launchers import ROOT

sys.path.append(str(ROOT / "launch"))
from check_versions import RECORD, constrain, record, requirement  # noqa: E402

ROW = re.compile(r"^\| Checked against \|(.*)$", re.MULTILINE)


def test_the_readme_claims_what_is_recorded() -> None:
    """Each version in the row has a line in the record, and each recorded version is in the row."""
    match, recorded = ROW.search((ROOT / "README.md").read_text()), RECORD.read_text()
    assert match is not None
    assert re.findall(r"\b5\.\d+", match[1]) == sorted(set(re.findall(r"transformers (\d+\.\d+)", recorded)))
    assert re.findall(r"torch (\d+\.\d+) on CPUs", match[1]) == sorted(set(re.findall(r"torch (\d+\.\d+)", recorded)))


def test_named_versions_replace_constraints() -> None:
    constraints = (ROOT / "launch" / "constraints.txt").read_text()
    left = constrain(constraints, ["transformers==5.17.0", "torch==2.13.0"])
    assert set(constraints.splitlines()) - set(left.splitlines()) == set(
        re.findall(r"^transformers==.*$", constraints, re.MULTILINE)
    )


def test_a_record_has_one_line_for_the_same_run(tmp_path: Path) -> None:
    file, tests = tmp_path / "record", ["tests/a.py", "tests/b.py"]
    for day, version, counts in ((1, "1.0", "3 passed"), (2, "1.1", "4 passed, 1 skipped"), (3, "1.0", "5 passed")):
        record(file, f"torch {version}", tests, f"...\n{counts} in 3.21s\n", datetime(2026, 1, day, tzinfo=UTC))
    assert file.read_text() == (
        "2026-01-02  torch 1.1; tests/a.py tests/b.py: 4 passed, 1 skipped\n"
        "2026-01-03  torch 1.0; tests/a.py tests/b.py: 5 passed\n"
    )


def test_versions_are_exact() -> None:
    assert requirement("torch==2.13.0+cpu") == "torch==2.13.0+cpu"
    for text in ("torch", "torch>=2", "--index-url=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME==VERSION"):
            requirement(text)


def test_hashes_are_of_the_releases_that_tests_take() -> None:
    """launch/write_hashes.py writes them anew after a change of the constraints."""
    pinned, hashed = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "launch" / name).read_text(), re.MULTILINE))
        for name in ("constraints.txt", "hashes.txt")
    )
    served = {
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "jinja2",
        "starlette",
        "uvicorn",
        "pydantic",
    }
    assert served <= hashed.keys()
    assert {name: pinned[name] for name in pinned.keys() & hashed.keys()}.items() <= hashed.items()
    text = (ROOT / "launch" / "hashes.txt").read_text()
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", entry, re.MULTILINE), entry
