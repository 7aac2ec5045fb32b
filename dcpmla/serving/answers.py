"""Answers in OpenAI's shape of completions, whole and in chunks."""

from array import array
from dataclasses import replace
from functools import cached_property

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.messages import Output, joined
from dcpmla.serving.protocol import GenerationFields, StreamOptions
from dcpmla.serving.replies import Reply
from dcpmla.serving.shown import Json
from dcpmla.serving.slices import Each

_LEAST = -9999.0


class Answers(Reply):
    """The choices of one HTTP request as they grow."""

    body: GenerationFields
    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    part = "text"  # field of a choice's chunk that has the new text
    has_prompts_in_choices = True  # fields of prompts; otherwise the whole answer has them
    ending = "data: [DONE]\n\n"

    @cached_property
    def _options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    @cached_property
    def _outputs(self) -> dict[int, list[Output]]:
        """Return the outputs of each choice of a whole answer."""
        return {}

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """Return the number of characters of each choice so far."""
        return {}

    def drop_prompts(self) -> None:
        for number, prompt in enumerate(self.prompts):
            token_ids = prompt.token_ids if self.body.return_token_ids else array("i")
            text = prompt.text if self.body.echoes else ""
            self.prompts[number] = replace(prompt, token_ids=token_ids, text=text)

    def add(self, index: int, output: Output) -> None:
        self._outputs.setdefault(index, []).append(self._counted(index, output)[1])

    def whole(self) -> Json:
        outputs = [joined(self._outputs[index]) for index in range(len(self._outputs))]
        choices = [self._choice(index, output, is_first=True, is_chunk=False) for index, output in enumerate(outputs)]
        extras = {} if self.has_prompts_in_choices else self._prompt_extras(0, outputs[0])
        return {**self._around(choices, self.kind), **extras, "usage": self.usage.body()}

    def chunks(self, index: int, output: Output) -> list[Json]:
        is_first, output = self._counted(index, output)
        choice = self._choice(index, output, is_first, is_chunk=True)
        has_news = any(choice.get(name) for name in (self.part, "logprobs", "finish_reason", "token_ids"))
        return [self._chunk_of(choice)] if has_news else []

    def last_chunks(self) -> list[Json]:
        if not self._options.include_usage:
            return []
        return [{**self._around([], self.chunk_kind), "usage": self.usage.body()}]

    def _chunk_of(self, choice: Json) -> Json:
        chunk = self._around([choice], self.chunk_kind)
        if self._options.continuous_usage_stats:
            chunk["usage"] = self.usages[choice["index"]].body()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _around(self, choices: list[Json], kind: str) -> Json:
        """Return the object around choices."""
        return {
            "id": self.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, output: Output, is_first: bool, is_chunk: bool) -> Json:
        """Return a choice with an output, which is maybe its first."""
        choice: Json = {
            "index": index,
            **self._said(index, output, is_chunk),
            "logprobs": self._logprobs(index, output),
            "finish_reason": self.reason(index, output),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return {**choice, **self._prompt_extras(index, output)} if is_first and self.has_prompts_in_choices else choice

    def _said(self, index: int, output: Output, is_chunk: bool) -> Json:
        """Return the field of a choice that has an output's text."""
        return {"text": output.text}

    def _prompt_extras(self, index: int, output: Output) -> Json:
        """Return fields of a choice's prompt."""
        extras: Json = {}
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = list(self.prompts[index // self.num_choices].token_ids)
        if self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = Each(self._ranked, output.prompt_logprobs)
        return extras

    def _counted(self, index: int, output: Output) -> tuple[bool, Output]:
        """Count an output; return whether it is its choice's first, and the part of it that is shown."""
        if self.body.token_limit == 0:  # The answer is the prompt alone.
            output = output._replace(text="", token_ids=(), logprobs=(), offsets=())
        is_first = self.read(index, output)
        if self.body.echoes and is_first:
            output = output._replace(text=self.prompts[index // self.num_choices].text + output.text)
        return is_first, output

    def _logprobs(self, index: int, output: Output) -> Json | None:
        """Return the log probabilities of an output's tokens, in the shape of completions."""
        if self.body.num_logprobs is None:
            return None
        echoed = output.prompt_logprobs if self.body.echoes else ()
        entries = (*echoed, *output.logprobs)
        prompt = self.prompts[index // self.num_choices]
        start = len(prompt.text) if self.body.echoes else 0
        places = [*(prompt.offsets if echoed else ()), *(start + each for each in output.offsets)]
        self._lengths[index] = length = self._lengths.get(index, 0) + len(output.text)
        if output.finish_reason is not None:  # A stop string is not in the text, its tokens are here.
            places = [min(place, length) for place in places]
        return {
            "tokens": Each(lambda entry: self.texts.token(entry.token_id), entries),
            "token_logprobs": Each(lambda entry: None if entry.logprob is None else in_json(entry.logprob), entries),
            "top_logprobs": Each(self._alternatives, entries),
            "text_offset": places,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """Return the best tokens and the chosen one; of tokens with the same text the best one."""
        if entry.logprob is None:
            return None  # the first token of a prompt
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self.body.num_logprobs], (entry.token_id, entry.logprob)):
            best.setdefault(self.texts.token(token_id), in_json(logprob))
        return best

    def _ranked(self, entry: TokenLogprobs) -> Json | None:
        """Return the log probabilities of a prompt's token in vLLM's shape; only the best tokens have a rank."""
        if entry.logprob is None:
            return None  # the first token of a prompt
        top = entry.top[: self.body.prompt_logprobs]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
        return {
            str(token_id): {
                "logprob": in_json(value),
                "rank": ranks.get(token_id),
                "decoded_token": self.texts.token(token_id),
            }
            for token_id, value in dict([(entry.token_id, entry.logprob), *top]).items()
        }


def in_json(logprob: float) -> float:
    """Return a log probability as a number of JSON, which has no infinity, as vLLM does."""
    return min(logprob, 0.0) if logprob > _LEAST else _LEAST  # also for NaN
