"""The bodies of requests, and clients that disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from .errors import ApiError


class ClientDisconnected(Exception):
    """The client has closed the connection, so there is nobody to reply to."""


async def while_connected(receive: Receive, answer: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run `answer`. ClientDisconnected if the client disconnects first, or the time is over; `answer` is cancelled then."""
    tasks = [asyncio.create_task(answer), asyncio.create_task(_wait_for_disconnect(receive))]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # nothing happens to one that is done
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0].cancelled():
        raise ClientDisconnected
    tasks[0].result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def read_body(receive: Receive, headers: Headers, limit: int) -> Coroutine[Any, Any, bytes]:
    """Return a coroutine that reads the body of a request. ApiError 413 if it has more than `limit` bytes."""
    length = headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    return _read(receive, limit)


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
