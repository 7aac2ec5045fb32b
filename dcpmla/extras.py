"""The extras of this package, and the message for an import that needs one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

# Packages of each extra, by the names that imports use.
EXTRAS = {
    "engine": (
        *("transformers", "huggingface_hub", "safetensors", "tokenizers"),
        *("psutil", "tqdm", "pynvml"),
    ),
    "serve": (
        *("starlette", "uvicorn", "httptools", "uvloop", "h11"),
        *("httpx2", "pydantic", "prometheus_client", "jinja2", "msgspec"),
    ),
    "plot": ("matplotlib",),
    "structured": ("llguidance",),
    "disaggregation": ("nixl",),
    "events": ("zmq",),
}


class MissingExtraError(ImportError, ValueError):
    """An import that needs an extra, which is not installed: a user's mistake."""


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Run a block whose imports may need an extra.

    Args:
        user: The block's name in the message.
    Raises:
        MissingExtraError: An import finds no package of an extra, or an old one; the line has the command for pip.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        for extra, packages in EXTRAS.items():
            if package in packages:
                raise MissingExtraError(f"{user} needs the extra {extra}: {install(extra)} ({error})") from None
        raise


def install(extra: str) -> str:
    """Return the command that installs an extra.

    In a checkout it names the folder: pip knows no `dcpmla` there unless the package is installed, and no index has it.
    """
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{root}[{extra}]')}"
    return f"pip install 'dcpmla[{extra}]'"


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]
