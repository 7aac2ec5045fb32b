"""The encodings of DeepSeek V3.2, V4, V4.1 and Kimi-K3 next to the published encoders.

The digests belong to the texts that the published encoders write for these conversations: encoding_dsv32.py (with the
description of tools in its published example), encoding_dsv4.py, and encoding_k3.py without its splits into tokens. The
texts of V4.1 follow its published specification; its two published examples were compared once and are not repeated
here.
"""

import hashlib
import json
from typing import Any

import pytest

from dcpmla.serving.chat.encodings import find_encoding
from tests.serving.chat.answers import cut, parser_of, stream

Message = dict[str, Any]


def tool(name: str, **properties: Any) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Uses {name}.", "parameters": parameters}}


def called(number: int, name: str, **arguments: Any) -> Message:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def said(role: str, text: str | None, reasoning: str = "", calls: list[Message] | None = None) -> Message:
    message: Message = {"role": role, "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


TOOLS = [
    tool("read_file", path={"type": "string"}, lines={"type": "array", "items": {"type": "integer"}}),
    tool("list_files"),
]
SYSTEM = said("system", "You fix code.")
_CALLS = [
    called(1, "read_file", path='a "b"/é.py', lines=[1, 20]),
    called(2, "list_files"),
    called(3, "read_file", path="</think>", deep={"a": [None, True, 1.5, "🙂"]}),
]
CONVERSATIONS = {
    "question": [said("user", "Why?")],
    "system": [SYSTEM, said("user", "Why?")],
    "turns": [
        SYSTEM,
        said("user", "Why?"),
        said("assistant", "So.", "I think so."),
        said("user", "Really?"),
        said("assistant", "Yes.", "Again."),
        said("user", "Thanks\n\n"),
    ],
    "answered": [said("user", "Why?"), said("assistant", "So.", "I think so.")],
    "developer": [said("user", "Why?"), said("assistant", "So.", "Hm."), said("developer", "Be long.")],
    "calls": [
        SYSTEM,
        said("user", "Fix it."),
        said("assistant", "I look.", "Two files.", _CALLS[:2]),
        result(1, "x = 1"),
        result(2, "a.py\nb.py"),
        said("assistant", None, "One more.", _CALLS[2:]),
        result(3, '{"ok": true}'),
    ],
    "after calls": [
        said("user", "Fix it."),
        said("assistant", "", "Two files.", _CALLS[:1]),
        result(1, "x = 1"),
        said("assistant", "Done.", "It is fixed."),
        said("user", "And now?"),
        said("assistant", None, "One more.", _CALLS[1:2]),
        result(2, ""),
    ],
}
NAMES = ("deepseek_v32", "deepseek_v4", "deepseek_v41")
ALL_NAMES = (*NAMES, "kimi_k3")
PUBLISHED = {  # (encoding, conversation): without tools, and with them, each without and with reasoning
    ("deepseek_v32", "question"): "9a5c60724e94ebac 44af1e73cdfeaac0 c133557391f69b4c 1fd9ba881a1ba7ba",
    ("deepseek_v32", "system"): "c87f03d1f8b26972 7c0e690b628c64f8 c01b4f12336f19b4 1659331e4c3b2d7a",
    ("deepseek_v32", "turns"): "57fd337941ff5a5a b80c0ac6815198c1 2f8b5635a06e5a2a 80cad0b3aa1a5946",
    ("deepseek_v32", "answered"): "54531aa832146c4c e00c9f96f4fd3f1d c40fc669cd44fd97 905097cf946c8558",
    ("deepseek_v32", "developer"): "dbb4cfa6a2757bd0 5610a34724514271 0e5769a7db7d9ef8 dff9ad951bc53f94",
    ("deepseek_v32", "calls"): "c349db9708b84883 4645427762a63060 8de22017c382c7af 14c0e32d8631c604",
    ("deepseek_v32", "after calls"): "7220e88881da4b74 36e1fb36b34655e2 82bc584b023f8e67 d4059440ddf42867",
    ("deepseek_v4", "question"): "9a5c60724e94ebac 44af1e73cdfeaac0 3fd0874bc6fb3cfe aad25ff19a1ae0b3",
    ("deepseek_v4", "system"): "c87f03d1f8b26972 7c0e690b628c64f8 3dad5f8982793a24 2aeedae2ad55a4c1",
    ("deepseek_v4", "turns"): "57fd337941ff5a5a b80c0ac6815198c1 b4b2e65793f61a7f 780c2108d32615b8",
    ("deepseek_v4", "answered"): "54531aa832146c4c e00c9f96f4fd3f1d 79ee79937368ce6c 67092246e8eba30d",
    ("deepseek_v4", "developer"): "f800a6906913479e d9885c55ba68e2fa 9c7bf0a16928340b 0b134d185bd126cc",
    ("deepseek_v4", "calls"): "1c3745cc346b2773 f6ea68b53e54f7c5 94388d60294e971f f9ff1cc8ca6f4f05",
    ("deepseek_v4", "after calls"): "c3dd8212d2f7a3f5 5bfd2ed2419666cc 4f21cc0fde0b4eb0 2ddb3535b7fea09b",
    ("kimi_k3", "question"): "e4dfefd275ebb0a2 1e0fa1c82ff8a7cd bfbf22de3adece40 7f71fba572c5924b",
    ("kimi_k3", "system"): "6a0b369e989caef5 3754f7e89632b788 22144bbfe9410a79 ec4bb6d8db6bf63a",
    ("kimi_k3", "turns"): "fd470358cb0f20c2 4556dfa250c9a7dc c24bd9e77f89bd85 a833e45691f74493",
    ("kimi_k3", "answered"): "64e00c6f4d7b3caa 7d939892a8a8629f e783f1add5aa908c a527b01c1ebe7d20",
    ("kimi_k3", "calls"): "810276d19f6b708c 26f184f597f307c6 13912a3c7370f73f 37a651074e439ac3",
    ("kimi_k3", "after calls"): "ebd8f609a2655b09 26ac4282ae4f0bd8 b80d29fbc0c8f2ad ffaf1b02df601f7b",
}
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def render(name: str, messages: list[Message], tools: list[Message] | None = None, **options: Any) -> str:
    encoding = find_encoding(name)
    assert encoding is not None
    defaults = {"thinking": False, "reasoning_effort": None, "add_generation_prompt": True}
    return encoding.render(messages, tools, **{**defaults, "continue_final_message": False, **options})


@pytest.mark.parametrize(("name", "conversation"), list(PUBLISHED))
def test_the_text_is_the_published_encoder_s(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    is_open = messages[-1]["role"] != "assistant"
    shown = [
        render(name, messages, tools, thinking=thinking, add_generation_prompt=is_open)
        for tools in (None, TOOLS)
        for thinking in (False, True)
    ]
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in shown]
    assert digests == PUBLISHED[name, conversation].split()


def test_v41_marks_systems_and_names_a_budget() -> None:
    effort = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    question = CONVERSATIONS["question"]
    asked = "<｜User｜>Why?<｜Assistant｜>"
    assert render("deepseek_v41", question) == f"{BOS}{asked}</think>"
    for level, budget in ((None, 50), ("low", 25), ("xhigh", 75), ("max", 100), ("42", 42)):
        text = render("deepseek_v41", question, thinking=True, reasoning_effort=level)
        assert text == f"{BOS}<｜System｜>{effort.format(budget)}{asked}<think>"
    assert render("deepseek_v41", CONVERSATIONS["system"]) == f"{BOS}<｜System｜>You fix code.{asked}</think>"
    later = render("deepseek_v41", [*question, SYSTEM])
    assert later == f"{BOS}<｜User｜>Why?<｜System｜>You fix code.<｜Assistant｜></think>"


def test_v41_writes_calls_with_spaces() -> None:
    text = render("deepseek_v41", CONVERSATIONS["calls"], TOOLS, thinking=True)
    assert (
        "<｜Assistant｜><think>Two files.</think>I look.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="read_file">\n'
        '<｜DSML｜ parameter name="path" string="true">a "b"/é.py</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="lines" string="false">[1, 20]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        '<｜DSML｜ invoke name="list_files">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>' + EOS
    ) in text
    assert (
        "<｜User｜><tool_result>x = 1</tool_result>\n\n<tool_result>a.py\nb.py</tool_result><｜Assistant｜><think>"
        in text
    )
    described = render("deepseek_v41", CONVERSATIONS["system"], TOOLS)
    of_v4 = render("deepseek_v4", CONVERSATIONS["system"], TOOLS)
    for word in ("invoke", "parameter", "tool_calls"):
        of_v4 = of_v4.replace(f"｜DSML｜{word}", f"｜DSML｜ {word.removeprefix('tool_')}")
    assert described == of_v4.replace(BOS, f"{BOS}<｜System｜>")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_an_answer_is_parsed_back(name: str) -> None:
    """What the encoding writes for the assistant is what the format of the same name reads."""
    answers = [number for number, message in enumerate(CONVERSATIONS["calls"]) if message["role"] == "assistant"]
    for number in answers:
        message = CONVERSATIONS["calls"][number]
        before = render(name, CONVERSATIONS["calls"][:number], TOOLS, thinking=True)
        whole = render(name, CONVERSATIONS["calls"][: number + 1], TOOLS, thinking=True, continue_final_message=True)
        assert whole.startswith(before)
        shown = stream(parser_of(name, TOOLS, in_reasoning=True), cut(whole.removeprefix(before), [3]))
        assert shown[:2] == (message["reasoning_content"], message["content"] or "")
        calls = [call["function"] for call in message["tool_calls"]]
        assert [{key: call[key] for key in ("arguments", "name")} for call in shown[2]] == calls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_last_message_goes_on(name: str, thinking: bool) -> None:
    question = CONVERSATIONS["question"]
    opened = render(name, question, thinking=thinking)
    options = {"thinking": thinking, "continue_final_message": True}
    assert render(name, [*question, said("assistant", "So")], **options) == opened + (
        "</think>So" if thinking else "So"
    )
    reasoned = render(name, [*question, said("assistant", None, "I th")], **options)
    assert reasoned == opened + ("I th" if thinking else "")
    both = render(name, [*question, said("assistant", "So", "I th")], **options)
    assert both == opened + ("I th</think>So" if thinking else "So")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("conversation", list(CONVERSATIONS))
@pytest.mark.parametrize("thinking", [False, True])
def test_the_generation_prompt_opens_an_answer(name: str, conversation: str, thinking: bool) -> None:
    messages = CONVERSATIONS[conversation]
    closed = render(name, messages, thinking=thinking, add_generation_prompt=False)
    opened = render(name, messages, thinking=thinking)
    mark = "<think>" if thinking else "</think>"
    is_result = name == "deepseek_v32" and messages[-1]["role"] == "tool"
    assert opened == closed + ("" if is_result else "<｜Assistant｜>") + mark


@pytest.mark.parametrize("name", ALL_NAMES)
def test_developers_are_systems_at_the_start_and_kept_later(name: str) -> None:
    """The published encoders drop a later one or fail; clients give instructions there."""
    turns = CONVERSATIONS["turns"]
    assert render(name, [said("developer", "You fix code."), *turns[1:]], TOOLS) == render(name, turns, TOOLS)
    messages = [*CONVERSATIONS["developer"], said("assistant", "Long."), said("user", "Thanks")]
    assert "Be long." in render(name, messages, thinking=True)


LATER = [SYSTEM, said("user", "task"), said("system", "AGENTS")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        LATER,
        LATER[1:],
        [*LATER, said("assistant", "So."), said("user", "Why?"), said("system", "AGENTS")],
        [*LATER, said("user", "now")],
        [said("user", "a"), said("user", "b"), said("system", "AGENTS"), said("assistant", "So."), said("user", "c")],
    ],
)
def test_an_answer_is_opened_where_one_follows(name: str, thinking: bool, messages: list[Message]) -> None:
    """Claude Code writes instructions as a system's message after the user's."""
    text = render(name, messages, thinking=thinking)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    assert text.count("<｜Assistant｜>") == num_answers + 1
    for before in text.split("AGENTS")[:-1]:
        said_by = max(("<｜User｜>", "<｜Assistant｜>", "<｜System｜>"), key=before.rfind)
        assert said_by != "<｜Assistant｜>"
        assert before[before.rfind(said_by) :].removeprefix(said_by).strip() in ("", "# The user's message is:")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_system_s_message_after_results(name: str, thinking: bool) -> None:
    messages = [*CONVERSATIONS["calls"][:5], said("system", "AGENTS")]
    marks = render(name, messages, TOOLS, thinking=thinking).split("AGENTS")[0].split("b.py</")[1]
    assert "<｜User｜>" in marks or "<｜System｜>" in marks
    assert "think>" not in marks


@pytest.mark.parametrize("name", NAMES)
def test_contents_are_texts_or_parts(name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<｜User｜>a\n\nb<" in render(name, [{"role": "user", "content": parts}])
    assert "<｜User｜><" in render(name, [{"role": "user"}])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", ["{cut", "[1]", {"arguments": "{cut"}, None, ""])
def test_calls_of_the_history_may_be_broken(name: str, arguments: Any) -> None:
    call = {"id": "call_1", "function": {"name": "list_files", "arguments": arguments}}
    messages = [said("user", "Go."), said("assistant", None, "", [call]), result(1, "x")]
    text = render(name, messages)
    assert ('name="arguments" string="true">' in text) == bool(arguments)


def test_v4_sorts_results_by_their_calls() -> None:
    calls = [called(1, "list_files"), called(2, "list_files")]
    messages = [
        said("user", "Go."),
        said("assistant", None, "", calls),
        result(2, "b"),
        said("user", "c"),
        result(1, "a"),
    ]
    text = render("deepseek_v4", messages)
    assert "<｜User｜><tool_result>a</tool_result>\n\nc\n\n<tool_result>b</tool_result><｜Assistant｜>" in text


def test_efforts_of_v4() -> None:
    question, published = CONVERSATIONS["question"], "REASONING_EFFORT_MAX = 'Reasoning Effort: Beyond maximum'"
    first, second = find_encoding("deepseek_v4"), find_encoding("deepseek_v4", published)
    assert first is not None
    assert second is not None
    options = {"thinking": True, "add_generation_prompt": True, "continue_final_message": False}
    starts = {"": "<｜User｜>", "high": "Reasoning Effort: Absolute", "max": "Reasoning Effort: Beyond"}
    expected = {None: ("", "high"), "low": ("", ""), "high": ("", "high"), "max": ("high", "max")}
    for level, (of_first, of_second) in expected.items():
        assert first.render(question, None, reasoning_effort=level, **options).startswith(BOS + starts[of_first])
        assert second.render(question, None, reasoning_effort=level, **options).startswith(BOS + starts[of_second])
    assert render("deepseek_v4", question, reasoning_effort="max").startswith(BOS + starts[""])  # without reasoning


GO = said("user", "Go.")
TWO_CALLS = [GO, said("assistant", None, "", [called(1, "list_files"), called(2, "list_files")])]
NO_OBJECT = {"id": "x", "function": {"name": "a", "arguments": "[1]"}}
REFUSED: list[tuple[str, list[Message], dict[str, Any], str]] = [
    *((name, [GO, said("critic", "x")], {}, "role 'critic' of message 1") for name in ALL_NAMES),
    *((name, [GO], {"continue_final_message": True}, "continue_final_message") for name in ALL_NAMES),
    *(
        (name, [GO], {"reasoning_effort": "huge"}, "reasoning_effort: 'huge' is not in minimal, low")
        for name in ALL_NAMES[1:]
    ),
    ("deepseek_v32", [*TWO_CALLS, result(1, "x")], {}, "2 calls before message 2"),
    ("deepseek_v32", [*TWO_CALLS, *(result(number, "x") for number in (1, 2, 3))], {}, "2 calls before message 2"),
    ("deepseek_v32", [result(1, "x")], {}, "0 calls before message 0"),
    ("kimi_k3", [GO, result(1, "x")], {}, "result 1 has no call 'call_1'"),
    ("kimi_k3", [GO, said("assistant", "", "", [NO_OBJECT])], {}, r"arguments '\[1\]' are no JSON object"),
]


@pytest.mark.parametrize(("name", "messages", "options", "words"), REFUSED)
def test_what_cannot_be_written_is_named(
    name: str, messages: list[Message], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        render(name, messages, **options)


def test_models_with_a_template_have_no_encoding() -> None:
    assert find_encoding("deepseek_v3") is None
    assert find_encoding("deepseek_v41_text") is find_encoding("deepseek_v41")
    assert find_encoding("kimi_linear") is None
    assert find_encoding("kimi_linear", 'OPEN_TOKEN = "<|open|>"') is find_encoding("kimi_k3")


def test_kimi_k3_has_elements() -> None:
    def message(attributes: str, text: str) -> str:
        return f"<|open|>message {attributes}<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>"

    call = {"id": "x", "function": {"name": "list_files", "arguments": '{"a\\"&": "<b>", "n": null, "o": {"z": [1]}}'}}
    asked = {**said("user", "Go."), "name": "Ada"}
    messages = [asked, said("assistant", "Sure.", "Hm.", [call]), {**result(1, "ok"), "tool_call_id": "x"}]
    assert render("kimi_k3", messages) == (
        message('role="user" name="Ada"', "Go.")
        + message(
            'role="assistant"',
            "<|open|>response<|sep|>Sure.<|close|>response<|sep|><|open|>tools<|sep|>"
            '<|open|>call tool="list_files" index="1"<|sep|>'
            '<|open|>argument key="a&quot;&amp;" type="string"<|sep|><b><|close|>argument<|sep|>'
            '<|open|>argument key="n" type="null"<|sep|>null<|close|>argument<|sep|>'
            '<|open|>argument key="o" type="object"<|sep|>{"z": [1]}<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|>",
        )
        + message('role="tool" tool="list_files" index="1"', "ok")
        + '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    for level, effort in ((None, "max"), ("minimal", "low"), ("medium", "high"), ("xhigh", "max")):
        text = render("kimi_k3", messages, thinking=True, reasoning_effort=level)
        assert f"`thinking_effort={effort}`" in text
        assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')


@pytest.mark.parametrize(
    ("message", "thinking", "end"),
    [
        (said("assistant", "So"), False, "<|open|>response<|sep|>So"),
        (said("assistant", "So", "Hm."), True, "Hm.<|close|>think<|sep|><|open|>response<|sep|>So"),
        (said("assistant", None, "Hm"), True, "<|open|>think<|sep|>Hm"),
        (said("assistant", None, "Hm"), False, "<|open|>response<|sep|>"),
        (said("assistant", "", "", [called(1, "list_files")]), False, "<|close|>call<|sep|><|close|>tools<|sep|>"),
    ],
)
def test_the_last_message_of_kimi_k3_goes_on(message: Message, thinking: bool, end: str) -> None:
    text = render("kimi_k3", [said("user", "Go."), message], thinking=thinking, continue_final_message=True)
    assert text.endswith(end)
