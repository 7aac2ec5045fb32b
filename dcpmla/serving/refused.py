"""Fields that all routes refuse, because they would change an answer and are not served.

Sources: OpenAI's API reference; the protocols of vLLM's and SGLang's servers. Other names are in `unknown_fields`.
"""

from collections.abc import Collection, Mapping

from pydantic import BaseModel, ConfigDict

from dcpmla.serving.errors import wrong
from dcpmla.serving.unknown_fields import log_ignored, look_alike

_Allowed = tuple[object, ...] | None  # values that change nothing, besides null; None if all may

# Values that change nothing, by field; null changes nothing either.
_REFUSED: dict[str, tuple[object, ...]] = {
    # OpenAI
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    # vLLM
    **dict.fromkeys(("chat_template", "guided_decoding_backend", "guided_whitespace_pattern", "reasoning"), ()),
    **dict.fromkeys(("repetition_detection", "structural_tag", "thinking_token_budget"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "logits_processors", "prompt_embeds"), ([],)),
    **dict.fromkeys(("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(("return_token_strs", "return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
    "priority": (0,),
    "truncation_side": ("left",),
    # SGLang
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor"), ()),
    **dict.fromkeys(("data_parallel_rank", "extra_key", "lora_path"), ()),
    **dict.fromkeys(("custom_params", "session_params"), ({},)),
    **dict.fromkeys(("no_stop_trim", "return_cached_tokens_details", "return_hidden_states"), (False,)),
    **dict.fromkeys(("return_routed_experts", "separate_reasoning"), (False,)),
    **dict.fromkeys(("stop_regex", "stop_token_regex"), ([], "")),
    "stream_reasoning": (True,),
}

# Fields in a wrong place, or under another API's name, with what to do.
_MISPLACED = {
    **{f"guided_{kind}": f"it is {kind} in structured_outputs here" for kind in ("choice", "grammar", "json", "regex")},
    "ebnf": "it is grammar in structured_outputs here",
    "json_schema": "it is json in structured_outputs here",
    "regex": "it is regex in structured_outputs here",
    "continuous_usage_stats": "give it in stream_options",
    "enable_thinking": "give it in chat_template_kwargs",
    "extra_body": "give its fields in the body itself",
    "include_usage": "give it in stream_options",
    "max_new_tokens": "it is max_tokens here",
    "max_output_tokens": "it is max_tokens here",
    "min_new_tokens": "it is min_tokens here",
    "sampling_params": "give its fields in the body itself",
    "stop_sequences": "it is stop here",
    "thinking": "give it in chat_template_kwargs",
}
# Fields of other routes.
_OTHER_ROUTE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("add_special_tokens", "input", "messages", "prompt", "reasoning_effort"), ()),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("continue_final_message", "echo", "logprobs", "return_token_ids"), (False,)),
    **dict.fromkeys(("chat_template_kwargs", "stream_options"), ({},)),
    **dict.fromkeys(("instructions", "system"), ("",)),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_NOT_HERE = "this route does not have it"
# Of every route: the values that change nothing, and advice for clients that send another one.
_EVERYWHERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    **{name: (allowed, _NOT_HERE) for name, allowed in _OTHER_ROUTE.items()},
    **{name: (allowed, "leave it out") for name, allowed in _REFUSED.items()},
    **{name: ((), words) for name, words in _MISPLACED.items()},
}
# Fields of objects in a body, and the values of all other fields that change nothing: None if all may.
_NESTED: dict[str, tuple[dict[str, _Allowed], _Allowed]] = {
    "messages": (
        {"audio": (), "function_call": (), "partial": (False,), "prefix": (False,), "refusal": (), "tools": ([],)},
        None,
    ),
    "output_config": ({"task_budget": None}, ()),  # No answer has to follow a budget.
    "reasoning": ({"mode": ("standard",)}, None),
    "stream_options": ({"include_obfuscation": (False,)}, (False,)),
}
_NONE: Mapping[str, tuple[object, ...]] = {}
_MAX_UNKNOWN = 64  # names of a body that are compared with known ones


class Fields(BaseModel):
    """Fields of a JSON object. Other fields are ignored."""

    model_config = ConfigDict(strict=True)


class OpenFields(Fields):
    """Fields of a JSON object. Other fields are kept until they are checked."""

    model_config = ConfigDict(extra="allow")


def check_fields_of_body(
    body: BaseModel,
    own: Mapping[str, tuple[object, ...]] = _NONE,
    advice: str = "leave it out",
    elsewhere: Collection[str] = (),
) -> None:
    """Check the fields that the classes of a body and its objects do not have, and forget them, because the answer may
    take minutes.

    Args:
        own: Values that change nothing, by the names of fields that this route refuses in its own way.
        advice: Advice for clients, by the name of the field that they send.
        elsewhere: Names of fields of other routes, which are refused whatever their value.
    Raises:
        ApiError: A field would change the answer, or its name looks like a known one.
    """
    fields, extra = type(body).model_fields, body.model_extra or {}
    refused = {**_EVERYWHERE, **dict.fromkeys(elsewhere, ((), _NOT_HERE))}
    refused |= {name: (allowed, advice) for name, allowed in own.items()}
    for name in filter(refused.__contains__, extra):
        refuse(name, extra[name], *refused[name])
    unknown = [name for name, value in extra.items() if name not in refused and value is not None]
    known = frozenset({*fields, *_MISPLACED, *elsewhere}) if unknown else frozenset()
    for name in unknown[:_MAX_UNKNOWN]:
        if meant := look_alike(name, known):
            more = "" if meant in fields else f" {_MISPLACED.get(meant, _NOT_HERE)}"
            raise wrong(name, f"is unknown; did you mean {meant}?{more}")
    log_ignored(unknown)
    extra.clear()
    for name in filter(fields.__contains__, _NESTED):
        value = getattr(body, name)
        is_list = isinstance(value, list)
        for number, item in enumerate(value if is_list else [value]):
            _check_nested(name, f"{name}.{number}" if is_list else name, item)


def _check_nested(name: str, path: str, value: object) -> None:
    """Check the fields that an object of a body has besides its own, and forget them.

    Args:
        name: Field of the body that has the object.
        path: Path of the object in the body.
        value: The object; a dict has no fields of its own.
    """
    allowed, others = _NESTED[name]
    extra = value if isinstance(value, dict) else getattr(value, "model_extra", None) or {}
    for key, each in extra.items():
        refuse(f"{path}.{key}", each, allowed.get(key, others), "leave it out")
    extra.clear()


def refuse(path: str, value: object, allowed: _Allowed, words: str) -> None:
    """Raise ApiError for a value that is not allowed.

    Args:
        allowed: Values that change nothing, besides null; None if all may.
        words: Advice for the client.
    """
    if allowed is not None and value is not None and value not in allowed:
        raise wrong(path, f"is not supported; {words}")
