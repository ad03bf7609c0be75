"""Errors as OpenAI's clients expect them: an HTTP status, and a JSON object that describes the error."""

from collections.abc import Mapping

from .reply_models import ErrorDetail, ErrorReply

TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
}  # other statuses have the type of an error of the request, or of the server
LONGEST = 1000  # characters of a message


class ApiError(Exception):
    """A reply that is an error. status: the HTTP status. param: the wrong parameter. code: a name of the error for programs.

    The reply has only the first LONGEST characters of the message and of param, because they may quote the request.
    for_log: the message for the log, if it quotes the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        for_log: str = "",
    ):
        super().__init__(_beginning(message))
        self.param = None if param is None else _beginning(param)
        self.for_log = for_log or str(self)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    @property
    def reply(self) -> ErrorReply:
        """The JSON object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorReply(error=ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for a request that can never succeed."""
    return ApiError(400, message, param, code)


def _beginning(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
