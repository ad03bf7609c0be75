"""Starts and ends the server on rank 0: handles signals, the driver's thread, and failures of the engine."""

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from megatron_ssm.api.prepared_request import ServedModel
from megatron_ssm.api.sequences import Update
from megatron_ssm.inference.engine import Engine
from megatron_ssm.parallel.heartbeat import Watch

from .app import make_app
from .channel import Channel
from .connections import ACCEPTED_AT_ONCE, Connections
from .driver import Driver
from .hosts import Hosts
from .keys import Keys
from .metrics import Metrics
from .service import Service

log = logging.getLogger(__name__)

INTERRUPTED = 130  # the exit code after SIGINT
ERRORS_S = 1.0  # seconds for clients to receive the errors that end their requests, before connections are closed
DRAIN_ERRORS_S = 2  # the same after the drain time-out; then uvicorn closes connections with unread data
QUEUE = 2048  # connections that the system keeps until they are accepted
LAST_STEP_S = 60.0  # seconds for the engine to end its last step, after all requests have ended


class Server(uvicorn.Server):
    """uvicorn with other handlers of signals.

    After SIGTERM, no connections are accepted, and open requests are finished; requests that are still open after `drain_s`
    seconds end with an error. After SIGINT, all requests end with an error. A second SIGINT ends the process at once.

    is_interrupted: True after a SIGINT. why_aborted: the argument of `abort`, or "" if it was not called.
    """

    def __init__(
        self, app: ASGIApp, service: Service, connections: Connections, drain_s: int, announce: Callable[[], None]
    ):
        protocol: Any = connections.protocol
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
                proxy_headers=False, timeout_graceful_shutdown=drain_s + DRAIN_ERRORS_S,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=math.ceil(connections.seconds) + 1,  # later than `connections` closes one
            )
        )  # fmt: skip
        self.is_interrupted, self.why_aborted = False, ""
        self._service, self._drain_s, self._announce = service, drain_s, announce
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and announce the server. ValueError if another server now listens at the address."""
        for listener in sockets or ():
            # Connections inherit this option, so that a later server can be bound while they linger.
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
        self._service.drain()
        self.should_exit = True
        self._loop.call_later(self._drain_s, self._service.close, "the server is shutting down")

    def abort(self, reason: str) -> None:
        """End all requests with an error, and the server soon after, even if clients do not close their connections."""
        self.why_aborted = reason
        self._service.close(reason)
        self.should_exit = True
        self._loop.call_later(ERRORS_S, setattr, self, "force_exit", True)
        self._loop.call_later(2 * ERRORS_S, os._exit, INTERRUPTED if self.is_interrupted else 1)


def run_server(
    engine: Engine, channel: Channel, served: ServedModel, keys: Keys, hosts: Hosts, service: Service,
    listener: socket.socket, drain_s: int, announce: Callable[[], None], watch: Watch,
) -> None:  # fmt: skip
    """Serve until a signal comes, or the engine fails. announce: Called when connections are accepted.

    watch: The watch of the ranks; if a rank is lost, all requests end with an error before the process ends. Returns after
    SIGTERM. Raises KeyboardInterrupt after SIGINT; the error of the engine if it has failed; RuntimeError if a rank was
    lost; ValueError if another server listens at the address. In each case the other ranks are told to end their loops.
    """

    async def run() -> tuple[Driver, Server]:
        loop = asyncio.get_running_loop()

        def deliver(updates: list[Update]) -> None:
            loop.call_soon_threadsafe(service.deliver, updates)

        def fail(error: BaseException) -> None:
            log.error(f"megatron-ssm: the engine has failed: {' '.join(str(error).split())}")
            loop.call_soon_threadsafe(server.abort, "the engine has failed")

        def lose_rank() -> None:
            loop.call_soon_threadsafe(server.abort, "a rank of the server was lost")

        driver = Driver(engine, channel, deliver, fail)
        connections = Connections(service.limits.connections, service.limits.arrival)
        app = make_app(service, served, keys, Metrics(lambda: driver.load, connections), hosts)
        server = Server(app, service, connections, drain_s, announce)
        service.start(driver)
        driver.start()
        watch.on_loss = lose_rank
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.on_loss = lambda: None  # the loop is about to end
            driver.stop()
            service.stop()
            await asyncio.to_thread(driver.join, ERRORS_S if server.is_interrupted else LAST_STEP_S)
        return driver, server

    driver, server = asyncio.run(run())
    if driver.is_alive():  # in the middle of a step, so nothing that it uses may be released
        os._exit(INTERRUPTED if server.is_interrupted else 1)
    if driver.error is not None:
        raise driver.error
    if server.is_interrupted:
        raise KeyboardInterrupt
    if server.why_aborted:
        raise RuntimeError(server.why_aborted)
