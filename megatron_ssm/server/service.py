"""Keeps the requests that are being prepared, waiting or running, for asyncio's thread, and limits their number and time."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from .driver import Driver
from .errors import ApiError
from .sequences import Sequence, Update
from .shutdown import Shutdown

LONGEST_RETRY_S = 60
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The limits on requests.

    Args:
        slots: The number of sequences in the batch.
        waiting: The number of further requests, of one or several sequences, that may be prepared or wait for a slot.
        body: The largest body of a request, in bytes.
        seconds: The time from the arrival of a request to the end of its reply.
        connections: The number of connections at a time.
        arrival: The seconds within which the headers of a request must arrive, and again its body.
    """

    slots: int
    waiting: int
    body: int
    seconds: float
    connections: int
    arrival: float


class Service:
    """Adds sequences to the engine within the limits, and passes on the driver's updates. For asyncio's thread only."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._driver: Driver | None = None
        self._open: dict[Sequence, asyncio.Queue[Update]] = {}  # sequences that have not ended, and where updates go
        self._added = 0  # the number of requests with open sequences
        # One thread for each request that may be prepared, so that no request waits while the grammar of another one is
        # checked. A thread starts when no other is idle, and takes 0.04 MB.
        self._pool = ThreadPoolExecutor(limits.slots + limits.waiting, "requests")
        self._prepared: set[Future[Any]] = set()  # of requests that are being prepared; may include finished ones
        self._shutdown_of_new = Shutdown()  # refuses new requests, and those that are arriving
        self._shutdown_of_all = Shutdown()  # also refuses requests that are being prepared
        self._mean_s = 1.0  # running mean of the time that a request is open, waiting included

    @property
    def is_ready(self) -> bool:
        """Return True if requests are accepted."""
        return not self._shutdown_of_new.reason

    def start(self, driver: Driver) -> None:
        """Accept requests; `driver` steps the engine."""
        self._driver = driver

    def drain(self) -> None:
        """From now on, refuse requests with the status 503, including those whose bodies have not arrived yet.

        Requests that are open or being prepared go on.
        """
        self._shutdown_of_new.refuse_requests("the server is shutting down")

    def stop(self) -> None:
        """Prepare no further requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self, reason: str) -> None:
        """Refuse new requests, and end those that are arriving, being prepared or open, all with the status 503."""
        self._shutdown_of_new.refuse_requests(reason)
        self._shutdown_of_all.refuse_requests(reason)
        self._end(list(self._open), 503, reason, "unavailable")

    async def arrived(self, body: Awaitable[T]) -> T:
        """The body of a request, once it has arrived. ApiError 408 if the body takes too long, 503 after `drain` or
        `close`.
        """
        seconds = min(self.limits.arrival, self.limits.seconds)
        late = ApiError(408, f"the body has not arrived within {seconds:g} s", headers={"Connection": "close"})
        return await self._shutdown_of_new.result_of(body, seconds, late)

    async def prepare(self, work: Callable[[], T], since: float) -> T:
        """The result of `work` for a request that has arrived at the time `since`, in a thread.

        The request has a place in the queue until the work is done, even if its client disconnects before, because a thread
        cannot be stopped. ApiError as from `check_room`, 504 if the work takes too long, 503 after `close`.
        """
        self.check_room()
        future = self._pool.submit(work)
        self._prepared.add(future)
        late = ApiError(504, self._late, code="timeout")
        return await self._shutdown_of_all.result_of(asyncio.wrap_future(future), self._left(since), late)

    @contextmanager
    def added(self, sequences: list[Sequence], since: float) -> "Iterator[asyncio.Queue[Update]]":
        """Context: add the sequences of a request that has just been prepared, and yield the queue of their updates. At the
        end, sequences that are still open are cancelled.

        since: the time at which it arrived. ApiError 503 after `close`. The last update of a sequence says that it has
        finished, or has an error: 504 if the time is over.
        """
        self._shutdown_of_all.check()
        assert self._driver is not None, "the service has been started"
        updates: asyncio.Queue[Update] = asyncio.Queue()
        start = time.monotonic()
        self._added += 1
        for sequence in sequences:
            self._open[sequence] = updates
            self._driver.add(sequence)
        timer = asyncio.get_running_loop().call_later(
            self._left(since), self._end, sequences, 504, self._late, "timeout"
        )
        try:
            yield updates
        finally:
            timer.cancel()
            self._added -= 1
            self._mean_s += 0.1 * (time.monotonic() - start - self._mean_s)
            self._end(sequences, 499, "the client has disconnected", "disconnected")

    def deliver(self, updates: list[Update]) -> None:
        """Pass on updates from the driver. Updates of sequences that this service has ended are dropped."""
        for update in updates:
            is_last = update.error is not None or update.finished is not None
            updates_of = self._open.pop(update.sequence, None) if is_last else self._open.get(update.sequence)
            if updates_of is not None:
                updates_of.put_nowait(update)

    def _end(self, sequences: list[Sequence], status: int, message: str, code: str) -> None:
        """End with an error each of these sequences that is open."""
        for sequence in sequences:
            updates = self._open.pop(sequence, None)
            if updates is not None and self._driver is not None:
                self._driver.cancel(sequence)
                updates.put_nowait(Update(sequence, error=ApiError(status, message, code=code)))

    @property
    def _late(self) -> str:
        return f"the request has taken more than {self.limits.seconds:g} s"

    def _left(self, since: float) -> float:
        """The seconds that are left for the reply to a request that arrived at the time `since`."""
        return max(0.0, since + self.limits.seconds - time.monotonic())

    def check_room(self) -> None:
        """ApiError 503 if no requests are accepted, 429 if too many are waiting."""
        self._shutdown_of_new.check()
        self._prepared = {future for future in self._prepared if not future.done()}
        if self._added + len(self._prepared) >= self.limits.slots + self.limits.waiting:
            seconds = min(LONGEST_RETRY_S, math.ceil(self._mean_s))
            raise ApiError(
                429, "there is no room for another request to run or wait; try again later", code="queue_full",
                headers={"Retry-After": str(seconds)},
            )  # fmt: skip
