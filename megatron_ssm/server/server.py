"""uvicorn with the signals and the limits of this server."""

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn

from .access_log import AccessLog
from .connections import ACCEPTED_AT_ONCE, Connections

log = logging.getLogger(__name__)

INTERRUPTED = 130  # the exit code after SIGINT
ERRORS_S = 1.0  # for clients to receive the errors that end their requests, before their connections are closed
DRAIN_ERRORS_S = 2  # the same after the drain time-out; uvicorn then breaks off what a client does not read
QUEUE = 2048  # connections that the system keeps until they are accepted


class Work(Protocol):
    """The requests that are open."""

    def drain(self) -> None:
        """Refuse requests from now on; those that are open go on."""

    def close(self, reason: str) -> None:
        """Refuse requests, and end those that are open with an error."""


class Server(uvicorn.Server):
    """uvicorn with other signals. SIGTERM: no connections are accepted, and requests are finished.

    Those that are still open after `drain_s` seconds end with an error. SIGINT: requests end with an error; a second one
    ends the process at once. is_interrupted: whether there was one. why_aborted: the reason if `abort` was called, or "".
    """

    def __init__(
        self, app: AccessLog, service: Work, connections: Connections, drain_s: int, announce: Callable[[], None]
    ):
        protocol: Any = connections.protocol
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
                forwarded_allow_ips=["127.0.0.1", "::1"], timeout_graceful_shutdown=drain_s + DRAIN_ERRORS_S,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=math.ceil(connections.seconds) + 1,  # later than `connections` closes one
            )
        )  # fmt: skip
        self.is_interrupted, self.why_aborted = False, ""
        self._app, self._service, self._drain_s, self._announce = app, service, drain_s, announce
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so. ValueError if another server listens at the address by now."""
        for listener in sockets or ():
            # The connections inherit this, so that a later server can be bound while they linger.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.listen(QUEUE)
            except OSError as error:
                host, port, *_ = listener.getsockname()
                raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)  # uvicorn has given the system's queue the length of ACCEPTED_AT_ONCE
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End when the requests have ended, and say why."""
        await super().shutdown(sockets)
        log.info("end", extra={"fields": dict(requests=self._app.served, reason=self.why_aborted or "SIGTERM")})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's handler of SIGTERM and SIGINT."""
        if sig != signal.SIGINT:
            self._loop.call_soon_threadsafe(self._drain)
        elif self.is_interrupted:
            os._exit(INTERRUPTED)
        else:
            self.is_interrupted = True
            self._loop.call_soon_threadsafe(self.abort, "the server was interrupted")

    def _drain(self) -> None:
        if self.should_exit:
            return
        log.info("drain", extra={"fields": {"open": self._app.open}})
        self._service.drain()
        self.should_exit = True
        self._loop.call_later(self._drain_s, self._service.close, "the server is shutting down")

    def abort(self, reason: str) -> None:
        """End all requests with an error, and the server soon after, whatever its clients do."""
        self.why_aborted = reason
        self._service.close(reason)
        self.should_exit = True
        self._loop.call_later(ERRORS_S, setattr, self, "force_exit", True)
        self._loop.call_later(2 * ERRORS_S, os._exit, INTERRUPTED if self.is_interrupted else 1)
