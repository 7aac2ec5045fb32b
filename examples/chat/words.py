"""The words of the chat model's conversations. One of them in five is held out: training never sees it."""

import random
from collections.abc import Callable

NAMES = """Ada Adam Alba Alma Amir Anna Anton Arlo Aron Asta Bela Bianca Boris Bruno Carla Celia Cem Chloe Clara Cyril
Dana Daria David Diego Dora Edgar Edith Elena Elias Elif Emil Emma Enzo Erik Esra Eva Fadi Farah Felix Fiona Flora Frida
Gia Gloria Greta Hana Hans Heidi Hugo Ida Igor Ines Ira Iris Ivan Jade Jakob Jana Jonas Jorge Julia Kai Karim Karla Kira
Lara Lars Lea Leila Lena Leo Lina Lola Luca Lucy Luis Maja Malik Marco Maria Marta Max Maya Mia Milan Mina Mona Nadia
Naomi Nico Nina Noah Nora Olga Oskar Otto Pablo Paula Pavel Petra Pia Rafael Ravi Rita Robin Rosa Ruben Ruth Sami Sara
Selma Silas Simon Sofia Sonja Stella Sven Tara Tessa Theo Tim Tom Uma Vera Victor Vito Wanda Yara Yusuf Zara Zoe""".split()
CITIES = """Accra Algiers Amsterdam Ankara Athens Baku Bamako Bangkok Basel Beirut Belgrade Bergen Berlin Bilbao Bogota
Bonn Boston Bremen Brno Bruges Brussels Budapest Cairo Calgary Cardiff Chicago Cologne Copenhagen Cork Dakar Dallas Delhi
Denver Doha Dresden Dublin Dundee Durban Essen Florence Geneva Genoa Ghent Graz Hamburg Hanoi Harare Havana Helsinki
Houston Istanbul Jakarta Kampala Kiel Krakow Kyiv Kyoto Lagos Leeds Leipzig Lille Lima Lisbon London Lucerne Luxor Lyon
Madrid Malaga Manila Marseille Medellin Melbourne Miami Milano Minsk Montreal Moscow Mumbai Munich Nairobi Nantes Naples
Odesa Osaka Oslo Ottawa Oxford Palermo Paris Perth Porto Prague Quito Rabat Riga Rome Rotterdam Salzburg Santiago Seoul
Seville Sofia Split Stockholm Sydney Tallinn Tampere Tbilisi Tirana Tokyo Toronto Trieste Tunis Turin Utrecht Valencia
Vancouver Venice Vienna Vilnius Warsaw York Zagreb Zurich""".split()
THINGS = """apples bread cheese chess coffee cookies dancing drums fishing flowers football grapes guitars hiking honey
jazz juice kites lemons maps milk movies mushrooms noodles novels nuts olives onions oranges painting pancakes peaches
pears pizza plums poems puzzles rain rice running salad sailing singing skiing snow soup stamps stories swimming tea
tomatoes trains trees walking water yoga""".split()
JOBS = """baker builder carpenter chemist cook dancer dentist doctor driver farmer gardener judge lawyer mechanic miner
nurse painter pilot plumber poet sailor singer smith tailor teacher waiter weaver writer""".split()
SKIES = "clouds drizzle fog hail mist rain showers sleet snow storms sun thunder wind".split()
KEYS = """age amount author brand code color count day file floor group hour id item key label level line month name
number page part path place price rank room score size speed street team title topic type unit user volume week width
year zone""".split()
VERBS = "buy check close count delete find get list load lock make move open order print read save send show start".split()
NOUNS = "account book box car chart data door email event image lamp log map menu note page plan record report task".split()

SYLLABLES = """a ba be bo bri da de di do dra e el fa fe fi flo ga ge go gre ha he hi i jo ka ki ko kri la le li lo lu ma me
mi mo na ne no o pa pe po pri ra re ri ro sa se si so sta ta te ti to tri u va ve vi wa we ya yo za zo""".split()
ENDS = ("", "", "", "ch", "d", "g", "k", "l", "m", "n", "nd", "r", "s", "st", "t", "x")


def _held_out(words: list[str], seed: int = 5) -> frozenset[str]:
    """Return a fifth of the words."""
    return frozenset(random.Random(seed).sample(sorted(words), len(words) // 5))


HELD_OUT = _held_out(NAMES) | _held_out(CITIES)


class Words:
    """Draws of words and numbers, from those of training or from those that are held out.

    Held out are a fifth of the names and cities above, numbers of three digits, sums, ranges to count and names of
    functions. Half of training's names and cities are made of syllables.

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
        return self._different(self.name, number)

    def city(self) -> str:
        return self._known_or_new(self._cities)

    def cities(self, number: int) -> list[str]:
        """Return different cities."""
        return self._different(self.city, number)

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

    def _different(self, draw: Callable[[], str], number: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < number:
            found[draw()] = None
        return list(found)

    def _known_or_new(self, known: list[str]) -> str:
        """Return a known word, or, in half of the draws of training, one that is made of syllables."""
        if self.held_out or self.rng.random() < 0.5:
            return self.rng.choice(known)
        syllables = self.rng.choices(SYLLABLES, k=self.rng.choice((2, 2, 3)))
        word = ("".join(syllables) + self.rng.choice(ENDS)).capitalize()
        return self._known_or_new(known) if word in HELD_OUT else word
