"""Keeps the sequences that are being prepared, waiting or running, for asyncio's thread, and limits their number and
time.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_ssm.api.errors import ApiError, bad_request
from megatron_ssm.api.sequences import Sequence, Update

from .driver import Driver
from .shutdown import Shutdown

LONGEST_RETRY_S = 60
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The limits on requests.

    Args:
        slots: The number of sequences in the batch.
        waiting: The number of further sequences that may wait for a slot; a request that is being prepared counts as one.
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


@dataclass
class _Open:
    """A sequence that has not ended: the queue of its client's updates, and the time at which it was added."""

    updates: "asyncio.Queue[Update]"
    since: float


class Service:
    """Adds sequences to the engine within the limits, and passes on the driver's updates. For asyncio's thread only."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._driver: Driver | None = None
        self._open: dict[Sequence, _Open] = {}
        # One thread for each request that may be prepared, so that no request waits while the grammar of another one is
        # checked.
        self._pool = ThreadPoolExecutor(limits.slots + limits.waiting, "requests")
        self._prepared: set[Future[Any]] = set()  # of requests that are being prepared; may include finished ones
        self._shutdown_of_new = Shutdown()  # refuses new requests, and those that are arriving
        self._shutdown_of_all = Shutdown()  # also refuses requests that are being prepared
        self._mean_s = 1.0  # running mean of the time that a sequence is open, waiting included

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
    def added(
        self, sequences: list[Sequence], since: float, param: str | None = None
    ) -> "Iterator[asyncio.Queue[Update]]":
        """Context: add a client's sequences, and yield the queue of their updates. At the end, sequences that are still open
        are cancelled.

        The request has been prepared. since: the time at which it arrived. param: the parameter that determines the number
        of sequences. ApiError 400 if there is never room for this many, 503 after `close`, 429 if too many are waiting. The
        last update of a sequence says that it has finished, or has an error: 504 if the time is over.
        """
        self._shutdown_of_all.check()
        self._check_count(len(sequences), param)
        assert self._driver is not None, "the service has been started"
        updates: asyncio.Queue[Update] = asyncio.Queue()
        for sequence in sequences:
            self._open[sequence] = _Open(updates, time.monotonic())
            self._driver.add(sequence)
        timer = asyncio.get_running_loop().call_later(
            self._left(since), self._end, sequences, 504, self._late, "timeout"
        )
        try:
            yield updates
        finally:
            timer.cancel()
            self._end(sequences, 499, "the client has disconnected", "disconnected")

    def deliver(self, updates: list[Update]) -> None:
        """Pass on updates from the driver. Updates of sequences that this service has ended are dropped."""
        for update in updates:
            entry = self._open.get(update.sequence)
            if entry is None:
                continue
            if update.error is not None or update.finished is not None:
                self._pop(update.sequence)
            entry.updates.put_nowait(update)

    def _end(self, sequences: list[Sequence], status: int, message: str, code: str) -> None:
        """End with an error each of these sequences that is open."""
        for sequence in sequences:
            entry = self._pop(sequence)
            if entry is not None and self._driver is not None:
                self._driver.cancel(sequence)
                entry.updates.put_nowait(Update(sequence, error=ApiError(status, message, code=code)))

    def _pop(self, sequence: Sequence) -> _Open | None:
        """Remove a sequence from the open ones, and update the mean time. None if it is not open."""
        entry = self._open.pop(sequence, None)
        if entry is not None:
            self._mean_s += 0.1 * (time.monotonic() - entry.since - self._mean_s)
        return entry

    @property
    def _late(self) -> str:
        return f"the request has taken more than {self.limits.seconds:g} s"

    def _left(self, since: float) -> float:
        """The seconds that are left for the reply to a request that arrived at the time `since`."""
        return max(0.0, since + self.limits.seconds - time.monotonic())

    def check_room(self) -> None:
        """ApiError 503 if no requests are accepted, 429 if too many are waiting."""
        self._shutdown_of_new.check()
        self._check_count(1, None)

    def _check_count(self, count: int, param: str | None) -> None:
        """ApiError if there is no room for `count` further sequences. param: the parameter that determines `count`."""
        room = self.limits.slots + self.limits.waiting
        if count > room:
            raise bad_request(f"the request asks for {count} replies, and the server takes at most {room}", param)
        self._prepared = {future for future in self._prepared if not future.done()}
        if len(self._open) + len(self._prepared) + count > room:
            seconds = min(LONGEST_RETRY_S, math.ceil(self._mean_s))
            raise ApiError(
                429, f"there is no room for {count} more replies to run or wait; try again later", code="queue_full",
                headers={"Retry-After": str(seconds)},
            )  # fmt: skip
