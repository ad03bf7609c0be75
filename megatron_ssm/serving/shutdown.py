"""Refuses requests because the server is about to end, also those that wait for something."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from megatron_ssm.api.errors import ApiError

T = TypeVar("T")


class Shutdown:
    """Refuses requests with the status 503 once it has begun. For asyncio's thread only.

    Their connections are closed, because the server ends soon after.

    Args:
        reason: Why the server ends; "" before.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._has_begun = asyncio.Event()

    def refuse_requests(self, reason: str) -> None:
        """Refuse requests from now on, for this reason, and those that wait in `result_of`."""
        self.reason = reason
        self._has_begun.set()

    def check(self) -> None:
        """ApiError 503 if requests are refused."""
        if self.reason:
            raise ApiError(503, self.reason, code="unavailable", headers={"Connection": "close"})

    async def result_of(self, work: Awaitable[T], seconds: float, late: ApiError) -> T:
        """Return the result of `work`. It is cancelled, with the error `late`, after `seconds`; with 503, by a shutdown."""
        task, refused = asyncio.ensure_future(work), asyncio.ensure_future(self._has_begun.wait())
        try:
            await asyncio.wait((task, refused), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.check()
            raise late
        finally:
            task.cancel()  # nothing happens to one that is done
            refused.cancel()
