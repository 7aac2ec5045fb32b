"""Run one part of the tests, and record what has run where.

python launch/run_tests.py gpu_2 --record            runs a part and writes it into launch/tested_gpus.json
python launch/run_tests.py gpu --part 2/3 -k topk    runs the second third, with arguments of pytest after the options
python launch/run_tests.py gpu --again               runs again what failed in the record of the same sources
python launch/run_tests.py cpu --all                 runs the thorough tests, too, and draws ten times the examples
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import write_support
from features import collect

ROOT, RECORD = write_support.ROOT, write_support.RECORD
sys.path.insert(0, str(ROOT))  # also where the package is not installed

from dcpmla.bench.results import installed, versions  # noqa: E402

# What may change the result of a test on GPUs.
_FOLDERS = ("attention", "cache", "comm", "integrations", "model", "parallel", "planning", "runtime", "transfer")
GPU_SOURCES = ("dcpmla/*.py", *(f"dcpmla/{folder}/**/*.py" for folder in _FOLDERS))
_SLOW_SECONDS = 5.0  # Tests that take longer are recorded, and start first in the next run.
_NO_TESTS = 5  # pytest's exit status


@dataclass(frozen=True)
class Part:
    """A part of the tests.

    Attributes:
        options: Options of pytest that choose the tests.
        workers: Number of processes that run tests at the same time; 0 to derive it from the number of cores.
        cores_per_worker: Number of cores for each process, where the number of processes is derived.
    """

    options: tuple[str, ...]
    workers: int = 0
    cores_per_worker: int = 0

    def num_workers(self) -> int:
        """Return how many processes run tests."""
        return self.workers or max(2, (os.cpu_count() or 2) // self.cores_per_worker)


# By the GPUs that a test needs; a rank needs a core and more, to compile.
_GPU_PARTS = {
    name: Part(("--ignore", "tests/serving", "--ignore", "tests/engines"), cores_per_worker=cores_per_worker)
    for name, cores_per_worker in (("gpu", 1), ("gpu_2", 3), ("gpu_4", 6), ("gpu_8", 12))
}
PARTS = {
    "cpu": Part(("--ignore", "tests/engines"), workers=2),  # Many tests wait for processes of their own.
    "engines": Part(("tests/engines", "-rs", "--timeout", "900"), workers=2),
    "engines_gpu": Part(("tests/engines", "-rs", "--timeout", "900", "-m", "gpu or gpu_2"), workers=1),
    **_GPU_PARTS,
}


def main() -> None:
    """Run a part, and exit with pytest's status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PARTS, help="part of the tests: by the GPUs that they need, or of CPUs")
    parser.add_argument("--part", type=_fraction, default=(1, 1), metavar="K/N", help="every N-th test, from the K-th")
    parser.add_argument("--record", action="store_true", help=f"write the results into {RECORD.name}")
    parser.add_argument("--again", action="store_true", help="record again the tests that failed in the recorded run")
    parser.add_argument("--all", action="store_true", help="cpu: run the thorough tests, too, with more examples")
    parser.add_argument("--commit", help="commit of the checkout, where git does not know it")
    args, options = parser.parse_known_args()
    if args.name == "cpu":
        options = [*([] if args.all else ["-m", "not thorough"]), *options]
        os.environ |= {"DCPMLA_ALL_TESTS": "1"} if args.all else {}
    record, sources = write_support.read(RECORD), hash_sources()
    is_recorded = args.record or args.again
    if args.again:
        try:
            options += failed_before(record, args.name, sources)
        except ValueError as error:
            parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        status = run(args.name, args.part, options, Path(folder) if is_recorded else None)
        seconds = time.monotonic() - start
        if is_recorded:
            found = read_run(Path(folder), seconds) | {"commit": args.commit or _head(), "sources": sources}
            joined = add_again(record, args.name, found) if args.again else add(record, args.name, args.part, found)
            RECORD.write_text(json.dumps(joined, indent=1) + "\n")
            write_support.PAGE.write_text(write_support.render(joined))
    if args.name == "cpu" and (line := outdated(write_support.read(RECORD))):
        print(line)
    sys.exit(status)


def run(name: str, fraction: tuple[int, int], options: list[str], folder: Path | None) -> int:
    """Run the tests of a part, those that need a GPU for themselves one after the other; return pytest's status.

    Args:
        fraction: K and N, to run every N-th test from the K-th, counted from 1.
        options: More options of pytest.
        folder: Folder for what the tests report; None to report nothing.
    """
    chosen, paths = PARTS[name], [str(ROOT)]
    variables = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if folder is not None:
        paths.insert(0, str(ROOT / "tests" / "support" / "observed"))
        reports = {"DCPMLA_OBSERVATIONS": folder / "observed", "DCPMLA_OUTCOMES": folder / "outcomes.jsonl"}
        variables |= {variable: str(path) for variable, path in reports.items()}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", *chosen.options, "--part", "{}/{}".format(*fraction)]
    num_workers = chosen.num_workers()
    workers = [] if num_workers == 1 else ["--numprocesses", str(num_workers), "--dist"]
    if name in _GPU_PARTS:  # One test at a time goes to each worker, the slow ones first.
        runs = [[*workers, "load", "--maxschedchunk", "1", "-m", f"{name} and not alone"], ["-m", f"{name} and alone"]]
    else:
        runs = [[*workers, "worksteal"] if workers else []]
    statuses = [subprocess.run([*command, *each, *options], cwd=ROOT, env=variables).returncode for each in runs]
    return next((status for status in statuses if status not in (0, _NO_TESTS)), min(statuses))


def read_run(folder: Path, seconds: float) -> dict[str, Any]:
    """Return what the tests of a run have reported: counts, names, seconds and features. "names" are those of the tests
    that passed, which a record leaves out.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    path = folder / "outcomes.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        test = outcomes.setdefault(line["test"], {"outcome": "", "seconds": 0.0, "reason": ""})
        test["seconds"] += line["seconds"]
        if line["outcome"] != "passed" and test["outcome"] != "failed":
            test |= {"outcome": line["outcome"], "reason": line["reason"]}
        elif line["when"] == "teardown":
            test["outcome"] = test["outcome"] or "passed"
    passed = {name for name, test in outcomes.items() if test["outcome"] == "passed"}
    slow = {name: round(test["seconds"], 1) for name, test in outcomes.items() if test["seconds"] > _SLOW_SECONDS}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **_machine(),
        "seconds": round(seconds, 1),
        "passed": len(passed),
        "names": sorted(passed),
        "failed": sorted(name for name, test in outcomes.items() if test["outcome"] == "failed"),
        "skipped": dict(Counter(test["reason"] for test in outcomes.values() if test["outcome"] == "skipped")),
        "slow": dict(sorted(slow.items(), key=lambda each: -each[1])),
        "features": collect(folder / "observed", passed),
    }


def add(record: dict[str, Any], name: str, fraction: tuple[int, int], found: dict[str, Any]) -> dict[str, Any]:
    """Return a record with a run of a part in it, added to the other fractions of the same sources."""
    number, total = fraction
    before, found = record["parts"].get(name, {}), {key: value for key, value in found.items() if key != "names"}
    is_continued = before.get("sources") == found["sources"] and before.get("fractions", [1, 1])[1] == total
    done = [*before["fractions"][0], number] if total > 1 and is_continued else [number]
    if total > 1 and is_continued and number not in before["fractions"][0]:
        found = found | {
            "seconds": before["seconds"] + found["seconds"],
            "passed": before["passed"] + found["passed"],
            "failed": sorted(before["failed"] + found["failed"]),
            "skipped": dict(Counter(before["skipped"]) + Counter(found["skipped"])),
            "slow": before["slow"] | found["slow"],
            "features": _join(before["features"], found["features"]),
        }
    found["fractions"] = [sorted(set(done)), total]
    return {"parts": record["parts"] | {name: found}}


def failed_before(record: dict[str, Any], name: str, sources: str) -> list[str]:
    """Return the tests that failed in the recorded run of a part.

    Raises:
        ValueError: None failed, or other sources ran.
    """
    part = record["parts"].get(name, {})
    if part.get("sources") != sources or not part["failed"]:
        raise ValueError(f"--again {name}: no test failed in a recorded run of these sources; run the part")
    return sorted(set(part["failed"]))


def add_again(record: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which tests that failed count as passed if they have passed now; "again" names them all.

    A test that was skipped or did not end has still failed, and so has a file without a test that passed.
    """
    before, names = record["parts"][name], found["names"]
    passed = {each for each in before["failed"] if any(f"{test}::".startswith(f"{each}::") for test in names)}
    part = before | {
        "seconds": before["seconds"] + found["seconds"],
        "passed": before["passed"] + found["passed"],
        "failed": sorted(({*before["failed"]} - passed) | {*found["failed"]}),
        "again": sorted({*before.get("again", []), *before["failed"]}),
        "slow": before["slow"] | found["slow"],
        "features": _join(before["features"], found["features"]),
    }
    return {"parts": record["parts"] | {name: part}}


def _join(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts joined; lists are appended, numbers added, but of ranks the largest number is taken."""
    joined = dict(one)
    for key, value in other.items():
        if key not in joined:
            joined[key] = value
        elif isinstance(value, dict):
            joined[key] = _join(joined[key], value)
        else:
            joined[key] = max(joined[key], value) if key == "ranks" else joined[key] + value
    return joined


def hash_sources() -> str:
    """Return the hash of the sources of what runs on GPUs."""
    paths = sorted({path for pattern in GPU_SOURCES for path in ROOT.glob(pattern)})
    return sha256(b"".join(str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in paths)).hexdigest()


def outdated(record: dict[str, Any]) -> str:
    """Return a line on the parts of GPUs that have not run whole with today's sources; "" if there are none."""
    now = hash_sources()

    def is_whole(name: str) -> bool:
        part = record["parts"].get(name)
        return part is not None and part["sources"] == now and len(part["fractions"][0]) == part["fractions"][1]

    names = ", ".join(name for name in ("gpu", "gpu_2", "gpu_4") if not is_whole(name))
    return (
        f"{RECORD.name}: today's sources have not run on GPUs ({names}); launch/test_gpu.sh --record" if names else ""
    )


def _machine() -> dict[str, Any]:
    """Return the names of the GPUs and the versions that results depend on."""
    import torch

    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    python = ".".join(map(str, sys.version_info[:3]))
    engines = {name: installed(name) for name in ("vllm", "sglang", "nixl-cu12", "nixl-cu13") if installed(name)}
    return {"cards": cards, "versions": {"python": python, **versions(), **engines}}


def _head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _fraction(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, total = (int(each) for each in found.groups()) if found else (0, 0)
    if not 1 <= number <= total:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return number, total


if __name__ == "__main__":
    main()
