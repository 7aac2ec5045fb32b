"""The model that chats: its tokenizer, its files and record, its answers in transformers and over several ranks."""

import json
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.chat.formats import find_format
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_on_rank, poisoned_cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat"
MODEL = EXAMPLE / "model"
sys.path.insert(0, str(EXAMPLE))
from chat_tokenizer import TEMPLATE, train_tokenizer  # noqa: E402
from conversations import conversations  # noqa: E402
from train_chat import (  # noqa: E402
    Training,
    accuracy,
    answered_tokens,
    batches,
    build_config,
    build_model,
    continued,
    losses,
)
from words import HELD_OUT, Words  # noqa: E402

TOKENIZER = transformers.AutoTokenizer.from_pretrained(MODEL)


def held_out_prompts(number: int) -> list[list[int]]:
    """Return prompts of conversations with held-out words, up to their last answer."""
    talks = islice(conversations(Words(random.Random(3), held_out=True), 1.0), number)
    return [
        TOKENIZER.apply_chat_template(
            talk.messages[:-1], tools=talk.schemas(), add_generation_prompt=True, return_dict=False
        )
        for talk in talks
    ]


def generate(prompts: list[list[int]], tp: int, dcp_size: int) -> list[list[int]]:
    dcp = dcp_config(tp, dcp_size, 1, context_workspace_tokens=256)
    model, mesh = load_on_rank(MODEL, dcp)
    longest = max(map(len, prompts)) + 24
    engine = new_engine(
        model, poisoned_cache(model, dcp, [longest] * len(prompts)), dcp, mesh, longest, 64, len(prompts)
    )
    requests = [engine.add(prompt, SamplingParams(max_new_tokens=24)) for prompt in prompts]
    assert len([*engine.run()]) == len(prompts)
    return [request.token_ids for request in requests]


def test_ranks_answer_as_transformers() -> None:
    """All six layers, heads and cache sharded over 4 ranks; the oracle is transformers, a request at a time."""
    prompts = held_out_prompts(6)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        expected.append(ids)
    assert run_ranks(4, generate, prompts, 4, 4, timeout=300) == [expected] * 4


def test_held_out_answers_are_right() -> None:
    """The saved weights are those of the record: as many answers are right, about."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    measured = accuracy(model, TOKENIZER, Words(random.Random(77), held_out=True), 150)
    right, answers = (sum(task[key] for task in measured.values()) for key in ("right", "answers"))
    record = json.loads((MODEL / "training.json").read_text())["accuracy"]["held out"]
    recorded = sum(task["right"] for task in record.values()) / sum(task["answers"] for task in record.values())
    assert abs(right / answers - recorded) < 0.08
    assert recorded > 0.8
    assert all(task["right"] > 0.6 * task["answers"] for task in record.values()), "most of each task"


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_names_are_the_same_tokens_in_text_and_json() -> None:
    for text in ("Tokyo", "418", "Zaphod"):
        ids = TOKENIZER.tokenize(text)
        assert TOKENIZER.tokenize(f'in {text}? {{"a": "{text}"}}').count(ids[-1]) >= 2
        assert TOKENIZER.tokenize(f"in {text}?")[-1 - len(ids) : -1] == ids


def test_the_template_s_markup() -> None:
    assert TOKENIZER.chat_template == TEMPLATE
    markup = find_format("deepseek_v3", TEMPLATE)
    assert markup is not None
    assert markup.name == "deepseek_v31"
    arguments = '{"a": 1}'
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == f"<bos><|user|>x<|assistant|>{markup.written_calls([('f', arguments)])}<eos>"


def test_files_are_small_and_pickle_free() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 10 << 20
    assert {file.suffix for file in MODEL.iterdir()} == {".json", ".safetensors"}
    config = json.loads((MODEL / "config.json").read_text())
    assert config["num_hidden_layers"] >= 6
    assert config["num_attention_heads"] % 4 == 0


def test_training_sees_no_held_out_word() -> None:
    words = Words(random.Random(0))
    for talk in islice(conversations(words, 1.0), 3000):
        text = json.dumps([talk.messages, talk.schemas()])
        assert not HELD_OUT & set(text.replace('"', " ").replace(".", " ").replace("?", " ").replace(",", " ").split())


def test_the_tokenizer_is_reproducible() -> None:
    talks = [*islice(conversations(Words(random.Random(-1)), 1.0), 8000)]
    assert train_tokenizer(talks).get_vocab() == TOKENIZER.get_vocab()


def test_what_a_batch_teaches() -> None:
    batch = batches(TOKENIZER, Words(random.Random(1)), 0.5)[0]
    row, answered = batch.ids[0].tolist(), batch.answered[0].tolist()
    assert answered == answered_tokens(row)[1:]
    taught = TOKENIZER.decode([token for token, is_taught in zip(row[1:], answered, strict=True) if is_taught])
    assert taught.endswith("<eos>")
    assert "<|user|>" not in taught
    targets, found = continued(torch.tensor([[5, 6, 7, 5, 6, 8, 5, 9, 6]]))
    assert found.tolist() == [[False, False, False, True, True, False, True, False, True]]
    assert targets[found].tolist() == [6, 7, 6, 8]


def test_steps_train() -> None:
    """Steps from random weights make the loss of a batch smaller; gradients reach embeddings and all layers."""
    torch.manual_seed(0)
    training = Training(build_model(build_config(len(TOKENIZER))), TOKENIZER, 100, 0)
    before = [parameter.clone() for parameter in training.model.parameters()]
    batch = min(batches(TOKENIZER, Words(random.Random(0)), 0.0), key=lambda each: each.ids.numel())
    with torch.no_grad():
        first, _ = losses(training.model, batch, learns_copying=False)
    for _ in range(12):
        training.take_step(batch)
    with torch.no_grad():
        last, _ = losses(training.model, batch, learns_copying=False)
    assert last < first
    assert all((old != new).any() for old, new in zip(before, training.model.parameters(), strict=True))
