"""The endpoints that compute: an HTTP request in, a JSON object or a stream of events out."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from .access_log import Record
from .bodies import ClientDisconnected, read_body, while_connected
from .embeddings import prepare_embeddings
from .errors import ApiError
from .keys import Keys
from .metrics import Metrics
from .prepared_request import PreparedRequest, ServedModel, prepare_request
from .replies import Piece, Replies
from .reply_models import ReplyModel
from .request_models import Body
from .response_replies import replies_to
from .response_request import ResponseRequest
from .sequences import Update
from .service import Service

GRACE_S = 30.0  # seconds for a client to read the rest of a reply after the time limit of the request
PING_S, PING = 10.0, ": ping\n\n"  # a comment, for clients and proxies that give up on connections without data
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class Endpoint:
    """An ASGI application that answers the requests to one path.

    ApiError, before the reply has begun, for a request that is refused or fails.
    """

    def __init__(self, service: Service, served: ServedModel, keys: Keys):
        self._service, self._served, self._keys = service, served, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["record"]
        headers = Headers(scope=scope)
        record.key = self._keys.owner(headers)
        self._service.check_room()  # before work that would be unused
        try:
            body = await self._service.arrived(read_body(receive, headers, self._service.limits.body))
            seconds = self._service.limits.seconds + GRACE_S
            await while_connected(receive, self._answer(body, record, send), seconds)
        except ClientDisconnected:
            return

    async def _answer(self, body: bytes, record: Record, send: Send) -> None:
        """Send the reply to a request with this body."""
        raise NotImplementedError


class GenerationEndpoint(Endpoint):
    """Generates. model: that of the bodies.

    A stream begins when the request waits for a slot; an error from then on is its last event.
    """

    def __init__(
        self, model: type[Body | ResponseRequest], service: Service, served: ServedModel, keys: Keys, metrics: Metrics
    ):
        super().__init__(service, served, keys)
        self._model, self._metrics = model, metrics

    async def _answer(self, body: bytes, record: Record, send: Send) -> None:
        work = partial(prepare_request, self._model, body, record.key, self._served)
        request = await self._service.prepare(work, record.arrival)
        record.sequences = request.sequences
        with self._service.added(request.sequences, record.arrival) as updates:
            replies = replies_to(request, self._served)
            pieces = self._pieces(replies, updates, record)
            if request.body.stream:
                await _stream(request, replies, pieces, send)
            else:
                await _whole(replies, pieces, send)

    async def _pieces(
        self, replies: Replies, updates: "asyncio.Queue[Update]", record: Record
    ) -> AsyncIterator[Piece | None]:
        """Yields the parts of all replies as they come, and None after PING_S without a part."""
        firsts: dict[int, float] = {}
        left = len(record.sequences)
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
                record.error = update.error.for_log
                raise update.error
            index, now, request = update.sequence.index, time.monotonic(), update.sequence.request
            if update.tokens and index not in firsts:
                firsts[index] = now
                record.first_token = record.first_token or now
                admitted_at = now if request is None else request.admitted_at or now
                self._metrics.observe_first_token(now - record.arrival, admitted_at - record.arrival)
            tokens[index] += len(update.tokens)
            if update.finished is not None:
                left -= 1
                self._metrics.observe_reply(now - firsts.get(index, now), tokens[index])
            yield replies.add_update(update)


class EmbeddingEndpoint(Endpoint):
    """Computes embeddings, of as many texts at a time as there are slots."""

    async def _answer(self, body: bytes, record: Record, send: Send) -> None:
        request = await self._service.prepare(partial(prepare_embeddings, body, self._served), record.arrival)
        record.sequences = request.sequences
        slots, left = self._service.limits.slots, request.sequences
        vectors: dict[int, list[float]] = {}
        while left:
            now, left = left[:slots], left[slots:]
            with self._service.added(now, record.arrival) as updates:
                for _ in now:
                    update = await updates.get()
                    if update.error is not None:
                        raise update.error
                    if update.finished == "error":
                        raise ApiError(500, "the hidden states of the model are NaN")
                    vectors[update.sequence.index] = update.embedding
        ordered = [vectors[index] for index in sorted(vectors)]
        work = partial(request.reply, ordered, self._served)
        await _send_json(await asyncio.to_thread(lambda: work().to_json().encode()), send)


class WorkEndpoint(Endpoint):
    """Replies with what `work` makes of a request's body, in a thread. ApiError as from `work`."""

    def __init__(
        self, work: Callable[[bytes, ServedModel], ReplyModel], service: Service, served: ServedModel, keys: Keys
    ):
        super().__init__(service, served, keys)
        self._work = work

    async def _answer(self, body: bytes, record: Record, send: Send) -> None:
        work = partial(self._work, body, self._served)
        await _send_json(await self._service.prepare(lambda: work().to_json().encode(), record.arrival), send)


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

    async def event(model: ReplyModel) -> None:
        await send_text(_event(model))

    def encoded(piece: Piece) -> str:
        return "".join(map(_event, replies.events(piece)))

    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    try:
        for model in replies.first_events():
            await event(model)
        async for piece in pieces:
            if piece is not None and (piece.is_shown or request.shows_tokens):
                await send_text(await asyncio.to_thread(encoded, piece) if piece.prompt_logprobs else encoded(piece))
            elif time.monotonic() - sent_at >= PING_S:
                await send_text(PING)
        for model in replies.last_events():
            await event(model)
        if replies.end_mark:
            await send_text(f"data: {replies.end_mark}\n\n")
    except ApiError as error:
        await event(replies.error_event(error))
    await send({"type": "http.response.body", "body": b""})


def _event(model: ReplyModel) -> str:
    """A server-sent event."""
    name = f"event: {model.event_name}\n" if model.event_name else ""
    return f"{name}data: {model.to_json()}\n\n"
