"""The line of the log for each request: who asked, what it cost, and how long each part took."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .hosts import PROBES
from .sequences import Sequence

log = logging.getLogger(__name__)

QUIET = (*PROBES, "/metrics")  # paths whose requests are logged at the level debug if they succeed
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HUNG_UP = 499


@dataclass
class Record:
    """A request, for its line and the metrics. The endpoint adds what it knows; times are those of `time.monotonic`.

    id: the client's X-Request-Id, or one that was made. headers: those that are added to the reply. status: HUNG_UP if the
    client has disconnected before the reply was complete. key: the number of the API key. is_passed_on: True if a replica
    has the request, and logs it.
    """

    id: str
    client: str
    method: str
    path: str
    arrival: float
    headers: dict[str, str]
    status: int = HUNG_UP
    key: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    first_token: float | None = None
    error: str = ""
    is_passed_on: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of the line, at the end of the request."""
        end, requests = time.monotonic(), [each.request for each in self.sequences if each.request is not None]
        new, first = sum(len(request.tokens) for request in requests), self.first_token or end
        cost: dict[str, Any] = {}
        if self.sequences:
            admitted = min((each.admitted_at for each in requests if each.admitted_at is not None), default=end)
            cost = dict(
                adapter=self.sequences[0].options.adapter, replies=len(self.sequences),
                prompt_tokens=sum(len(sequence.prompt) for sequence in self.sequences),
                cached_tokens=sum(request.reused for request in requests), new_tokens=new,
                queue_s=round(admitted - self.arrival, 3), first_token_s=round(first - self.arrival, 3) if new else None,
                tokens_per_s=round((new - 1) / (end - first), 1) if new > 1 and end > first else None,
            )  # fmt: skip
        return dict(
            id=self.id, client=self.client, key=self.key, method=self.method, path=self.path[:100], status=self.status,
            **cost, total_s=round(end - self.arrival, 3), error=self.error,
        )  # fmt: skip


class AccessLog:
    """An ASGI application that gives each request an id, and logs it when it has ended.

    finish: called with the record of each request at its end. open, served: the numbers of requests that are open and that
    have ended, without those of QUIET paths.
    """

    def __init__(self, app: ASGIApp, finish: Callable[[Record], None] = lambda record: None):
        self._app, self._finish = app, finish
        self.open = self.served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        id = asked if REQUEST_ID.fullmatch(asked) else secrets.token_hex(8)
        client = scope["client"][0] if scope["client"] else headers.get("x-forwarded-for", "")  # from the router
        record = Record(id, client[:100], scope["method"], scope["path"], time.monotonic(), {"X-Request-Id": id})
        scope["record"] = record
        is_complete, is_quiet, failure = False, record.path in QUIET, None

        async def noted(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = {name.lower().encode(): value.encode("latin-1") for name, value in record.headers.items()}
                own = [row for row in message.get("headers", ()) if row[0] not in added]
                message = {**message, "headers": [*own, *added.items()]}
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        self.open += not is_quiet
        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # of the program; the client has got the status 500, or a part of the reply
            failure = error
        finally:
            self.open, self.served = self.open - (not is_quiet), self.served + (not is_quiet)
            if not is_complete:
                record.status = 500 if failure or record.error else HUNG_UP
            self._finish(record)
            if not record.is_passed_on:
                level = logging.WARNING if record.error else logging.DEBUG if is_quiet else logging.INFO
                level = logging.ERROR if failure else level
                log.log(level, "request", exc_info=failure, extra={"fields": record.fields()})
