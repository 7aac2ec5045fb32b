"""A covering array: families x features, so that few engines have met every pair of them."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, Self

import transformers

from tests.support.models import FAMILIES

PROPERTY = "row"  # of a test's report: the family and the levels of an engine that has run, joined by "|"
_NUM_TRIES = 60  # random rows of which the one with most new pairs is kept
_LAYOUTS = ("tp 1", "tp 2", "dcp 2 by token", "dcp 2 in groups")
# The first level of a factor is the one that all families have.
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": _LAYOUTS,
    "drafts": ("no drafts", "ngram", "mtp"),
    "steps": ("short steps", "long steps"),
    "reuse": ("prefix hits", "no reuse"),
    "tiers": ("no tiers", "host", "disk"),
    "room": ("ample", "preemption"),
    "cache": ("exact", "8 bits"),
    "order": ("any order", "deterministic"),
    "graphs": ("graphs", "eager"),
    "grammar": ("free", "grammar"),
    "choices": ("one choice", "two choices"),
}
ALL = (*FAMILIES, "deepseek_v41", *(["sarvam_mla"] if hasattr(transformers, "SarvamMLAConfig") else []))
WITH_MODULE = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash", "deepseek_v4", "hy_v4")
WITH_MODULE += ("bailing_hybrid", "glm5_next_text", "dots3_note_text")
# Options that a family refuses, with the words of the message.
INDEXED = r"deterministic \(--deterministic\) does not support an indexer or a window"
LINEAR = r"deterministic \(--deterministic\) does not support linear attention"
V4 = r"\) {}does not go with DeepSeek-V4's attention"
REFUSED = {
    **{(family, "deterministic"): INDEXED for family in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")},
    **{(family, "deterministic"): INDEXED for family in ("mistral_large4_text", "dots3_note_text")},
    **{(family, "deterministic"): LINEAR for family in ("kimi_linear", "kimi_k3", "bailing_hybrid", "glm5_next_text")},
    **{(family, "deterministic"): r"\(--deterministic" + V4.format("") for family in ("deepseek_v4", "deepseek_v41")},
    **{(family, "8 bits"): r"\(--kv-cache-dtype" + V4.format("fp8 ") for family in ("deepseek_v4", "deepseek_v41")},
}
LACKING = {
    family: {level for name, level in REFUSED if name == family} | (set() if family in WITH_MODULE else {"mtp"})
    for family in ALL
}
# Families with the same layer of attention, which reads owners of tokens from its step: each has DCP in one of both
# layouts, and all of them together have both with every other level.
PLAIN = ("deepseek_v2", "deepseek_v2_no_q_lora", "deepseek_v3", "deepseek_v3_neox", "youtu", "axk1", "minicpm3")
PLAIN += ("mistral4", "glm4_moe_lite", "sarvam_mla", "longcat_flash")
Pair = frozenset[str]


class Row(NamedTuple):
    """A family and the levels of its engine, in the order of `FACTORS`."""

    family: str
    levels: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the row of a line."""
        family, *levels = text.split("|")
        return cls(family, tuple(levels))

    @property
    def line(self) -> str:
        """Return the row as a line."""
        return "|".join((self.family, *self.levels))

    def has(self, level: str) -> bool:
        """Return whether the engine has a level."""
        return level in self.levels

    @property
    def num_ranks(self) -> int:
        """Return the size of the engine's TP group."""
        return 1 if self.has("tp 1") else 2

    @property
    def dcp_size(self) -> int:
        """Return the number of ranks that share a cache."""
        return 2 if self.has("dcp 2 by token") or self.has("dcp 2 in groups") else 1

    @property
    def pairs(self) -> set[Pair]:
        """Return all pairs of the family and the levels."""
        of_levels = set(map(frozenset, itertools.combinations(self.levels, 2)))
        return of_levels | {_pair_of(self.family, level) for level in self.levels}


def _pair_of(family: str, level: str) -> Pair:
    """Return the pair of a family and a level: for PLAIN ones both layouts of DCP are one level."""
    is_dcp = level.startswith("dcp 2") and family in PLAIN
    return Pair((family, "dcp 2" if is_dcp else level))


def is_allowed(row: Row) -> bool:
    """Return whether an engine can have these levels."""
    is_ruled_out = (
        (row.has("no reuse") and not row.has("no tiers"))  # Tiers keep blocks for later requests.
        or (row.has("long steps") and not row.has("no tiers"))  # So that loads take less time on all machines.
        or (row.has("deterministic") and row.has("dcp 2 by token"))  # Its interleave is 64.
        # Blocks have 64 or 128 tokens, so requests seldom ask for another one at the same time.
        or (row.has("deterministic") and row.has("preemption") and row.has("dcp 2 in groups"))
        or (row.has("deterministic") and row.has("preemption") and not row.has("no drafts"))
    )
    return not is_ruled_out and not LACKING[row.family] & set(row.levels)


def covering_array(seed: int = 0) -> list[Row]:
    """Return rows that have every allowed pair of a family and a level (PLAIN), and of levels of two factors.

    Rows are chosen greedily, the best of some random ones that contain a pair which no row has yet: of those with as
    many new pairs one on a single rank.
    """
    rng = random.Random(seed)
    missing = possible_pairs()
    rows: list[Row] = []
    while missing:
        wanted = frozenset(rng.choice(sorted(map(sorted, missing))))
        drawn = [_draw(rng, wanted) for _ in range(_NUM_TRIES)]
        best = max(drawn, key=lambda row: (len(row.pairs & missing), -row.num_ranks))
        rows.append(best)
        missing -= best.pairs
    return sorted(rows)


@cache
def possible_pairs() -> frozenset[Pair]:
    """Return the pairs that some allowed row has."""

    def exists(family: str, levels: Iterable[str]) -> bool:
        return is_allowed(_fill(family, levels, lambda all_levels: all_levels[0]))

    names = [(factor, level) for factor, levels in FACTORS.items() for level in levels]
    found = {_pair_of(family, level) for family in ALL for _, level in names if exists(family, (level,))}
    for (factor, one), (other, two) in itertools.combinations(names, 2):
        if factor != other and any(exists(family, (one, two)) for family in ALL):
            found.add(Pair((one, two)))
    return frozenset(found)


def _fill(family: str, wanted: Iterable[str], choose: Callable[[tuple[str, ...]], str]) -> Row:
    """Return a row with the wanted levels, and chosen ones of the other factors."""
    fixed = set(wanted)
    return Row(family, tuple(next(iter(fixed & set(levels)), None) or choose(levels) for levels in FACTORS.values()))


def _draw(rng: random.Random, wanted: Pair) -> Row:
    """Return a random allowed row with a pair."""
    families = [family for family in ALL if family in wanted] or ALL
    while True:
        row = _fill(rng.choice(families), wanted, rng.choice)
        if is_allowed(row):
            return row


def coverage(rows: Iterable[Row]) -> str:
    """Return words on the pairs that rows have, and on those that they lack."""
    possible, met = possible_pairs(), set[Pair]().union(*(row.pairs for row in rows))
    lacking = sorted(" + ".join(sorted(pair)) for pair in possible - met)
    words = f"{len(possible & met):,} of {len(possible):,} pairs of families and features have run"
    return f"{words}; not run: {', '.join(lacking)}" if lacking else words


def by_ranks(rows: Iterable[Row]) -> Iterator[tuple[str, int, list[Row]]]:
    """Yield each family and number of ranks, with its rows."""
    key: Callable[[Row], tuple[str, int]] = lambda row: (row.family, row.num_ranks)  # noqa: E731
    for (family, num_ranks), own in itertools.groupby(sorted(rows, key=key), key):
        yield family, num_ranks, list(own)
