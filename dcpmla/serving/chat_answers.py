"""Answers in OpenAI's shape of chat completions, whole and in chunks."""

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.answers import Answers, in_json
from dcpmla.serving.chat.events import Piece, Pieces
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.conversation import reasoning_part
from dcpmla.serving.messages import Output
from dcpmla.serving.shown import Json
from dcpmla.serving.slices import Each


class ChatAnswers(Answers):
    """The choices of a chat completion as they grow."""

    body: ChatBody
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    part = "delta"
    has_prompts_in_choices = False

    def first_chunks(self) -> list[Json]:
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [self._chunk_of({"index": index, **begun}) for index in range(self.num_choices)]
        if self.body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return chunks

    def _said(self, index: int, output: Output, is_chunk: bool) -> Json:
        pieces = self.readers[index].take()
        if self.body.include_reasoning is False:
            pieces = Pieces(piece for piece in pieces if piece.kind != "reasoning")
        return {"delta": _delta(pieces)} if is_chunk else {"message": _message(pieces)}

    def _logprobs(self, index: int, output: Output) -> Json | None:
        if self.body.num_logprobs is None:
            return None
        return {"content": Each(self._entry, output.logprobs)}

    def _entry(self, entry: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob or 0.0), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self.texts.token(token_id)
        # A token that is a part of a character has no text; which bytes it is, the tokenizer does not say.
        return {"token": text, "logprob": in_json(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _delta(pieces: Pieces) -> Json:
    """Return the change of a message that pieces make."""
    delta: Json = {"content": pieces.content} if pieces.content else {}
    if pieces.calls:
        delta["tool_calls"] = [{"index": piece.number, **_call(piece)} for piece in pieces.calls]
    return {**delta, **reasoning_part(pieces.reasoning)}


def _message(pieces: Pieces) -> Json:
    """Return the message of a whole answer."""
    content = None if pieces.calls and not pieces.content else pieces.content
    message: Json = {"role": "assistant", "content": content, **reasoning_part(pieces.reasoning)}
    if pieces.calls:
        message["tool_calls"] = [_call(piece) for piece in pieces.calls]
    return message


def _call(piece: Piece) -> Json:
    """Return a piece of a call; the first one has id and name."""
    if piece.name is None:
        return {"function": {"arguments": piece.text}}
    call: Json = {"id": piece.call_id, "type": "function"}
    return {**call, "function": {"name": piece.name, "arguments": piece.text}}
