"""The tools of the chat model's conversations: questions, calls, results and answers."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from words import SKIES, Words

Message = dict[str, Any]


class Use(NamedTuple):
    """A use of a tool: a user's question, the call's arguments, its result and the answer."""

    question: str
    arguments: Mapping[str, Any]
    result: str
    answer: str


class Tool(NamedTuple):
    """A function with its description, its parameters' types in JSON, and draws of its uses."""

    name: str
    description: str
    parameters: Mapping[str, str]
    use: Callable[[Words], Use]

    def schema(self) -> Message:
        """Return the tool as requests have it."""
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _weather(words: Words) -> Use:
    city, sky, degrees = words.city(), words.rng.choice(SKIES), words.rng.randrange(40)
    question = words.rng.choice(
        ("What is the weather in {}?", "How is the weather in {}?", "What's the weather like in {}?", "Weather in {}?")
    )
    result = json.dumps({"sky": sky, "degrees": degrees})
    return Use(question.format(city), {"city": city}, result, f"It is {degrees} degrees in {city}, with {sky}.")


def _time(words: Words) -> Use:
    city, time = words.city(), f"{words.rng.randrange(10, 24)}:{words.rng.randrange(10, 60)}"
    question = words.rng.choice(("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?"))
    return Use(question.format(city), {"city": city}, json.dumps({"time": time}), f"It is {time} in {city}.")


def _add(words: Words) -> Use:
    first, second = (words.rng.choice((words.small, words.code))() for _ in range(2))
    question = words.rng.choice(("What is {} + {}?", "Add {} and {}.", "Please add {} and {}."))
    return Use(
        question.format(first, second),
        {"a": first, "b": second},
        str(first + second),
        f"{first} + {second} is {first + second}.",
    )


def _multiply(words: Words) -> Use:
    first, second = words.small(), words.small()
    question = words.rng.choice(("What is {} times {}?", "Multiply {} by {}.", "What is {} * {}?"))
    return Use(
        question.format(first, second),
        {"a": first, "b": second},
        str(first * second),
        f"{first} times {second} is {first * second}.",
    )


def _timer(words: Words) -> Use:
    minutes = words.small()
    question = words.rng.choice(("Set a timer for {} minutes.", "Please set a timer for {} minutes."))
    return Use(
        question.format(minutes),
        {"minutes": minutes},
        '{"status": "ok"}',
        f"The timer is set for {minutes} minutes.",
    )


def _message(words: Words) -> Use:
    name = words.name()
    text = words.rng.choice(("I like {}", "we have {}", "please bring {}", "there is {}")).format(words.thing())
    question = words.rng.choice(("Tell {}: {}", "Send {} a message: {}", "Write to {}: {}")).format(name, text)
    return Use(question, {"to": name, "text": text}, '{"status": "ok"}', f"The message to {name} is sent.")


def _phone(words: Words) -> Use:
    name, number = words.name(), words.code()
    question = words.rng.choice(("What is the number of {}?", "Find the number of {}.", "How do I call {}?"))
    return Use(
        question.format(name), {"name": name}, json.dumps({"number": number}), f"The number of {name} is {number}."
    )


def made_up(words: Words) -> Tool:
    """Return a tool with a name and parameters that no other tool has, whose question names them all."""
    name, keys = words.function(), words.keys(words.rng.choice((1, 2, 2)))
    values = [words.rng.choice((words.name, words.city, words.thing, words.small, words.code))() for _ in keys]
    arguments = dict(zip(keys, values, strict=True))

    def use(words: Words) -> Use:
        verb = words.rng.choice(("Use", "Call", "Please call"))
        question = f"{verb} {name} with {' and '.join(f'{key} {value}' for key, value in arguments.items())}."
        result = words.rng.choice((words.thing, words.small, words.name))()
        return Use(question, arguments, json.dumps({"result": result}), f"The result of {name} is {result}.")

    description = f"{name.replace('_', ' ').capitalize()}."
    kinds = {key: "string" if isinstance(value, str) else "integer" for key, value in arguments.items()}
    return Tool(name, description, kinds, use)


TOOLS = (
    Tool("get_weather", "Get the weather in a city.", {"city": "string"}, _weather),
    Tool("get_time", "Get the time in a city.", {"city": "string"}, _time),
    Tool("add", "Add two numbers.", {"a": "integer", "b": "integer"}, _add),
    Tool("multiply", "Multiply two numbers.", {"a": "integer", "b": "integer"}, _multiply),
    Tool("set_timer", "Set a timer.", {"minutes": "integer"}, _timer),
    Tool("send_message", "Send a message to a person.", {"to": "string", "text": "string"}, _message),
    Tool("find_phone", "Find the phone number of a person.", {"name": "string"}, _phone),
)
