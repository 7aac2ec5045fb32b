"""The words of the chat model's conversations. One of them in five is held out: training never sees it."""

import json
import random
from pathlib import Path

_LISTS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
NAMES, CITIES, THINGS, JOBS = (_LISTS[name] for name in ("names", "cities", "things", "jobs"))
SKIES, KEYS, VERBS, NOUNS = (_LISTS[name] for name in ("skies", "keys", "verbs", "nouns"))
ONSETS, VOWELS, CODAS = (_LISTS[name] for name in ("onsets", "vowels", "codas"))


def _held_out(words: list[str], seed: int = 5) -> frozenset[str]:
    """Return a fifth of the words."""
    return frozenset(random.Random(seed).sample(sorted(words), len(words) // 5))


HELD_OUT = _held_out(NAMES) | _held_out(CITIES)


class Words:
    """Draws of words and numbers, from those of training or from those that are held out.

    Held out are a fifth of the names and cities above, numbers of three digits, sums, ranges to count and names of
    functions. Most of training's names and cities are made of syllables.

    Args:
        rng: Source of the draws.
        held_out: Whether to draw what training leaves out.
    """

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng, self.held_out = rng, held_out
        self._names = [word for word in NAMES if (word in HELD_OUT) is held_out]
        self._cities = [word for word in CITIES if (word in HELD_OUT) is held_out]

    def name(self) -> str:
        return self._known_or_new(self._names)

    def names(self, number: int) -> list[str]:
        """Return different names."""
        found: dict[str, None] = {}
        while len(found) < number:
            found[self.name()] = None
        return list(found)

    def city(self) -> str:
        return self._known_or_new(self._cities)

    def thing(self) -> str:
        return self.rng.choice(THINGS)

    def job(self) -> str:
        return self.rng.choice(JOBS)

    def key(self) -> str:
        return self.rng.choice(KEYS)

    def keys(self, number: int) -> list[str]:
        """Return different keys of JSON objects."""
        return self.rng.sample(KEYS, number)

    def small(self) -> int:
        """Return a number from 0 to 99."""
        return self.rng.randrange(100)

    def code(self) -> int:
        """Return a number of three digits: one in nine is held out."""
        while True:
            number = self.rng.randrange(100, 1000)
            if (number % 9 == 4) is self.held_out:
                return number

    def digits(self) -> tuple[int, int]:
        """Return two numbers of one digit. Of the pairs (a, b) with a > b one in four is held out; (b, a) is not."""
        while True:
            first, second = self.rng.randrange(10), self.rng.randrange(10)
            if (first > second and (3 * first + second) % 4 == 1) is self.held_out:
                return first, second

    def first_and_last(self) -> tuple[int, int]:
        """Return the first and the last number to count. One pair in seven is held out."""
        while True:
            first, length = self.rng.randrange(15), self.rng.randint(2, 6)
            if ((2 * first + length) % 7 == 3) is self.held_out:
                return first, first + length - 1

    def function(self) -> str:
        """Return the name of a function that is no known tool's. One in five is held out."""
        while True:
            verb, noun = self.rng.randrange(len(VERBS)), self.rng.randrange(len(NOUNS))
            if ((verb + noun) % 5 == 2) is self.held_out:
                return f"{VERBS[verb]}_{NOUNS[noun]}"

    def _known_or_new(self, known: list[str]) -> str:
        """Return a known word, or, in most draws of training, one that is made of syllables."""
        if self.held_out or self.rng.random() < 0.4:
            return self.rng.choice(known)
        parts = [self.rng.choice(part) for _ in range(self.rng.choice((1, 2, 2))) for part in (ONSETS, VOWELS, CODAS)]
        word = "".join(parts).capitalize()
        return self._known_or_new(known) if word in HELD_OUT else word
