"""Requests with grammars get texts of their grammars: the texts that a plain loop chooses."""

import itertools
import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.comm.select import select_exchange
from dcpmla.extras import install
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.ngram import NgramDrafter
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engine_loads import Load, loads
from tests.support.engines import new_engine
from tests.support.hash_model import HashDrafter, make_engine
from tests.support.late_memory import LateMemory
from tests.support.layouts import dcp_config
from tests.support.random_model import EOS, TOKENIZER, TOOL, VOCAB_SIZE, RandomModel, save_random_model, text_of
from tests.support.ranks import run_ranks
from tests.support.schemas import SCHEMAS
from tests.support.small_tokenizers import tokenizer_of

jsonschema = pytest.importorskip("jsonschema")
llguidance = pytest.importorskip("llguidance")
from llguidance.hf import from_tokenizer  # noqa: E402

from dcpmla.runtime import grammar_text  # noqa: E402
from dcpmla.runtime.grammar_text import compile_grammar, llguidance_text  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "déjà"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("regex", "[a-f]{2,5}(-[0-9]{1,3}){0,3}"),
    Grammar("choice", '["yes", "yes, but", "né", "no\\n\\"quoted\\""]'),
    Grammar("grammar", 'start: item ("+" item)*\nitem: /[0-9]{1,4}/ | "(" start ")"'),
    Grammar("grammar", 'root ::= ("ab" | "c")+ [x-z]'),
    Grammar("json_object"),
]
ENDS = {"}": 5.0, "]": 5.0, '"': 4.0, ")": 4.0}  # so that texts end
VOCABULARY = from_tokenizer(TOKENIZER, VOCAB_SIZE, [EOS])
MODEL = RandomModel(ENDS)
CLOSING = [*TOKENIZER.convert_tokens_to_ids(['"', "}", "]"]), EOS]


def is_in(grammar: Grammar, text: str) -> bool:
    """Whether a text is in a grammar, by validators that are not llguidance where there are any."""
    match grammar.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
            return True
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "choice":
            return text in json.loads(grammar.text)
    matcher = compile_grammar(VOCABULARY, grammar.kind, grammar.text)
    return matcher.consume_tokens(TOKENIZER(text)["input_ids"]) and matcher.is_accepting()


class PlainLoop:
    """The best allowed token, one after the other, from masks as llguidance's own functions give them."""

    def __init__(self, grammar: Grammar) -> None:
        limits = llguidance.LLParserLimits(precompute_large_lexemes=False)
        self.matcher = llguidance.LLMatcher(VOCABULARY, llguidance_text(grammar.kind, grammar.text), limits=limits)

    def tokens(self, prompt: Sequence[int], num_new: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < num_new and EOS not in tokens:
            bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[:VOCAB_SIZE]).bool()
            logits = MODEL.logits_after([*prompt, *tokens])
            tokens.append(int(logits.where(allowed, -torch.inf).argmax()))
            assert self.matcher.consume_token(tokens[-1])
        return tokens


class Guesses(HashDrafter):
    """Drafts of the known answers, in parts, and of other tokens, forbidden ones among them."""

    vocab_size = VOCAB_SIZE

    def __init__(self, answers: Sequence[list[int]], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.answers = answers

    def next_token(self, sequence: Sequence[int]) -> int:  # type: ignore[override]
        for answer in self.answers:
            if answer[: len(sequence)] == sequence and len(answer) > len(sequence):
                return answer[len(sequence)]
        return self.rng.randrange(VOCAB_SIZE)


@given(
    load=loads(most=6, num_new=10),
    order=st.permutations(range(len(GRAMMARS))),
    share=st.sampled_from([0.0, 0.6, 1.0]),
    num_drafts=st.integers(0, 4),
    with_graph=st.booleans(),
    ahead=st.booleans(),
)
def test_every_request_gets_what_a_plain_loop_chooses(
    load: Load, order: list[int], share: float, num_drafts: int, with_graph: bool, ahead: bool
) -> None:
    """With drafts right, wrong and forbidden, under preemption, among requests without grammars. Preempted requests
    come back from host memory.
    """
    own = [None if index % 3 == 2 else GRAMMARS[order[index % len(order)]] for index in range(len(load.asks))]
    expected = []
    for (prompt, num_new, *_), grammar in zip(load.asks, own, strict=True):
        loop = PlainLoop(grammar or Grammar("grammar", "start: /(.|\\n)*/"))
        expected.append([*prompt, *(loop.tokens(prompt, num_new) if grammar else free_tokens(prompt, num_new))])
    drafter = Guesses(expected, num_drafts, share, ahead=ahead) if num_drafts else None
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "drafter": drafter, "with_graph": with_graph}
    engine = make_engine(*load.limits, model=RandomModel(ENDS), num_host_blocks=30, memory=LateMemory, **options)
    requests = [
        engine.add(ask.prompt, SamplingParams(max_new_tokens=ask.num_new, grammar=grammar))
        for ask, grammar in zip(load.asks, own, strict=True)
    ]
    list(engine.run())
    assert [[*each.prompt_token_ids, *each.token_ids] for each in requests] == expected
    assert engine.allocator.num_free == load.num_blocks


def free_tokens(prompt: Sequence[int], num_new: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_new and EOS not in tokens:
        tokens.append(int(MODEL.logits_after([*prompt, *tokens]).argmax()))
    return tokens


@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
@settings(suppress_health_check=list(HealthCheck))
def test_texts_of_random_schemas_are_valid(schema: dict[str, Any], seed: int) -> None:
    """Of random allowed tokens, whatever a model would prefer."""
    matcher, rng = compile_grammar(VOCABULARY, "json_schema", json.dumps(schema)), np.random.default_rng(seed)
    tokens: list[int] = []
    while EOS not in tokens and len(tokens) < 300:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        closing = [token for token in CLOSING if bits[token]]
        tokens.append(int(rng.choice(closing if closing and rng.random() < 0.4 else allowed)))
        assert matcher.consume_token(tokens[-1])
    if EOS in tokens:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(tokens)))


@pytest.mark.parametrize("with_drafts", [False, True])
def test_texts_in_an_engine_are_in_their_grammars(with_drafts: bool) -> None:
    """At temperature 2, with drafts looked up in the text."""
    drafter = AlwaysLooks(4, torch.device("cpu")) if with_drafts else None
    engine = make_engine(700, 256, 32, 300, model=RandomModel(ENDS), tokenizer=TOKENIZER, drafter=drafter)
    texts = TOKENIZER('{"name": "ab", "age": 11, "tags": ["a", "a", "a"]} yes, but yes, but')["input_ids"]
    requests = [
        engine.add(texts, SamplingParams(max_new_tokens=200, temperature=2.0, seed=seed, grammar=grammar))
        for grammar, seed in itertools.product(GRAMMARS, range(6))
    ]
    list(engine.run())
    ended = [request for request in requests if request.finish_reason == "stop"]
    assert len(ended) > 0.8 * len(requests)
    assert all(is_in(request.params.grammar, request.text) for request in ended)
    assert all(request.error is None and request.token_ids[-1] == EOS for request in ended)
    assert (engine.stats.num_accepted_tokens > 10) == with_drafts


class AlwaysLooks(NgramDrafter):
    drafts_always = True


def run_one(params: SamplingParams, model: RandomModel | None = None, **options: Any) -> Request:
    engine = make_engine(90, model=model or RandomModel(ENDS), tokenizer=TOKENIZER, **options)
    request = engine.add([1, 2], params)
    list(engine.run())
    return request


def test_requests_without_grammars_get_what_they_get_alone() -> None:
    params = [
        {"temperature": 1.5, "seed": 3},
        {"presence_penalty": 1.0, "logprobs": 2},
        {"min_tokens": 9, "temperature": 1.0},
    ]

    def outcomes(grammars: Sequence[Grammar]) -> list[object]:
        engine = make_engine(300, model=RandomModel(ENDS), tokenizer=TOKENIZER)
        own = [engine.add([7, 8], SamplingParams(max_new_tokens=24, **each)) for each in params]  # type: ignore[arg-type]
        for grammar in grammars:
            engine.add([9], SamplingParams(max_new_tokens=30, grammar=grammar, temperature=2.0))
        list(engine.run())
        return [(request.token_ids, request.logprobs, request.text) for request in own]

    assert outcomes(GRAMMARS) == outcomes([])


def test_changes_of_logits_are_among_allowed_tokens() -> None:
    grammar, letters = Grammar("regex", "[ab]{6}"), TOKENIZER("ab")["input_ids"]
    biased = run_one(SamplingParams(grammar=grammar, logit_bias={letters[1]: 50.0}))
    assert biased.text == "bbbbbb"
    penalized = run_one(SamplingParams(grammar=grammar, presence_penalty=90.0, frequency_penalty=9.0))
    assert sorted(penalized.text) == [*"aaabbb"]
    forbidden = RandomModel({"c": 100.0})  # far better than what is allowed: min-p is about the allowed ones
    kept = run_one(SamplingParams(grammar=grammar, min_p=0.9, temperature=1.0, logprobs=1), forbidden)
    assert len(kept.text) == 6
    best = TOKENIZER("c")["input_ids"][0]
    assert [entry.top[0][0] for entry in kept.logprobs] == [best] * 7  # the model's own probabilities
    assert all(entry.logprob is not None and entry.logprob < -50 for entry in kept.logprobs)


def test_ends_are_where_the_grammar_may_end() -> None:
    model = RandomModel({"a": 20.0})
    model.biases[EOS] = 40.0
    assert run_one(SamplingParams(grammar=Grammar("regex", "a{3,9}")), model).text == "aaa"
    assert run_one(SamplingParams(grammar=Grammar("regex", "a{3,9}"), min_tokens=6), model).text == "aaaaaa"
    ended = run_one(SamplingParams(grammar=Grammar("regex", "a{3}"), min_tokens=6), model)  # nothing else may follow
    assert (ended.text, ended.finish_reason) == ("aaa", "stop")
    model.biases[[EOS, TOOL]] = torch.tensor([0.0, 40.0])
    stopped = run_one(SamplingParams(grammar=Grammar("regex", "a{3,9}"), stop_token_ids=[TOOL]), model)
    assert (stopped.token_ids[3:], stopped.finish_reason) == ([TOOL], "stop")
    letters = TOKENIZER("ab")["input_ids"]
    params = SamplingParams(grammar=Grammar("regex", "(a|b|c){3}"), stop_token_ids=letters)
    assert run_one(params, model).text == "ccc"  # before the end only tokens that do not end it
    params = SamplingParams(grammar=Grammar("regex", "ca{3}"), stop_token_ids=letters)
    assert run_one(params, model).token_ids[1:] == letters[:1]  # nothing else goes on
    assert run_one(SamplingParams(grammar=Grammar("regex", "a{3}"), stop="aa"), model).text == ""


@pytest.mark.parametrize("with_drafts", [False, True])
def test_a_grammar_begins_after_its_marker(with_drafts: bool) -> None:
    class Marking(RandomModel):
        """Writes letters, then the marker; an end would be best throughout."""

        def logits_after(self, sequence: Sequence[int]) -> Tensor:
            logits = super().logits_after(sequence)
            logits[EOS] += 50
            logits[TOOL if len(sequence) in (8, 12, 13) else TOKENIZER("x")["input_ids"][0]] += 30
            return logits

    model = Marking()
    answers = [[1, 2, *run_one(SamplingParams(grammar=MARKED), model).token_ids]]
    drafter = Guesses(answers, 4, 0.9, always=True) if with_drafts else None
    request = run_one(SamplingParams(grammar=MARKED), model, drafter=drafter)
    assert [1, 2, *request.token_ids] == answers[0]
    assert [index for index, token in enumerate(request.token_ids) if token == TOOL] == [6, 10, 11]
    after = text_of(request.token_ids[12:])
    assert after in ("12", "34")
    assert request.token_ids[-1] == EOS
    assert (request.acceptance.num_accepted > 0) == with_drafts


MARKED = Grammar("choice", '["12", "34"]', (TOOL, TOOL))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "a(b"), "unclosed group"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("grammar", "start: x"), "unknown name"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request(grammar: Grammar, words: str) -> None:
    engine = make_engine(90, model=RandomModel(ENDS), tokenizer=TOKENIZER)
    bad, good = (engine.add([5], SamplingParams(max_new_tokens=9, grammar=each)) for each in (grammar, GRAMMARS[2]))
    assert len(list(engine.run())) == 2
    assert (bad.finish_reason, good.finish_reason) == ("error", "stop")
    assert isinstance(bad.error, ValueError)
    assert words in str(bad.error)
    assert engine.allocator.num_free == 90


def test_a_step_that_passes_a_limit_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_text.LIMITS, "max_lexer_states", 40)
    engine = make_engine(90, model=RandomModel({"a": 9.0}), tokenizer=TOKENIZER)
    schema = Grammar("regex", "(.*a.{20}b.*)|(.*b.{9}c.*)")
    bad, good = (engine.add([5], SamplingParams(max_new_tokens=60, grammar=each)) for each in (schema, None))
    list(engine.run())
    assert (bad.finish_reason, good.error) == ("error", None)
    assert 0 < len(bad.token_ids) < 60


def test_compiling_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose grammars are not ready wait outside, and may be aborted there."""
    is_free = threading.Event()
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *args: (is_free.wait(), compile_one(*args))[1])
    engine = make_engine(90, model=RandomModel(ENDS), tokenizer=TOKENIZER)
    params = SamplingParams(max_new_tokens=9, grammar=GRAMMARS[2])
    first, aborted = engine.add([5], params), engine.add([5], params)
    others = [engine.add([6, index], SamplingParams(max_new_tokens=9)) for index in range(3)]
    while not all(request.finish_reason for request in others):
        engine.step()
    engine.abort(aborted)
    assert first.scheduled_time is None
    assert engine.has_requests
    is_free.set()
    list(engine.run())
    assert (first.finish_reason, aborted.finish_reason, aborted.token_ids) == ("stop", "abort", [])
    assert first.text in json.loads(GRAMMARS[2].text)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "xml", "text": "a"}, "grammar.kind is 'xml'; it must be one of"),
        ({"kind": "regex", "text": "a\ud800"}, "grammar.text has half of a surrogate pair, which is no character"),
        ({"kind": "regex"}, "grammar.text is empty"),
        ({"kind": "json_schema", "text": "{"}, "grammar.text is no JSON: "),
        ({"kind": "json_schema", "text": "3"}, "grammar.text is no JSON schema"),
        ({"kind": "json_schema", "text": "[" * 100_000}, "grammar.text is no JSON: "),
        ({"kind": "json_object", "text": "{}"}, "of json_object it must be empty"),
        ({"kind": "choice", "text": "[]"}, "grammar.text is no choice"),
        ({"kind": "choice", "text": '["a", 1]'}, "grammar.text is no choice"),
        ({"kind": "choice", "text": '["a"]', "starts_after": [-1]}, "grammar.starts_after is"),
        ({"text": "a"}, "grammar has the fields"),
        ({"kind": "regex", "text": "a", "more": 1}, "grammar has the fields"),
        (3, "grammar is 3|grammar .* is 3"),
    ],
)
def test_mistakes(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(grammar=values)


def test_more_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="ignore_eos is True; a request with a grammar ends where"):
        SamplingParams(grammar=GRAMMARS[0], ignore_eos=True)
    params = SamplingParams(grammar=GRAMMARS[0])
    assert SamplingParams.from_dict(asdict(params), SamplingParams()) == params
    with pytest.raises(ValueError, match="grammar needs a tokenizer, and the engine has none"):
        make_engine(9, model=RandomModel()).add([1], params)
    with pytest.raises(ValueError, match=r"grammar.starts_after has token id 999; the model's vocabulary is \[0, 352"):
        make_engine(9, model=RandomModel(), tokenizer=TOKENIZER).add(
            [1], SamplingParams(grammar=Grammar("json_object", "", (999,)))
        )
    request = make_engine(9, model=RandomModel(), tokenizer=tokenizer_of("word_level")).add([1], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=re.escape(f"grammar needs the extra structured: {install('structured')}")):
        make_engine(9, model=RandomModel(), tokenizer=TOKENIZER).add([1], params)
    assert request.finish_reason is None


def test_a_tokenizer_without_bytes_is_refused() -> None:
    engine = make_engine(9, model=RandomModel(), tokenizer=tokenizer_of("word_level"))
    request = engine.add([1], SamplingParams(grammar=GRAMMARS[0]))
    list(engine.run())
    assert "can't determine decoder type" in str(request.error)


def serve_ranks(directory: Path) -> list[tuple[list[int], str | None, bool]]:
    """Serve requests on one of two ranks, with drafts and preemption. Only the first rank has matchers."""
    dcp = dcp_config(2, 2, 1, block_size=4, context_workspace_tokens=64)
    mesh, cpu = init_mesh(2, 2), torch.device("cpu")
    exchange = select_exchange(dcp, mesh.dcp_group, cpu)
    model = load_model(directory, load_config(directory), dcp, mesh, exchange, torch.float32, cpu)
    outcomes = []
    for drafter in (None, AlwaysLooks(3, cpu)):
        plan = model.attention.plan_cache(dcp, [50], model.dtype, 4, drafter.num_speculative_tokens if drafter else 0)
        engine = new_engine(model, plan.allocate(cpu), dcp, mesh, 100, 64, 4, tokenizer=TOKENIZER, drafter=drafter)
        bad = Grammar("regex", "(((")
        own = [None, *GRAMMARS, bad]
        requests = [
            engine.add(
                [5, 6, 7, index], SamplingParams(max_new_tokens=30, temperature=1.0, seed=index, grammar=grammar)
            )
            for index, grammar in enumerate(own)
        ]
        list(engine.run())
        assert engine.stats.num_preemptions > 0
        assert engine.allocator.num_free == engine.allocator.num_blocks
        for request in requests:
            if request.params.grammar and request.finish_reason == "stop":
                assert is_in(request.params.grammar, request.text)
        outcomes += [(each.token_ids, each.finish_reason, each.error is None) for each in requests]
        engine.close()
    return outcomes


def test_ranks_agree(tmp_path: Path) -> None:
    save_random_model(tmp_path)
    first, second = run_ranks(2, serve_ranks, tmp_path)
    assert first == second
    half = len(first) // 2
    assert first[:half] == first[half:], "drafts change no token"
    assert [reason for _, reason, _ in first].count("error") == 2
