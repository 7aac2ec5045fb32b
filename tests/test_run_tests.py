"""launch/run_tests.py: what a run of a part reports, and the record of all parts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import ROOT, run_forked

sys.path.append(str(ROOT / "launch"))
import run_tests  # noqa: E402

TESTS = """
import pytest

def test_passes(): pass

def test_fails(): assert False

@pytest.mark.parametrize("number", range(4))
def test_is_skipped(number): pytest.skip(f"no package {number % 2}")
"""


def report(folder: Path, *options: str) -> dict[str, Any]:
    """Run pytest over TESTS and other files of a folder as a part is run, and read what it reports."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text(
        f"pytest_plugins = ['tests.conftest']\nimport sys\nsys.path.append({str(ROOT)!r})"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", folder, folder, *options]
    # This process may be a worker of a run; the one that it starts is not.
    env = {
        "DCPMLA_OUTCOMES": str(folder / "outcomes.jsonl"),
        "PYTEST_XDIST_WORKER": "",
        "PYTEST_XDIST_WORKER_COUNT": "1",
    }
    run_forked([(command, env)], check=False)
    return run_tests.read_run(folder, 12.34)


@pytest.mark.parametrize("workers", [(), ("--numprocesses", "1")], ids=["in one process", "by a worker"])
def test_outcomes_are_counted(workers: tuple[str, ...], tmp_path: Path) -> None:
    """Those of tests, and of files that are not collected: one that cannot be imported has failed; one that lacks a
    package is skipped, with the package's name. A worker reports nothing itself.
    """
    (tmp_path / "test_broken.py").write_text("import no_such_package")
    (tmp_path / "test_optional.py").write_text("import pytest\npytest.importorskip('no_package', reason='no package')")
    found = report(tmp_path, "--continue-on-collection-errors", *workers)
    assert (found["passed"], sorted(found["failed"])) == (1, ["test_broken.py", "test_some.py::test_fails"])
    assert found["skipped"] == {"no package": 1, "no package 0": 2, "no package 1": 2}
    assert (found["seconds"], found["cards"]) == (12.3, [])
    assert {"python", "torch", "triton"} <= found["versions"].keys()


def test_a_fraction_of_the_tests(tmp_path: Path) -> None:
    counts = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = report(folder, "--part", f"{number}/2")
        counts.append(found["passed"] + len(found["failed"]) + sum(found["skipped"].values()))
    assert counts == [3, 3]


def found_of(passed: int, failed: list[str], sources: str = "s", names: list[str] | None = None) -> dict[str, Any]:
    features = {"v3": {"tp": {"cpu": {"count": 1, "tests": [f"t{passed}"], "ranks": passed}}}}
    slow = {f"t{passed}": 6.0}
    counts = {"seconds": 1.5, "passed": passed, "failed": failed, "skipped": {"x": 1}, "slow": slow}
    return {**counts, "names": names or [], "features": features, "sources": sources}


def test_fractions_of_a_part_add_up() -> None:
    """Fractions of other sources, or of another number, do not belong together."""
    record = run_tests.add({"parts": {"cpu": {}}}, "gpu", (1, 2), found_of(1, []))
    record = run_tests.add(record, "gpu", (2, 2), found_of(3, ["t"]))
    whole = record["parts"]["gpu"]
    assert whole["fractions"] == [[1, 2], 2]
    assert (whole["passed"], whole["failed"], whole["skipped"], whole["seconds"]) == (4, ["t"], {"x": 2}, 3.0)
    assert whole["features"] == {"v3": {"tp": {"cpu": {"count": 2, "tests": ["t1", "t3"], "ranks": 3}}}}
    assert record["parts"]["cpu"] == {}
    assert whole["slow"] == {"t1": 6.0, "t3": 6.0}
    for part, sources in (((1, 3), "s"), ((1, 2), "other"), ((1, 1), "s")):
        again = run_tests.add(record, "gpu", part, found_of(7, [], sources))["parts"]["gpu"]
        assert (again["passed"], again["fractions"]) == (7, [[1], part[1]])


def test_failed_tests_run_again() -> None:
    """Those that pass now have passed, and the record names all; other tests stay. One that does not end has failed."""
    failed = ["a.py::t", "a.py::t[1]", "b.py", "c.py", "c.py"]
    record = run_tests.add({"parts": {"cpu": {}}}, "gpu", (1, 1), found_of(5, failed))
    assert run_tests.failed_before(record, "gpu", "s") == failed[:4]
    assert "names" not in record["parts"]["gpu"]
    again = found_of(2, ["c.py::t"], names=["a.py::t[1]", "b.py::t"])
    part = run_tests.add_again(record, "gpu", again)["parts"]["gpu"]
    assert (part["passed"], part["failed"]) == (7, ["a.py::t", "c.py", "c.py::t"])
    assert (part["again"], part["fractions"], "names" in part) == (failed[:4], [[1], 1], False)
    assert part["features"]["v3"]["tp"]["cpu"]["tests"] == ["t5", "t2"]
    names = ["a.py::t", "a.py::t[1]", "b.py::t", "c.py::t"]
    record = run_tests.add_again(record, "gpu", found_of(4, [], names=names))
    assert record["parts"]["gpu"]["failed"] == []
    for name, sources in (("gpu", "s"), ("cpu", "s"), ("gpu_2", "s")):
        with pytest.raises(ValueError, match=f"--again {name}: no test failed in a recorded run of these sources"):
            run_tests.failed_before(record, name, sources)
    record = run_tests.add(record, "gpu", (1, 1), found_of(5, ["a"]))
    with pytest.raises(ValueError, match="run the part"):
        run_tests.failed_before(record, "gpu", "other")


def test_a_line_says_that_other_sources_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("gpu", "gpu_2", "gpu_4")
    record = {"parts": {name: {"sources": run_tests.hash_sources(), "fractions": [[1], 1]} for name in names}}
    assert run_tests.outdated(record) == ""
    record["parts"]["gpu_2"]["sources"] = "other"
    record["parts"]["gpu_4"]["fractions"] = [[2], 2]
    assert "(gpu_2, gpu_4)" in run_tests.outdated(record)
    assert "gpu, gpu_2, gpu_4" in run_tests.outdated({"parts": {}})
    (tmp_path / "dcpmla" / "attention" / "mla").mkdir(parents=True)
    file = tmp_path / "dcpmla" / "attention" / "mla" / "kernel.py"
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    hashes = set()
    for text in ("a = 1", "a = 2", "a = 1\n"):
        file.write_text(text)
        hashes.add(run_tests.hash_sources())
    (tmp_path / "dcpmla" / "cli.txt").write_text("")
    assert run_tests.hash_sources() in hashes
    assert len(hashes) == 3


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(run_tests.argparse.ArgumentTypeError, match=f"'{text}' is not K/N"):
        run_tests._fraction(text)


def test_the_record_is_whole() -> None:
    """A part that ran in fractions has them all."""
    for name, part in json.loads(run_tests.RECORD.read_text())["parts"].items() if run_tests.RECORD.exists() else ():
        done, total = part["fractions"]
        assert done == [*range(1, total + 1)], name
