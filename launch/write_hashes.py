"""Write launch/hashes.txt: the releases that `pip install '.[serve]'` takes under launch/constraints.txt, with PyPI's
hashes of all their files.

torch and what it brings are left out, because builds of it come from several indexes.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / "launch" / "hashes.txt"
_PYPI = "https://pypi.org/simple/{}/"  # PEP 691
_JSON = "application/vnd.pypi.simple.v1+json"
_WITH_TORCH = re.compile(r"torch|triton|nvidia-(?!ml-py)|cuda-|dcpmla")
_HEAD = """\
# PyPI's hashes of the releases in constraints.txt and of what they need, written by launch/write_hashes.py. torch, from
# an index of your choice, and what it brings are left out. So install in three steps:
#   pip install torch==2.13.0
#   pip install --no-deps --require-hashes --requirement launch/hashes.txt
#   pip install --no-deps .
"""


def resolve() -> list[tuple[str, str]]:
    """Return name and version of each package that pip would install, by name."""
    options = ["--dry-run", "--ignore-installed", "--quiet", "--constraint", "launch/constraints.txt", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, ".[serve]"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    found = ((entry["metadata"]["name"], entry["metadata"]["version"]) for entry in report["install"])
    names = ((re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found)
    return sorted((name, version) for name, version in names if not _WITH_TORCH.match(name))


def hashes_of(name: str, version: str) -> list[str]:
    """Return the SHA-256 of each file of a release on PyPI.

    Raises:
        ValueError: PyPI has no such release.
    """
    request = urllib.request.Request(_PYPI.format(name), headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    found = sorted(file["hashes"]["sha256"] for file in files if _version_of(file["filename"]) == Version(version))
    if not found:
        raise ValueError(f"{name}=={version} is not on PyPI; change launch/constraints.txt")
    return found


def _version_of(filename: str) -> Version | None:
    parse = parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename
    try:
        return parse(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None  # an old kind of archive


def main() -> None:
    """Resolve, look the hashes up, write."""
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes_of(name, version))])
        for name, version in resolve()
    ]
    HASHES.write_text(_HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
