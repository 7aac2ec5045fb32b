"""The package as its users get it: built as a wheel, complete, imported from an environment of its own; and the names
that it imports exist in the oldest versions that it declares.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("dcpmla", "pyproject.toml", "README.md", "LICENSE")
# Small and in Python alone: their files list their names. The oldest torch and triton are what GPUs are tested with.
READABLE = ("transformers", "huggingface-hub", "tqdm")
FAMILIES = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "LongcatFlash", "Mistral4")
IN_THE_NEW_ENVIRONMENT = """
import importlib.metadata, pathlib, sys
import dcpmla
assert pathlib.Path(dcpmla.__file__).is_relative_to(sys.prefix), dcpmla.__file__
assert dcpmla.__version__ == importlib.metadata.version("dcpmla")
for name in dcpmla.__all__:
    getattr(dcpmla, name)
(command,) = importlib.metadata.distribution("dcpmla").entry_points.select(group="console_scripts")
assert command.name == "dcpmla" and callable(command.load())
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        wheel = build(Path(directory))
        check_content(wheel)
        check_import(wheel, Path(directory) / "environment")
        check_oldest_versions(Path(directory) / "oldest")
    print(f"{wheel.name}: complete, importable, and its names are in the oldest versions of {', '.join(READABLE)}")


def build(directory: Path) -> Path:
    """Build a wheel from a copy of the sources: a build directory may hold files that are gone."""
    sources = directory / "sources"
    sources.mkdir()
    for name in SOURCES:
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, sources / name)
    pip("wheel", "--no-deps", "--wheel-dir", directory, sources)
    (wheel,) = directory.glob("*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """Check that every module is in the wheel, with the benchmarks' configs, the marker of types and the licence."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for kind in ("*.py", "*.json") for path in (ROOT / "dcpmla").rglob(kind)]
    wanted = {str(path.relative_to(ROOT)) for path in files} | {"dcpmla/py.typed"}
    assert wanted <= names, sorted(wanted - names)
    assert any(name.endswith("licenses/LICENSE") for name in names), sorted(names)


def check_import(wheel: Path, environment: Path) -> None:
    """Import the public names from the wheel; other packages come from where this runs."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip("--python", python, "install", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-c", IN_THE_NEW_ENVIRONMENT, cwd=environment)


def check_oldest_versions(directory: Path) -> None:
    """Check that what the package imports by name is in the oldest versions that it declares."""
    oldest = dict(lower_bounds())
    pip("download", "--no-deps", "--dest", directory, *(f"{name}=={oldest[name]}" for name in READABLE))
    files: dict[str, str] = {}
    for wheel in directory.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        files |= {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    packages = {name.replace("-", "_") for name in READABLE}
    wanted = {(module, name) for module, name in imported_names() if module.split(".")[0] in packages}
    wanted |= {("transformers", f"{family}{kind}") for family in FAMILIES for kind in ("Config", "ForCausalLM")}
    assert len(wanted) > 2 * len(FAMILIES) + 5, wanted
    missing = sorted(f"{module}.{name}" for module, name in wanted if not has_name(files, module, name))
    assert not missing, missing


def lower_bounds() -> Iterator[tuple[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["engine"]):
        if bound := re.match(r"([\w-]+)>=([\d.]+)", requirement):
            yield bound[1], bound[2]


def imported_names() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each `from module import name`, and of each `module.name`."""
    for path in (ROOT / "dcpmla").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield node.value.id, node.attr


def has_name(files: dict[str, str], module: str, name: str) -> bool:
    """Return whether a module's file has the name, or the package exports it lazily from a file that defines it."""
    path = module.replace(".", "/")
    texts = [files.get(f"{path}.py", ""), files.get(f"{path}/__init__.py", "")]
    if any(re.search(rf"\b{name}\b", text) for text in texts) or f"{path}/{name}/__init__.py" in files:
        return True
    defined = re.compile(rf"^(class|def) {name}\b|^{name} =", re.MULTILINE)
    return any(defined.search(text) for file, text in files.items() if file.startswith(f"{path}/"))


def pip(*arguments: object) -> None:
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: object, cwd: Path | None = None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), check=True, cwd=cwd, env=environment, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
