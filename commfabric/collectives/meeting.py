"""The rendezvous of ranks in the store of rank 0 or of torchrun; a rank that waits long prints the missing ranks."""

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

from commfabric.foundation.command_line import first_line, shortened
from commfabric.foundation.launcher import LauncherError, launched_ranks, meeting_address, this_rank

from .agreement import Gather

PATIENCE_S = 5.0  # a rank that waits longer for other ranks prints a line


def meet(timeout: timedelta) -> tuple[dist.Store, str]:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; returns (store, address), without waiting for other ranks.

    After PATIENCE_S, this rank prints that it waits for the store. LauncherError if the address is invalid, or if the store
    cannot be reached within `timeout`.
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
            cause = first_line(error)
            raise LauncherError(f"rank {rank} of {world} cannot meet the other ranks at {place}: {cause}") from None
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
    """A function that gathers a JSON-serializable value of each rank, for `together` before there is a process group.

    Rank 0 returns last, because its process may hold the store.

    Args:
        store: The store that the ranks share.
        place: The address of the store. If given, a rank that waits for more than PATIENCE_S prints which ranks are missing,
            and the gather raises a LauncherError that names them after the store's timeout.
    """
    numbers = itertools.count()

    def gather(value: Any) -> list:
        key = f"gather-{next(numbers)}"
        sent, received = ([f"{key}/{other}/{name}" for other in range(world)] for name in ("value", "read"))
        store.set(sent[rank], json.dumps(value))
        if place:
            _wait_for_ranks(store, rank, sent, key, place)
        if rank:
            values = json.loads(store.get(key))
            store.set(received[rank], "1")
            return values
        values = [json.loads(store.get(name)) for name in sent]
        store.set(key, json.dumps(values))
        store.wait(received[1:])
        return values

    return gather


def _wait_for_ranks(store: dist.Store, rank: int, keys: Sequence[str], result: str, place: str) -> None:
    """Wait on rank 0 for all `keys`, on other ranks for the key `result`; after PATIENCE_S, print the missing ranks."""
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
        except dist.DistError:  # the timeout, or rank 0 has exited after its own
            raise LauncherError(f"rank {rank}: {number} did not come to {place} in time: {who}") from None
