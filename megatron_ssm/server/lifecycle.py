"""Starting and ending the server on rank 0: the driver's thread, and what happens when the engine fails."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from megatron_ssm.engine.engine import Engine
from megatron_ssm.parallel.heartbeat import Watch

from .app import make_app
from .channel import Channel
from .connections import Connections
from .driver import Driver
from .hosts import Hosts
from .keys import Keys
from .metrics import Metrics
from .prepared_request import ServedModel
from .sequences import Update
from .server import ERRORS_S, INTERRUPTED, Server
from .service import Service

log = logging.getLogger(__name__)

LAST_STEP_S = 60.0  # for the engine to end its last step, after all requests have ended


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
