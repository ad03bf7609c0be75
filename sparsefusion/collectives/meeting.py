"""Where the ranks of a launcher meet: rank 0's store, or torchrun's. Ranks that wait for long say for whom, and where."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from sparsefusion.foundation.launcher import LauncherError, launched_ranks, meeting_address, this_rank

from .agreement import PATIENCE_S


def meet(timeout: timedelta) -> tuple[dist.Store, str]:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; returns it and its address.

    LauncherError: the address is no address, or nothing answers there within `timeout`. After PATIENCE_S, this rank prints
    that it waits. The other ranks may not have come yet.
    """
    rank, world, (host, port) = this_rank(), launched_ranks(), meeting_address()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LauncherError(f"rank {rank} of {world}: MASTER_ADDR={host} cannot be resolved: {reason}") from None
    has_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    waits = f"waiting for {world if has_store else 1} of {world} ranks at {place}"
    who = "this rank cannot reach itself; MASTER_ADDR must be an address of its machine" if has_store else "rank 0"
    with _printed_if_late(f"rank {rank}: {waits}: {who}"):
        try:
            store = dist.TCPStore(host, port, world, has_store, timeout, wait_for_workers=False, multi_tenant=has_store)
        except dist.DistNetworkError as error:
            reason = str(error).partition("\n")[0]
            raise LauncherError(f"rank {rank} of {world} cannot meet the other ranks at {place}: {reason}") from None
    return store, place


@contextmanager
def _printed_if_late(line: str) -> Iterator[None]:
    """Print a line to stderr if the block takes more than PATIENCE_S."""
    timer = threading.Timer(PATIENCE_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
