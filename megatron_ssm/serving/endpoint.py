"""The endpoints that generate: they take an HTTP request, and reply with a JSON object or a stream of events."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from megatron_ssm.api.errors import ApiError
from megatron_ssm.api.prepared_request import PreparedRequest, ServedModel, prepare_request
from megatron_ssm.api.replies import Piece, Replies
from megatron_ssm.api.reply_models import ReplyModel
from megatron_ssm.api.request_models import Body
from megatron_ssm.api.sequences import Update

from .keys import Keys
from .metrics import Metrics
from .service import Service

GRACE_S = 30.0  # seconds for a client to read the rest of a reply after the time limit of the request
PING_S, PING = 10.0, ": ping\n\n"  # a comment, for clients and proxies that give up on connections without data
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class ClientDisconnected(Exception):
    """The client has closed the connection, so there is nobody to reply to."""


class Endpoint:
    """An ASGI application that answers the requests to one path under /v1. model: the pydantic class of their bodies.

    Raises ApiError if a request is refused or fails before its reply has begun. A stream begins when the request waits for a
    slot; a later error is its last event.
    """

    def __init__(self, model: type[Body], service: Service, served: ServedModel, keys: Keys, metrics: Metrics):
        self._model, self._service, self._served, self._keys, self._metrics = model, service, served, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        headers = Headers(scope=scope)
        owner = self._keys.owner(headers.get("authorization"))
        self._service.check_room()  # before work that would be unused
        try:
            body = await read_body(receive, headers, self._service)
            seconds = self._service.limits.seconds + GRACE_S
            await while_connected(receive, self._answer(body, owner, arrival, send), seconds)
        except ClientDisconnected:
            return

    async def _answer(self, body: bytes, owner: str, arrival: float, send: Send) -> None:
        """Send the reply to a request with this body. arrival: the time at which the request began to arrive."""
        work = partial(prepare_request, self._model, body, owner, self._served)
        request = await self._service.prepare(work, arrival)
        with self._service.added(request.sequences, arrival, request.parameter_of_count) as updates:
            replies = Replies(request, self._served)
            pieces = self._pieces(len(request.sequences), replies, updates, arrival)
            if request.body.stream:
                await _stream(request, replies, pieces, send)
            else:
                await _whole(replies, pieces, send)

    async def _pieces(
        self, left: int, replies: Replies, updates: "asyncio.Queue[Update]", arrival: float
    ) -> AsyncIterator[Piece | None]:
        """Yields the parts of all replies as they come, and None after PING_S without a part. left: the number of
        replies.
        """
        firsts: dict[int, float] = {}
        tokens = [0] * left
        while left:
            getting = asyncio.ensure_future(updates.get())
            try:  # not asyncio.wait_for, which in Python 3.11 loses a cancellation that comes together with an update
                while not (await asyncio.wait({getting}, timeout=PING_S))[0]:
                    yield None
            finally:
                getting.cancel()  # no effect on a task that is done
            update = getting.result()
            if update.error is not None:
                raise update.error
            index, now = update.sequence.index, time.monotonic()
            if update.tokens and index not in firsts:
                firsts[index] = now
                self._metrics.observe_first_token(now - arrival)
            tokens[index] += len(update.tokens)
            if update.finished is not None:
                left -= 1
                self._metrics.observe_reply(now - firsts.get(index, now), tokens[index])
            yield replies.add_update(update)


class WorkEndpoint:
    """An ASGI application that replies with the result of `work` for a request's body, computed in a thread. Raises the
    ApiErrors of `work`.
    """

    def __init__(
        self, work: Callable[[bytes, ServedModel], ReplyModel], service: Service, served: ServedModel, keys: Keys
    ):
        self._work, self._service, self._served, self._keys = work, service, served, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        headers = Headers(scope=scope)
        self._keys.owner(headers.get("authorization"))
        self._service.check_room()
        try:
            body = await read_body(receive, headers, self._service)
            await while_connected(receive, self._answer(body, arrival, send), self._service.limits.seconds + GRACE_S)
        except ClientDisconnected:
            return

    async def _answer(self, body: bytes, arrival: float, send: Send) -> None:
        work = partial(self._work, body, self._served)
        await _send_json(await self._service.prepare(lambda: work().to_json().encode(), arrival), send)


async def _whole(replies: Replies, pieces: AsyncIterator[Piece | None], send: Send) -> None:
    """Send one JSON object when all replies are complete. A thread makes its text, because it may be large."""
    wholes: dict[int, Piece] = {}
    async for piece in pieces:
        if piece is None:
            continue
        if piece.index in wholes:
            wholes[piece.index].extend(piece)
        else:
            wholes[piece.index] = piece
    ordered = [wholes[index] for index in sorted(wholes)]
    body = await asyncio.to_thread(lambda: replies.whole(ordered).to_json().encode())
    await _send_json(body, send)


async def _send_json(body: bytes, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(request: PreparedRequest, replies: Replies, pieces: AsyncIterator[Piece | None], send: Send) -> None:
    """Send the headers at once, each part as an event, and a comment whenever nothing was sent for PING_S."""
    sent_at = time.monotonic()

    async def send_text(text: str) -> None:
        nonlocal sent_at
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        sent_at = time.monotonic()

    async def event(data: str) -> None:
        await send_text(f"data: {data}\n\n")

    def encoded(piece: Piece) -> str:
        return replies.chunk(piece).to_json()

    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    try:
        async for piece in pieces:
            if piece is not None and (piece.is_shown or request.shows_tokens):
                await event(await asyncio.to_thread(encoded, piece) if piece.prompt_logprobs else encoded(piece))
            elif time.monotonic() - sent_at >= PING_S:
                await send_text(PING)
        if request.body.includes_usage:
            await event(replies.last_chunk().to_json())
        await event("[DONE]")
    except ApiError as error:
        await event(error.reply.to_json())
    await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, answer: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run `answer`. If the client disconnects first, or after `seconds`, cancel `answer` and raise ClientDisconnected."""
    tasks = [asyncio.create_task(answer), asyncio.create_task(_wait_for_disconnect(receive))]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # no effect on a task that is done
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0].cancelled():
        raise ClientDisconnected
    tasks[0].result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, headers: Headers, service: Service) -> bytes:
    """Return the body of a request. ApiError 413 if it is too large; also the errors of `Service.arrived`."""
    limit, length = service.limits.body, headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    return await service.arrived(_read(receive, limit))


async def _read(receive: Receive, limit: int) -> bytes:
    """The body of a request."""
    data, is_complete = bytearray(), False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        data += message.get("body", b"")
        if len(data) > limit:
            raise _too_large(limit)
        is_complete = not message.get("more_body", False)
    return bytes(data)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body of the request has more than {limit} bytes", headers={"Connection": "close"})
