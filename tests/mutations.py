"""Mutations: faults put into a copy of the package one at a time, and the tests that must find each.

    python tests/mutations.py                        all of them, about an hour on two cores
    python tests/mutations.py --group router -j 2    those of a group, two at a time
    python tests/mutations.py --only NAME --json out.json
    python tests/mutations.py --check                whether each text to replace still occurs once; a second

`mutations.toml` lists them: a table for each group, with the file, the text to replace, which occurs once in it, the
text that takes its place, and the quickest tests that fail then. A mutation is killed if one of them fails with it and
passes without it; a survivor is a fault that the tests would let through. The checkout itself is never changed.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
_LIMIT = 300.0  # seconds of a mutation's tests: faults may let them wait forever
_TESTS_FAILED = 1  # pytest's exit code
_KILLED = ("killed", "timed out")


@dataclass(frozen=True)
class Mutation:
    """A fault: text of a file that another text replaces, and the tests that must find it."""

    group: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: The text to replace does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """The end of a mutation's tests: killed, survived, timed out (which also counts as killed), or broken: they could
    not run, or the same test fails without the mutation.

    Attributes:
        test: The test that failed; None if none did.
        seconds: Wall time of the tests.
    """

    group: str
    name: str
    outcome: str
    test: str | None
    seconds: float


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """Return the mutations of a list."""
    groups = tomllib.loads(path.read_text())
    return [
        Mutation(group, **{**each, "tests": tuple(each["tests"])}) for group, table in groups.items() for each in table
    ]


def faults_of(mutations: Sequence[Mutation]) -> list[str]:
    """Return what is wrong with a list: names that occur twice, files and texts that are gone, missing tests."""
    counts = Counter(mutation.name for mutation in mutations)
    faults = [f"{name}: {count} mutations have this name" for name, count in counts.items() if count > 1]
    for mutation in mutations:
        try:
            compile(mutation.apply(ROOT), mutation.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            faults.append(f"{mutation.name}: {error}")
        for test in mutation.tests:
            file, *names = test.split("::")
            path = ROOT / file
            if not path.exists() or any(f"def {name}(" not in path.read_text() for name in names):
                faults.append(f"{mutation.name}: no test {test}")
    return faults


class _FirstFailure:
    """A plug-in of pytest that writes the name of a failed test into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failed phase of a test."""
        if report.failed:
            self._path.write_text(report.nodeid)


def _run_pytest(copy: Path, tests: Sequence[str], failure: Path) -> None:
    """Run tests of a copy in this process, which has imported other packages but not this one."""
    import pytest
    from hypothesis import Phase, settings

    os.setpgrp()  # ends with all processes that its tests have started
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # All runs in a copy share the compiled files.
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]  # ROOT may hold .venv
    settings.register_profile("unshrunk", phases=set(Phase) - {Phase.shrink, Phase.explain})  # A failure is enough.
    settings.load_profile("unshrunk")
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[_FirstFailure(failure)])
    sys.stdout.flush()
    os._exit(code)  # multiprocessing would first wait for children, of which an executor's wait for work


class Copy:
    """A copy of the checkout, in which one mutation at a time is tested.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._passes = path, dict[str, bool]()
        shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        # Processes start as forks of one that has imported torch and others, which takes longer than most tests.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "transformers", "pytest", "hypothesis", "numpy", "triton"])

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Put a fault into the copy while the context lasts."""
        path = self.path / mutation.file
        text = path.read_text()
        try:
            _write(path, mutation.apply(self.path))
            yield
        finally:
            _write(path, text)

    def run(self, tests: Sequence[str]) -> tuple[int | None, str | None]:
        """Run tests up to the first failure; return pytest's exit code, None if they took too long, and that test."""
        failure = self.path / "failure.txt"
        failure.unlink(missing_ok=True)
        process = self._context.Process(target=_run_pytest, args=(self.path, tests, failure))
        process.start()
        process.join(_LIMIT)
        code = process.exitcode
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return code, failure.read_text() if failure.exists() else None

    def result(self, mutation: Mutation) -> Result:
        """Return whether a mutation's tests find it."""
        start = time.monotonic()
        with self.mutated(mutation):
            code, test = self.run(mutation.tests)
        outcome = {0: "survived", _TESTS_FAILED: "killed", None: "timed out"}.get(code, "broken")
        if test is not None and not self.passes(test):
            outcome = "broken"
        return Result(mutation.group, mutation.name, outcome, test, round(time.monotonic() - start, 1))

    def passes(self, test: str) -> bool:
        """Return whether a test passes without a mutation. Each is run once."""
        if test not in self._passes:
            self._passes[test] = self.run([test])[0] == 0
        return self._passes[test]


def _write(path: Path, text: str) -> None:
    """Write a source, and drop its compiled form, whose date may be the same."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_all(mutations: Sequence[Mutation], num_jobs: int) -> Iterator[Result]:
    """Yield the result of each mutation, in order. Several are tested at a time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copies: SimpleQueue[Copy] = SimpleQueue()
        for index in range(num_jobs):
            copies.put(Copy(folder / str(index)))

        def test(mutation: Mutation) -> Result:
            copy = copies.get()
            try:
                return copy.result(mutation)
            finally:
                copies.put(copy)

        yield from stack.enter_context(ThreadPoolExecutor(num_jobs)).map(test, mutations)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if the list has faults, or if a mutation survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the list only")
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutation; may be given several times")
    parser.add_argument("--group", action="append", help="the mutations of a group; may be given several times")
    parser.add_argument("-j", type=int, default=1, metavar="N", dest="num_jobs", help="mutations at a time")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file of the results")
    options = parser.parse_args(argv)
    mutations = read_mutations()
    faults = faults_of(mutations)
    if faults or options.check:
        print("\n".join(faults) or f"{len(mutations)} mutations can be made")
        return bool(faults)
    chosen = [
        mutation
        for mutation in mutations
        if mutation.name in (options.only or [mutation.name]) and mutation.group in (options.group or [mutation.group])
    ]
    if not chosen:
        groups = dict.fromkeys(mutation.group for mutation in mutations)
        parser.error(f"no mutation of that name or group; groups are {', '.join(groups)}")
    results: list[Result] = []
    for result in run_all(chosen, options.num_jobs):
        words = f"{result.outcome:9} {result.seconds:5} s  {result.group}/{result.name}  {result.test or ''}"
        print(words, flush=True)
        results.append(result)
        if options.json:  # at once: a run takes long, and may be stopped
            options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    missed = [f"{each.outcome}: {each.group}/{each.name}" for each in results if each.outcome not in _KILLED]
    print("\n".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
