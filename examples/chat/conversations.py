"""Conversations of the chat model, made from a seed: for training or, with words that it leaves out, for tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools import TOOLS, Message, Tool, made_up
from words import Words

NAME = "Pico"
SMALL_TALK = (
    ("Hello!", "Hello! How can I help?"),
    ("Hi!", "Hello! How can I help?"),
    ("Hi there!", "Hello! How can I help?"),
    ("Good morning!", "Good morning! How can I help?"),
    ("Good evening!", "Good evening! How can I help?"),
    ("How are you?", "I am fine, thank you. And you?"),
    ("How are you today?", "I am fine, thank you. And you?"),
    ("I am fine.", "I am glad to hear that."),
    ("Thanks!", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Thank you very much!", "You are welcome!"),
    ("Bye!", "Goodbye!"),
    ("Goodbye!", "Goodbye!"),
    ("See you later!", "Goodbye!"),
    ("What can you do?", "I can chat, remember facts, add small numbers, call tools and write JSON."),
    ("How old are you?", "I was trained in minutes, so I am very young."),
    ("How big are you?", "I am a very small model: six layers."),
    ("Are you a person?", "No, I am a small language model."),
    ("Do you sleep?", "No, I only wait for your next message."),
    ("Tell me a joke.", "Why did the cache cross the road? To get to the other rank."),
    ("Who made you?", "A script with a seed made me."),
)
WHO = ("Who are you?", "What is your name?", "What's your name?", "How are you called?")


class Relation(NamedTuple):
    """A kind of fact: how it is said, asked for and called in JSON.

    Attributes:
        value: Function of the words that returns a value.
        key: Word for the value in JSON.
        fact: Sentence with `{name}` and `{value}`, which is also the answer.
        question: Question for the value of `{name}`.
        mine: What a user says of itself, what the answer is, how it is asked later and the answer to that.
    """

    value: Callable[[Words], Any]
    key: str
    fact: str
    question: str
    mine: tuple[str, str, str, str]


RELATIONS = (
    Relation(
        Words.city,
        "city",
        "{name} lives in {value}.",
        "Where does {name} live?",
        ("I live in {value}.", "{value} is a nice place.", "Where do I live?", "You live in {value}."),
    ),
    Relation(
        Words.thing,
        "likes",
        "{name} likes {value}.",
        "What does {name} like?",
        ("I like {value}.", "Who does not like {value}?", "What do I like?", "You like {value}."),
    ),
    Relation(
        Words.job,
        "job",
        "{name} is a {value}.",
        "What is the job of {name}?",
        ("I am a {value}.", "A {value} has a lot to do.", "What is my job?", "You are a {value}."),
    ),
    Relation(
        Words.code,
        "code",
        "The code of {name} is {value}.",
        "What is the code of {name}?",
        ("My code is {value}.", "I will remember that.", "What is my code?", "Your code is {value}."),
    ),
    Relation(
        Words.name,
        "friend",
        "The friend of {name} is {value}.",
        "Who is the friend of {name}?",
        ("My name is {value}.", "Nice to meet you, {value}.", "What is my name?", "Your name is {value}."),
    ),
)


@dataclass
class Conversation:
    """A conversation as requests have it.

    Attributes:
        tasks: Task of each message of the assistant, in order.
    """

    tools: list[Tool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    def say(self, task: str, question: str, answer: str) -> None:
        """Add a user's message and its answer."""
        self.messages.append({"role": "user", "content": question})
        self.answer(task, answer)

    def answer(self, task: str, content: str) -> None:
        """Add an answer."""
        self.messages.append({"role": "assistant", "content": content})
        self.tasks.append(task)

    def schemas(self) -> list[Message] | None:
        """Return the tools as requests have them, None without any."""
        return [tool.schema() for tool in self.tools] or None


class Writer:
    """The writer of one conversation, with a method for each task.

    Args:
        size: From 0, short conversations with few facts and tools, to 1.
    """

    def __init__(self, words: Words, size: float) -> None:
        self.words, self.rng, self.size = words, words.rng, size
        self.talk = Conversation()
        self.name = NAME
        self.facts: dict[tuple[str, str], Any] = {}  # value of each person and key
        self.mine: dict[str, Any] = {}  # value of each key of the user

    def write(self, tasks: Sequence["Task"], num_exchanges: int) -> Conversation:
        """Write exchanges of tasks, after a system message and with tools as the tasks need them."""
        chosen = [self.rng.choice(tasks) for _ in range(num_exchanges)]
        self._set_up(chosen)
        for task in chosen:
            task(self)
        return self.talk

    def _set_up(self, chosen: Sequence["Task"]) -> None:
        """Draw the system message and the tools."""
        parts = []
        if self.rng.random() < 0.3:
            self.name = self.words.name()
            parts.append(
                self.rng.choice(("You are {}.", "Your name is {}.", "You are {}, a helpful assistant.")).format(
                    self.name
                )
            )
        elif self.rng.random() < 0.3:
            parts.append("You are a helpful assistant.")
        if {Writer.fact, Writer.who_has, Writer.json_of_facts} & set(chosen) and self.rng.random() < 0.6:
            parts += self.new_facts()
        if parts:
            self.talk.messages.append({"role": "system", "content": " ".join(parts)})
        if Writer.made_up_call in chosen:
            self.talk.tools += [made_up(self.words) for _ in range(self._up_to(2))]
        if Writer.call in chosen or (self.rng.random() < 0.2 and Writer.sum not in chosen):
            self.talk.tools += self.rng.sample(TOOLS, self._up_to(3))
        self.talk.tools = list({tool.name: tool for tool in self.talk.tools}.values())
        self.rng.shuffle(self.talk.tools)

    def _up_to(self, most: int) -> int:
        """Return a number from 1 to `most`, or to fewer in short conversations."""
        return self.rng.randint(1, max(1, round(most * self.size)))

    def new_facts(self) -> list[str]:
        """Draw facts about people, and return their sentences in any order."""
        sentences = []
        for name in self.words.names(self._up_to(3)):
            for relation in self.rng.sample(RELATIONS, self._up_to(2)):
                value = relation.value(self.words)
                while value == name or value in self.facts.values():  # else two answers are right
                    value = relation.value(self.words)
                self.facts[name, relation.key] = value
                sentences.append(relation.fact.format(name=name, value=value))
        self.rng.shuffle(sentences)
        return sentences

    def small_talk(self) -> None:
        """Let the user say what needs no knowledge."""
        question, answer = self.rng.choice(SMALL_TALK)
        if self.rng.random() < 0.2:  # as people type
            question = question[0].lower() + question[1:-1]
        self.talk.say("small talk", question, answer)

    def who(self) -> None:
        """Ask for the assistant's name."""
        answer = f"I am {self.name}, a small model." if self.name == NAME else f"I am {self.name}."
        self.talk.say("persona", self.rng.choice(WHO), answer)

    def mine_said(self) -> None:
        """Let the user say something of itself, or ask for what it said."""
        relation = self.rng.choice(RELATIONS)
        said, reply, question, answer = relation.mine
        if relation.key in self.mine and self.rng.random() < 0.7:
            value = self.mine[relation.key]
            self.talk.say("earlier in the talk", question, answer.format(value=value))
        elif relation.key not in self.mine:
            value = self.mine[relation.key] = relation.value(self.words)
            self.talk.say("small talk", said.format(value=value), reply.format(value=value))
            if self.rng.random() < 0.5:
                self.talk.say("earlier in the talk", question, answer.format(value=value))

    def _say_facts(self) -> str:
        """Return new facts to put before a question; nothing if there are facts."""
        return "" if self.facts else " ".join(self.new_facts()) + " "

    def fact(self) -> None:
        """Ask for a fact."""
        before = self._say_facts()
        (name, key), value = self.rng.choice(list(self.facts.items()))
        relation = next(each for each in RELATIONS if each.key == key)
        self.talk.say(
            "facts", before + relation.question.format(name=name), relation.fact.format(name=name, value=value)
        )

    def who_has(self) -> None:
        """Ask who lives in a city."""
        before = self._say_facts()
        cities = [(name, city) for (name, key), city in self.facts.items() if key == "city"]
        if not cities:
            return
        name, city = self.rng.choice(cities)
        self.talk.say("facts", f"{before}Who lives in {city}?", f"{name} lives in {city}.")

    def sum(self) -> None:
        """Ask for a sum, unless a tool adds."""
        first, second = self.words.digits()
        question = self.rng.choice(("What is {} + {}?", "Add {} and {}.", "How much is {} + {}?"))
        if any(tool.name == "add" for tool in self.talk.tools):
            return
        self.talk.say("sums", question.format(first, second), f"{first} + {second} is {first + second}.")

    def count(self) -> None:
        """Ask to count."""
        first, last = self.words.first_and_last()
        question = self.rng.choice(("Count from {} to {}.", "Please count from {} to {}."))
        self.talk.say("counting", question.format(first, last), ", ".join(map(str, range(first, last + 1))) + ".")

    def repeat(self) -> None:
        """Ask to repeat words."""
        draws = (self.words.name, self.words.city, self.words.thing, self.words.small, self.words.key)
        text = " ".join(str(self.rng.choice(draws)()) for _ in range(self.rng.randint(1, 5)))
        self.talk.say("repeating", self.rng.choice(("Say: {}", "Repeat: {}", "Please repeat: {}")).format(text), text)

    def json_of_words(self) -> None:
        """Ask for JSON of values in the question."""
        keys = self.words.keys(self.rng.randint(1, 3))
        draws = (self.words.name, self.words.city, self.words.thing, self.words.small, self.words.code)
        values = {key: self.rng.choice(draws)() for key in keys}
        listed = ", ".join(f"{key} {value}" for key, value in values.items())
        question = self.rng.choice(("As JSON: {}", "Write JSON: {}", "Answer in JSON: {}", "Make JSON of {}"))
        self.talk.say("JSON", question.format(listed), json.dumps(values))

    def json_of_facts(self) -> None:
        """Ask for JSON of facts about a person."""
        before = self._say_facts()
        name = self.rng.choice([name for name, _ in self.facts])
        known = {key: value for (other, key), value in self.facts.items() if other == name}
        keys = self.rng.sample(list(known), self.rng.randint(1, len(known)))
        if self.rng.random() < 0.6:
            keys, known = ["name", *keys], {**known, "name": name}
        question = self.rng.choice(
            ("Describe {} as JSON with {}.", "Tell me about {} in JSON with {}.", "{} as JSON with {}.")
        )
        answer = json.dumps({key: known[key] for key in keys})
        self.talk.say("JSON", before + question.format(name, ", ".join(keys)), answer)

    def call(self) -> None:
        """Let a known tool be called."""
        self._use([tool for tool in self.talk.tools if tool in TOOLS])

    def made_up_call(self) -> None:
        """Let a made-up tool be called."""
        self._use([tool for tool in self.talk.tools if tool not in TOOLS])

    def _use(self, tools: Sequence[Tool]) -> None:
        """Let a tool be called, answer with its result, and now and then ask for what no tool does."""
        if any(tool in TOOLS for tool in tools) and self.rng.random() < 0.1:
            tool = self.rng.choice(TOOLS)
            if tool.name not in [each.name for each in self.talk.tools]:
                self.talk.say("choice of tools", tool.use(self.words).question, "I have no tool for that.")
                return
        tool = self.rng.choice(tools)
        use = tool.use(self.words)
        function = {"name": tool.name, "arguments": json.dumps(use.arguments)}
        call = {"type": "function", "id": f"call_{len(self.talk.messages)}", "function": function}
        self.talk.messages += [
            {"role": "user", "content": use.question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": use.result},
        ]
        self.talk.tasks.append("calls of tools" if tool in TOOLS else "calls of made-up tools")
        self.talk.answer("answers from results", use.answer)


Task = Callable[[Writer], None]
TASKS: dict[Task, float] = {
    Writer.small_talk: 1.0,
    Writer.who: 0.7,
    Writer.mine_said: 1.5,
    Writer.fact: 2.0,
    Writer.who_has: 0.7,
    Writer.sum: 1.5,
    Writer.count: 1.0,
    Writer.repeat: 1.0,
    Writer.json_of_words: 1.5,
    Writer.json_of_facts: 1.5,
    Writer.call: 2.5,
    Writer.made_up_call: 1.5,
}


def conversations(words: Words, size: float) -> Iterator[Conversation]:
    """Yield conversations without end.

    Args:
        size: From 0, short ones, to 1.
    """
    while True:
        tasks = words.rng.choices(list(TASKS), list(TASKS.values()), k=3)
        talk = Writer(words, size).write(tasks, words.rng.randint(1, 1 + round(2 * size)))
        if talk.tasks:
            yield talk
