"""Passes the requests of clients on to replicas of the server, by their prefixes and by load."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import h11
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access_log import Record
from .bodies import ClientDisconnected, read_body, while_connected
from .connections import Connections
from .errors import ApiError
from .hosts import PROBES
from .keys import key_in
from .metrics import PREFIX, router_metrics
from .replicas import Replica, Replicas
from .reply_models import Status

GRACE_S = 60.0  # for a client to read its reply, after the replica's own limits
PREFIX_LENGTH = 1024  # characters of a prompt that decide about its replica
PROMPTS = ("messages", "prompt", "input")  # the parameters that may be the prompt
REPLACED = (b"content-length", b"x-request-id", b"x-forwarded-for")
OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"date")
LOST = (OSError, h11.RemoteProtocolError)  # the replica has closed the connection, or there is none
LOST_MESSAGE = "the replica of the model that had this request was lost"


@dataclass(frozen=True)
class Limits:
    """The limits of the router. body: bytes of a request; arrival: seconds for it; seconds: for a reply.

    shares_prefixes: True if the users of different API keys share the prefix cache.
    """

    body: int
    arrival: float
    seconds: float
    shares_prefixes: bool


class Router:
    """The ASGI application. The replicas check keys, hosts and parameters, because requests reach them as they are."""

    def __init__(self, replicas: Replicas, limits: Limits, connections: Connections):
        self._replicas, self._limits, self._connections = replicas, limits, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
        if path in PROBES and method in ("GET", "POST"):
            return await self._status(path)(scope, receive, send)
        try:
            body = await self._body(receive, headers)
            work = self._metrics(scope, send) if path == "/metrics" else self._pass_on(scope, headers, body, send)
            await while_connected(receive, work, self._limits.seconds + GRACE_S)
        except ClientDisconnected:
            return
        except ApiError as error:
            scope["record"].error = error.for_log
            reply = Response(error.reply.to_json(), error.status, error.headers, media_type="application/json")
            await reply(scope, receive, send)

    def _status(self, path: str) -> Response:
        if path != "/ready":
            return Response(Status(status="ok").to_json(), media_type="application/json")
        is_ready = bool(self._replicas.ready)
        status = Status(status="ready" if is_ready else "unavailable")
        return Response(status.to_json(), 200 if is_ready else 503, media_type="application/json")

    async def _body(self, receive: Receive, headers: Headers) -> bytes:
        """The body of a request. ApiError 413 if it is too large, 408 if it takes too long."""
        seconds = self._limits.arrival
        try:
            return await asyncio.wait_for(read_body(receive, headers, self._limits.body), seconds)
        except TimeoutError:
            raise ApiError(
                408, f"the body has not arrived within {seconds:g} s", headers={"Connection": "close"}
            ) from None

    async def _pass_on(self, scope: Scope, headers: Headers, body: bytes, send: Send) -> None:
        """Pass a request on. If its replica is lost before a part of the body was sent, pass it to another one, once."""
        owner = "" if self._limits.shares_prefixes else key_in(headers)
        record: Record = scope["record"]
        prefix, reply = prefix_of(owner, body), _Reply(send, record)
        lost: list[Replica] = []
        while len(lost) < 2:
            try:
                replica = self._replicas.choose(prefix, lost)
            except ApiError as error:
                return await reply.fail(error)
            replica.open, replica.taken = replica.open + 1, replica.taken + 1
            record.is_passed_on = True
            try:
                return await reply.relay(replica, _request(scope, body), body)
            except LOST:
                lost.append(replica)
                record.is_passed_on = False
                if reply.has_content:
                    break
            finally:
                replica.open -= 1
        await reply.fail(ApiError(503, LOST_MESSAGE, code="unavailable"))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """The metrics of all replicas, each with the label `replica`, and those of the connections of clients."""
        lines: dict[str, list[str]] = {}
        for replica in self._replicas.ready:
            try:
                start, text = await _whole(replica.path, _request(scope, b""))
            except LOST:
                continue
            if start.status_code != 200:
                return await Response(text, start.status_code, media_type="application/json")(scope, _nothing, send)
            add_metrics(lines, text.decode(), replica.number)
        add_metrics(lines, router_metrics(self._connections, len(self._replicas.ready)), None)
        all_lines = "".join(line for family in lines.values() for line in family)
        await Response(all_lines, media_type="text/plain; version=0.0.4")(scope, _nothing, send)


@dataclass
class _Reply:
    """The reply to a client.

    Attributes:
        has_begun: True once the status and the headers were sent.
        has_content: True once a part of the body was sent.
        headers: The headers that were sent.
    """

    send: Send
    record: Record
    has_begun: bool = False
    has_content: bool = False
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def relay(self, replica: Replica, request: h11.Request, body: bytes) -> None:
        """Pass on what a replica replies."""
        async with aclosing(exchange(replica.path, request, body)) as events:
            async for event in events:
                if isinstance(event, h11.Data):
                    self.has_content = True
                    await self.send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                elif not self.has_begun:
                    assert isinstance(event, h11.Response)
                    self.headers = [row for row in event.headers if row[0] not in OF_CONNECTION]
                    await self.send(
                        {"type": "http.response.start", "status": event.status_code, "headers": self.headers}
                    )
                    self.has_begun = True
                elif event.status_code != 200:  # of the second replica, after the first one has begun a stream
                    return await self.fail(ApiError(503, LOST_MESSAGE))
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Raise the error if nothing was sent; end a stream with it; leave another reply incomplete."""
        self.record.error, self.record.is_passed_on = error.for_log, False
        if not self.has_begun:
            raise error
        if dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            data = f"\n\ndata: {error.reply.to_json()}\n\n"
            await self.send({"type": "http.response.body", "body": data.encode()})


async def exchange(path: str, request: h11.Request, body: bytes) -> AsyncGenerator[h11.Response | h11.Data, None]:
    """Send a request to a Unix socket, and yield the parts of the reply. One of LOST if the server is lost."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = h11.Connection(h11.CLIENT)
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Response | h11.Data):
                yield event
    finally:
        writer.close()


async def _whole(path: str, request: h11.Request) -> tuple[h11.Response, bytes]:
    """The head and the body of a reply."""
    events = [event async for event in exchange(path, request, b"")]
    start = events[0]
    assert isinstance(start, h11.Response)
    return start, b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data))


def _request(scope: Scope, body: bytes) -> h11.Request:
    """The request for a replica, on a connection of its own."""
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", b"") + (b"?" + query if query else b"")
    record: Record = scope["record"]
    kept = [row for row in scope["headers"] if row[0] not in (*OF_CONNECTION, *REPLACED)]
    kept += [(b"x-request-id", record.id.encode()), (b"x-forwarded-for", record.client.encode())]
    if b"host" not in dict(kept):  # HTTP/1.0
        kept.append((b"host", b"localhost"))
    length = (b"content-length", str(len(body)).encode())
    return h11.Request(method=scope["method"], target=target, headers=[*kept, length, (b"connection", b"close")])


def prefix_of(owner: str, body: bytes) -> bytes:
    """Return a digest of the owner, the model and the beginning of the prompt in a body; b"" if there is no prompt."""
    try:
        fields = json.loads(body)
        prompts = [fields[name] for name in PROMPTS if name in fields] if isinstance(fields, dict) else []
        beginning = f"{fields.get('model')}\n{json.dumps(prompts)[:PREFIX_LENGTH]}" if prompts else ""
    except (ValueError, RecursionError):
        return b""
    return hashlib.sha256(f"{owner}\n{beginning}".encode()).digest() if prompts else b""


def add_metrics(lines: dict[str, list[str]], text: str, replica: int | None) -> None:
    """Add metrics to {name of a family: its lines}. replica: a label for those of a replica, whose connections are left out;
    None for those of the router.
    """
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("# HELP "):
            name = line.split()[2]
        if name.startswith(f"{PREFIX}connections") and replica is not None:
            continue
        family = lines.setdefault(name, [])
        if not line.startswith("#") and replica is not None:
            family.append(re.sub(r"^(\w+)(?:\{(.*)\})? ", rf'\1{{\2,replica="{replica}"}} ', line).replace("{,", "{"))
        elif line not in family:
            family.append(line)


async def _nothing() -> dict:
    return {"type": "http.disconnect"}
