"""Where the ranks of a launcher meet: rank 0's store, or torchrun's. Ranks that wait for long say for whom, and where."""

import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparsefusion.foundation.command_line import shortened
from sparsefusion.foundation.launcher import LauncherError, launched_ranks, meeting_address, this_rank

from .agreement import Gather

PATIENCE_S = 5.0  # after which a rank that waits for others to come says so


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


def gather_in_store(store: dist.Store, rank: int, world: int, place: str = "") -> Gather:
    """A function that gathers a value of each rank, one that JSON has, for `together`, before there is a process group.

    store: the one in which the ranks meet. Rank 0, whose process may hold it, returns last. place: the address of the store.
    If it is given, a rank that waits for more than PATIENCE_S prints for whom, and the gather raises LauncherError, which
    names them, if they have not come within the store's time-out.
    """
    numbers = itertools.count()

    def gather(value: Any) -> list:
        key = f"gather-{next(numbers)}"
        own, read = ([f"{key}/{each}/{what}" for each in range(world)] for what in ("value", "read"))
        store.set(own[rank], json.dumps(value))
        if place:
            _wait_for_ranks(store, rank, own, key, place)
        if rank:
            values = json.loads(store.get(key))
            store.set(read[rank], "1")
            return values
        values = [json.loads(store.get(each)) for each in own]
        store.set(key, json.dumps(values))
        store.wait(read[1:])
        return values

    return gather


def _wait_for_ranks(store: dist.Store, rank: int, keys: Sequence[str], result: str, place: str) -> None:
    """Wait for the keys of all ranks, on others than rank 0 for its `result`; after PATIENCE_S, print whose are missing."""
    awaited = [result] if rank else list(keys)
    try:
        store.wait(awaited, timedelta(seconds=PATIENCE_S))
    except dist.DistStoreError:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        who = shortened(f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}")
        number = f"{len(missing)} of {len(keys)} ranks"
        print(f"rank {rank}: waiting for {number} at {place}: {who}", file=sys.stderr, flush=True)
        try:
            store.wait(awaited)
        except dist.DistError:  # the time-out, or rank 0 has ended after its own
            raise LauncherError(f"rank {rank}: {number} did not come to {place} in time: {who}") from None
