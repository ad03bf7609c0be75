"""Refusing requests because the server ends, also those that are waiting for something."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from megatron_ssm.api.errors import ApiError

T = TypeVar("T")


class Refusal:
    """Whether requests are refused, with the status 503. reason: why, or "" until they are. For asyncio's thread only.

    Their connections are closed, because the server ends soon after.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._has_begun = asyncio.Event()

    def begin(self, reason: str) -> None:
        """Refuse requests from now on, for this reason, and those that wait in `result_before`."""
        self.reason = reason
        self._has_begun.set()

    def check(self) -> None:
        """ApiError 503 if requests are refused."""
        if self.reason:
            raise ApiError(503, self.reason, code="unavailable", headers={"Connection": "close"})

    async def result_before(self, work: Awaitable[T], seconds: float, late: ApiError) -> T:
        """The result of `work`. The error `late` after so many seconds, or 503 once requests are refused, cancels it."""
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
