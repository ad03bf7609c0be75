"""The command `megatron-ssm serve --replicas R`: a router, and R servers that it starts."""

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_ssm.parallel.local_launch import handle_like_sigterm

from .access_log import AccessLog
from .announcement import address, announce
from .connections import Connections, allow_files, bind
from .replicas import Replicas, replica_environments
from .router import Limits, Router
from .server import Server

FILES_EACH = 2  # of a connection of a client: its own, and that to the replica
END_S = 10.0  # for the replicas to end, after their requests


def serve_replicas(arguments: Namespace, argv: Sequence[str]) -> None:
    """Start the replicas, and pass requests on to them until a signal ends the server. argv: the arguments of the process.

    ValueError if the address is wrong or taken. SystemExit with the exit code of a replica that does not start.
    KeyboardInterrupt after SIGINT.
    """
    with ExitStack() as stack:
        handle_like_sigterm()
        allow_files(arguments.max_connections, FILES_EACH)
        listener = stack.enter_context(bind(arguments.host, arguments.port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron-ssm-")))  # only this user's
        ranks = (arguments.tp or 1) * arguments.ep
        replicas = Replicas(
            [*argv, "--host", listener.getsockname()[0]], replica_environments(arguments.replicas, ranks), folder,
            slack=arguments.slots // 4,
        )  # fmt: skip
        limits = Limits(
            int(arguments.max_body_mb * 2**20), arguments.arrival_timeout, arguments.request_timeout,
            arguments.share_prefixes,
        )  # fmt: skip
        size = f"{arguments.replicas} replicas of {arguments.slots} slots of {arguments.max_length} tokens"
        name = (arguments.served_model_name or [Path(arguments.model).resolve().name])[0]

        async def run() -> Server:
            connections = Connections(arguments.max_connections, arguments.arrival_timeout)
            app = AccessLog(Router(replicas, limits, connections))
            server = Server(
                app, replicas, connections, arguments.drain_timeout,
                lambda: announce(name, address(arguments, listener), size, replicas=arguments.replicas),
            )  # fmt: skip
            if code := await replicas.start():
                raise SystemExit(code)
            await server.serve(sockets=[listener])
            return server

        stack.callback(replicas.end, END_S)
        if asyncio.run(run()).is_interrupted:
            raise KeyboardInterrupt
