"""Names of fields: those of the tables in docs/serving.md, slips of the pen, other servers' fields, and the log."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dcpmla.serving import anthropic_body, refused, responses_body, unknown_fields
from dcpmla.serving.anthropic_body import CountBody, MessagesBody
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import CompletionBody, parse
from dcpmla.serving.responses_body import ResponsesBody
from tests.support.launchers import ROOT
from tests.support.servers import QUESTION, RunningServer

MESSAGES = [{"role": "user", "content": QUESTION}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
KINDS: dict[str, Any] = dict(zip(GOOD, (CompletionBody, ChatBody, ResponsesBody, MessagesBody, CountBody), strict=True))
SLIPS = {
    "/v1/completions": {
        "max_token": "did you mean max_tokens?",
        "temprature": "did you mean temperature?",
        "temperatuer": "did you mean temperature?",
        "presence_penality": "did you mean presence_penalty?",
        "topP": "did you mean top_p?",
        "TOP-K": "did you mean top_k?",
        "maxTokens": "did you mean max_tokens?",
        "stop_sequence": "did you mean stop_sequences? it is stop here",
        "steam": "did you mean stream?",
        "logit_biases": None,
    },
    "/v1/chat/completions": {
        "max_completion_token": "did you mean max_completion_tokens?",
        "reasoning_efort": "did you mean reasoning_effort?",
        "tool_choise": "did you mean tool_choice?",
        "max_new_token": "did you mean max_new_tokens? it is max_tokens here",
    },
    "/v1/responses": {
        "max_output_token": "did you mean max_output_tokens?",
        "max_token": "did you mean max_tokens? this route does not have it",
        "instruction": "did you mean instructions?",
    },
    "/v1/messages": {
        "stop_sequence": "did you mean stop_sequences?",
        "temprature": "did you mean temperature?",
        "min_token": "did you mean min_tokens? this route does not have it",
    },
    "/v1/messages/count_tokens": {"messages_": "did you mean messages?", "thinkin": "did you mean thinking?"},
}
# Fields that clients of other servers send, and that look like none of ours: OpenAI's, vLLM's, SGLang's, llama.cpp's,
# TGI's, OpenRouter's, Mistral's, DashScope's, LiteLLM's and KoboldAI's.
OTHERS = re.findall(
    r"\w+",
    """
user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity betas
max_tool_calls top_a rid request_id session_id watermarking logprob_token_ids routed_experts_prompt_start
return_token_offsets return_prompt_text return_mm_kwargs ec_transfer_params routed_experts_start_len
return_prompt_token_ids return_meta_info task max_dynamic_patch min_dynamic_patch images_config input_ids
ngram_corpus_id routed_dp_rank disagg_prefill_dp_rank n_predict n_probs n_keep mirostat mirostat_tau mirostat_eta tfs_z
dynatemp_range xtc_probability dry_multiplier dry_base penalize_nl min_keep image_data id_slot cache_prompt samplers
grammar repeat_penalty repeat_last_n timings_per_token reasoning_format reasoning_budget inputs parameters do_sample
details return_full_text top_n_tokens watermark truncate adapter_id models route provider transforms plugins usage
options keep_alive format template raw think images safe_prompt random_seed prompt_mode enable_search thinking_budget
result_format incremental_output drop_params api_base num_retries timeout tags cache search_parameters
speed inference_geo generation_config smoothing_factor top_n_sigma no_repeat_ngram_size guidance_scale
container mcp_servers context_management negative_prompt ban_eos_token ignore_eos_token rep_pen max_length
chat_template_args
""",
)
TAKEN_ELSEWHERE = {
    "/v1/responses": {"store", "context_management"},
    "/v1/messages": {"container", "mcp_servers", "context_management"},
    "/v1/messages/count_tokens": {"container", "mcp_servers", "context_management"},
}


@pytest.mark.parametrize("path", GOOD)
def test_a_slip_of_the_pen_is_refused_with_a_suggestion(client: Any, path: str) -> None:
    for name, words in SLIPS[path].items():
        response = client.post(path, json={**GOOD[path], name: 1})
        if words is None:
            assert response.status_code == 200
            continue
        error = response.json()["error"]
        assert (response.status_code, error["message"]) == (400, f"{name} is unknown; {words}")
        if path.startswith("/v1/messages"):
            assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
        else:
            assert (error["type"], error["param"]) == ("invalid_request_error", name)
        assert client.post(path, json={**GOOD[path], name: None}).status_code == 200, "null changes nothing"


@pytest.mark.parametrize("path", GOOD)
def test_fields_of_other_servers_are_taken(client: Any, path: str) -> None:
    errors = {name: refusal(KINDS[path], GOOD[path], name) for name in OTHERS}
    assert not [name for name, error in errors.items() if error and "did you mean" in error.message]
    taken = {name: {"a": "b"} for name, error in errors.items() if not error}
    assert errors.keys() - taken.keys() == TAKEN_ELSEWHERE.get(path, set())
    assert client.post(path, json={**GOOD[path], **taken}).status_code == 200


def refusal(kind: Any, body: dict[str, Any], name: str) -> ApiError | None:
    """Return the error of a body with an odd value in a field."""
    try:
        parse(kind, json.dumps({**body, name: {"an odd": "value"}}).encode())
    except ApiError as error:
        return error
    return None


def test_the_log_of_a_process_has_one_line_for_all(client: Any, server: RunningServer) -> None:
    for number in range(3):
        assert client.post("/v1/completions", json={**GOOD["/v1/completions"], f"odd {number}": 1}).status_code == 200
    assert server.log().count("fields that no API has are ignored") == 1


def test_the_line_names_the_first_request_s_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_fields, "_has_logged", False)
    body = GOOD["/v1/completions"]
    with caplog.at_level(logging.WARNING):
        parse(CompletionBody, json.dumps({**body, "user": "me", "metadata": {}}).encode())
        assert not caplog.text, "a known field that changes nothing is no news"
        names = ["line\nbreak", "x" * 5000, *(f"odd {number}" for number in range(1000))]
        parse(CompletionBody, json.dumps({**body, "user": "me", **dict.fromkeys(names, 1)}).encode())
        parse(ChatBody, json.dumps({**GOOD["/v1/chat/completions"], "other": 1}).encode())
    (line,) = caplog.messages
    assert line.startswith(f"fields that no API has are ignored: 'line\\nbreak', '{'x' * 64}', 'odd 0', ")
    assert line.endswith("'odd 5' and 994 more; later ones are not logged")


def test_many_long_names_take_no_time() -> None:
    names = {f"{'temprature' * 20} {number}": 1 for number in range(100_000)}
    assert not parse(CompletionBody, json.dumps({**GOOD["/v1/completions"], **names}).encode()).model_extra


# The routes of the tables in docs/serving.md, in the order of their columns.
COLUMNS = [(KINDS[path], GOOD[path]) for path in GOOD if "count" not in path]


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield each field of the tables with its cells."""
    text = (ROOT / "docs" / "serving.md").read_text()
    tables = re.findall(r"^\| field \| completions.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert len(tables) == 2
    for line in (line for table in tables for line in table.splitlines()[2:] if line.startswith("|")):
        fields, *cells = (cell.strip() for cell in line.split("|")[1:6])
        for name in re.findall(r"`(\w+)`", fields):
            yield name, cells


def cell(kind: Any, body: dict[str, Any], name: str) -> str:
    if name in kind.model_fields:
        return "yes"
    error = refusal(kind, body, name)
    if error is None:
        return "–"
    is_own = error.param == name and error.message.startswith(f"{name} is not supported; ")
    return "400" if is_own else f"400 of {error.param}: {error.message}"


def test_the_table_of_fields() -> None:
    table = dict(rows())
    assert len(table) == len([*rows()]), "a field has two rows"
    known = {name for kind, _ in COLUMNS for name in kind.model_fields}
    known |= {*refused._REFUSED, *refused._MISPLACED, *refused._OTHER_ROUTE}
    known |= {*responses_body._REFUSED, *anthropic_body._REFUSED}
    assert known == table.keys()
    for name, cells in table.items():
        assert cells == [cell(kind, body, name) for kind, body in COLUMNS], name
