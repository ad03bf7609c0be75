"""Refuses requests because the server is about to end, including requests that wait in an `await`."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from .errors import ApiError

T = TypeVar("T")


class Shutdown:
    """Refuses requests with the status 503 once it has begun. For asyncio's thread only.

    The connections of refused requests are closed, because the server ends soon after.

    Args:
        reason: The reason of the shutdown; "" before it has begun.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._has_begun = asyncio.Event()

    def refuse_requests(self, reason: str) -> None:
        """From now on, refuse requests for this reason, including requests that wait in `result_of`."""
        self.reason = reason
        self._has_begun.set()

    def check(self) -> None:
        """ApiError 503 if requests are refused."""
        if self.reason:
            raise ApiError(503, self.reason, code="unavailable", headers={"Connection": "close"})

    async def result_of(self, work: Awaitable[T], seconds: float, late: ApiError) -> T:
        """Return the result of `work`. After `seconds`, cancel it and raise `late`; on a shutdown, cancel it and raise
        ApiError 503.
        """
        task, refused = asyncio.ensure_future(work), asyncio.ensure_future(self._has_begun.wait())
        try:
            await asyncio.wait((task, refused), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.check()
            raise late
        finally:
            task.cancel()  # no effect on a task that is done
            refused.cancel()
