"""Fields of completions and chats that would change an answer, and are not served.

Sources: OpenAI's API reference; the protocols of vLLM's and SGLang's servers. Other names are ignored.
"""

from collections.abc import Mapping

from dcpmla.serving.errors import ApiError

# Values that change nothing, by field; null changes nothing either.
_REFUSED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": ([],),
    "reasoning": (),
    "repetition_detection": (),
    "return_token_strs": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "extra_key": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "separate_reasoning": (False,),
    "session_params": ({},),
    "stop_regex": ([], ""),
    "stop_token_regex": ([], ""),
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
    "min_new_tokens": "it is min_tokens here",
    "sampling_params": "give its fields in the body itself",
    "thinking": "give it in chat_template_kwargs",
}
# Fields of one route only.
_OTHER_ROUTE = {
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "messages": (),
    "prompt": (),
    "top_logprobs": (0,),
}
_STREAM_OPTIONS: dict[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
_MESSAGE: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "refusal": (),
    "tool_calls": ([],),
    "tools": ([],),
}


def check_fields_of_body(fields: Mapping[str, object]) -> None:
    """Raise ApiError if one of a body's fields that have no meaning here would change the answer."""
    for name, value in fields.items():
        if value is None:
            continue
        if name in _MISPLACED:
            raise ApiError(400, f"{name} is not supported; {_MISPLACED[name]}", param=name)
        _refuse(name, value, _REFUSED.get(name), "leave it out")
        _refuse(name, value, _OTHER_ROUTE.get(name), "this route does not have it")


def check_fields_of_message(fields: Mapping[str, object], path: str) -> None:
    """Raise ApiError if one of a message's fields would change the prompt, and is not served."""
    for name, value in fields.items():
        _refuse(f"{path}.{name}", value, _MESSAGE.get(name), "leave it out")


def check_stream_options(fields: Mapping[str, object]) -> None:
    """Raise ApiError for an option of streams that is not served."""
    for name, value in fields.items():
        _refuse(f"stream_options.{name}", value, _STREAM_OPTIONS.get(name, (False,)), "leave it out")


def _refuse(path: str, value: object, allowed: tuple[object, ...] | None, words: str) -> None:
    if allowed is not None and value is not None and value not in allowed:
        raise ApiError(400, f"{path} is not supported; {words}", param=path)
