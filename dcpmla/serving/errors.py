"""Errors in OpenAI's and Anthropic's shapes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_ANTHROPIC_ROUTES = "/v1/messages"


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: Text for the client's user.
        param: Field that is wrong.
        code: Word for programs.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, object]:
        """Return the JSON object of the error as OpenAI has it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, object]:
        """Return the JSON object of the error as Anthropic has it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> JSONResponse:
        """Return the answer in the shape of a path's API."""
        body = self.anthropic_body() if path.startswith(_ANTHROPIC_ROUTES) else self.body()
        return JSONResponse(body, self.status, dict(self.headers or {}))


@contextmanager
def as_api_error() -> Iterator[None]:
    """Raise ApiError in place of a ValueError whose message begins with the path of a field."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from error


def wrong(path: str, words: str) -> ApiError:
    """Return the error of a field of a body. Its message is the field's path and the words."""
    return ApiError(400, f"{path} {words}", param=path)
