"""Names of fields that no table has: slips of the pen, and names that are ignored with one line in the log.

Sources of the names that change no answer: OpenAI's and Anthropic's API references; the protocols of vLLM's and
SGLang's servers; what Codex and Claude Code send. Without an answer to `safeguards` Claude Code runs no tool unasked.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

_HARMLESS = frozenset({
    "betas",
    "client_metadata",
    "inference_geo",
    "max_tool_calls",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "rid",
    "safeguards",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "user",
    "verbosity",
})  # fmt: skip
_MIN_LETTERS = 6  # shorter names differ by one letter from other servers' fields: top_a, models, inputs
_MAX_SHOWN = 8
_MAX_LETTERS = 64  # Longer names are not compared.
_logger = logging.getLogger(__name__)
_has_logged = False


def look_alike(name: str, known: frozenset[str]) -> str | None:
    """Return the known name from which a name differs in case, `_` or `-` alone, or in one letter if it is long."""
    if name in _HARMLESS or len(name) > _MAX_LETTERS:
        return None
    same, near = _index(known)
    letters = _letters(name)
    return same.get(letters) or next((near[cut] for cut in _cuts(letters) if cut in near), None)


def log_ignored(names: Sequence[str]) -> None:
    """Log the names of fields that a request has and this server ignores, unless the process has done so before."""
    global _has_logged
    names = [name for name in names if name not in _HARMLESS]
    if names and not _has_logged:
        _has_logged = True
        shown = ", ".join(f"{name[:_MAX_LETTERS]!r}" for name in names[:_MAX_SHOWN])
        more = f" and {len(names) - _MAX_SHOWN:,} more" if len(names) > _MAX_SHOWN else ""
        _logger.warning("fields that no API has are ignored: %s%s; later ones are not logged", shown, more)


@cache
def _index(known: frozenset[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the known names by their letters, and the long names by their letters with any one left out."""
    same = {_letters(name): name for name in sorted(known)}
    near = {cut: name for letters, name in same.items() if len(letters) >= _MIN_LETTERS for cut in _cuts(letters)}
    return same, near


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _cuts(letters: str) -> Iterator[str]:
    """Yield a word whole, and without each of its letters. Two words that share one of these are one edit apart, or one
    letter has moved.
    """
    yield letters
    yield from (letters[:index] + letters[index + 1 :] for index in range(len(letters)))
