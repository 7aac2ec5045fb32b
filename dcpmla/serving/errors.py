"""Errors in OpenAI's shape."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


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
        """Return the JSON object of the error."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))
