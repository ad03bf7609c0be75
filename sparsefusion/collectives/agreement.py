"""Compares what the ranks were called with before they communicate: after different calls they would wait for ever."""

import hashlib
import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from sparsefusion.foundation.command_line import shortened
from sparsefusion.foundation.launcher import LauncherError

from .counted import all_gather_small

SHOWN = 320  # bytes of each rank's arguments that are gathered first
MOST = 2**16  # bytes after which no more are gathered
PATIENCE_S = 5.0  # after which a rank that waits for others to come says so
EQUAL = 80  # characters before the difference that an error shows

Gather = Callable[[torch.Tensor], torch.Tensor]  # a tensor (n,) of this rank -> those of all ranks, (P, n)
T = TypeVar("T")


def check_member(group: dist.ProcessGroup | None) -> None:
    """ValueError if `group` is neither None nor a process group of this rank (`new_group` gives others a number)."""
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        given = " ".join(repr(group).split())  # the repr of a tensor may have several lines
        raise ValueError(f"group {given:.60} is no process group that this rank is a member of")


def agree(gather: Gather, device: torch.device | str, asked: Callable[[], object], whose: str = "ranks") -> int:
    """Compare the arguments of all ranks. Returns a random number below 2^48, the same on all ranks.

    gather: an all-gather of int64 on `device`. asked: returns this rank's arguments, whose `repr` is compared, or a text of
    several lines, of which the error names the first that differs; or raises an error. whose: what the error calls the
    ranks. ValueError on every rank: the arguments differ, or are wrong on some ranks; an error that occurs on all ranks is
    raised as it is. Gathers 16 bytes per rank. If these differ, it gathers the beginning of the texts: SHOWN bytes, then
    twice as many, and so on, until a difference is found or MOST bytes are gathered.
    """
    wrong: Exception | None = None
    try:
        found = asked()
        text = found if isinstance(found, str) and "\n" in found else repr(found)
    except TypeError as error:  # a list where a number is meant, and so on
        wrong = ValueError(f"an argument is of the wrong type: {error}")
        text = repr(wrong)
    except Exception as error:  # of any kind: the others wait in the gather
        wrong, text = error, repr(error)
    digest = int.from_bytes(hashlib.sha256(_encode(text)).digest()[:8], "little", signed=True)
    try:
        gathered = gather(torch.tensor([digest, int.from_bytes(os.urandom(6), "little")], device=device)).cpu()
        different = (gathered[:, 0] != gathered[0, 0]).nonzero().flatten().tolist()
        if different:
            texts = _gather_text(gather, device, f"0{text}" if wrong is None else f"1{_described(wrong)}")
            raise ValueError(_difference(texts, different, whose))
        if wrong is not None:
            raise wrong
    finally:
        wrong = None  # its traceback refers to this function, which would keep the group until Python collects garbage
    return int(gathered[0, 1])


def gather_in_store(store: dist.Store, rank: int, world: int, place: str = "") -> Gather:
    """A function that gathers an integer tensor (n,) of each rank as (world, n) for `agree`, without a process group.

    store: the one in which the ranks meet. Keys begin with "agree". A call removes them before it returns, because the store
    may outlive this process: torchrun may keep it when it starts the ranks again. Rank 0, whose process may hold the store,
    returns last. place: the address of the store. If it is given, a rank that waits for more than PATIENCE_S prints for
    whom, and the gather raises LauncherError, which names them, if they have not come within the store's time-out.
    """
    numbers = itertools.count()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        key = f"agree-{next(numbers)}"
        store.set(f"{key}/{rank}", json.dumps(tensor.tolist()))
        if place:
            _wait_for_ranks(store, rank, [f"{key}/{other}" for other in range(world)], key, place)
        if rank == 0:
            rows = [json.loads(store.get(f"{key}/{other}")) for other in range(world)]
            store.set(key, json.dumps(rows))
        else:
            rows = json.loads(store.get(key))
        store.delete_key(f"{key}/{rank}")
        _leave(store, rank, world, key)
        return torch.tensor(rows, dtype=tensor.dtype)

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


def _leave(store: dist.Store, rank: int, world: int, key: str) -> None:
    """Remove `key` when all ranks have read it, before any of them returns; then what this needs, before rank 0 returns."""
    read, removed, left = (f"{key}/{event}" for event in ("read", "removed", "left"))

    def count(event: str) -> None:
        if store.add(event, 1) == world - 1:
            store.set(f"{event}-by-all", "1")

    def remove_after(event: str, *names: str) -> None:
        if world > 1:
            store.wait([f"{event}-by-all"])
        for name in (*names, event, f"{event}-by-all"):
            store.delete_key(name)

    if rank == 0:
        remove_after(read, key)
        store.set(removed, "1")
        remove_after(left, removed)
    else:
        count(read)
        store.wait([removed])
        count(left)


def agree_in_groups(
    action: Callable[[], T],
    compared: Callable[[T, dist.ProcessGroup], object],
    groups: Mapping[dist.ProcessGroup, str],
    device: torch.device | str,
) -> T:
    """What `action()` returns, after the ranks of each group have completed it, and agreed on `compared(result, group)`.

    groups: {process group: what an error calls its ranks}; they compare one after the other, and the ranks of a group learn
    of an error in those before. Errors and messages are those of `agree`, for each group.
    """
    results: list[T] = []
    error: Exception | None = None

    def outcome(group: dist.ProcessGroup) -> object:
        """What this rank compares in `group`; raises the error of an earlier group, or of the action."""
        if error is not None:
            raise error
        if not results:
            results.append(action())
        return compared(results[0], group)

    for group, whose in groups.items():
        try:
            agree(partial(all_gather_small, group=group), device, partial(outcome, group), whose)
        except Exception as raised:  # of any kind: the ranks of the next group must learn of it
            error = raised
    try:
        if error is not None:
            raise error
    finally:
        error = None  # as in `agree`
    return results[0] if results else action()


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device | str | None) -> T:
    """Call `make()` on the first rank of `group`, and return its result on all ranks. group None: call it here.

    RuntimeError on all ranks: the error that it raised, or a result that cannot be pickled. The result is broadcast as a
    pickled object, as torch does. device: where the broadcast's tensors are created.
    """
    if group is None:
        return make()
    box: list = [None, None]  # the result, and the error
    if group.rank() == 0:
        try:
            box[0] = make()
            pickle.dumps(box[0])  # the broadcast would raise the error on this rank only
        except Exception as error:  # of any kind: the others wait
            box = [None, f"{type(error).__name__}: {error}"]
    where = None if device is None else torch.device(device)
    dist.broadcast_object_list(box, group=group, group_src=0, device=where)
    if box[1]:
        raise RuntimeError(f"rank 0 of {group.size()}: {box[1]}")
    return box[0]


def _described(error: Exception) -> str:
    """Its message, and the type of an error whose message may say nothing without it (a KeyError's is a key)."""
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"


def _encode(text: str) -> bytes:
    """Its UTF-8. Surrogates, as in the name of a file that is not UTF-8, are escaped, because they have no UTF-8."""
    return text.encode(errors="backslashreplace")


def _gather_text(gather: Gather, device: torch.device | str, text: str) -> list[str]:
    """The beginning of each rank's text, in parts of growing size: one more after that in which some differ.

    If the texts are equal for MOST bytes, no further part is gathered.
    """
    encoded, rows, start, size, differ = _encode(text), list[list[bytes]](), 0, SHOWN, False
    while True:
        words = torch.frombuffer(bytearray(encoded[start : start + size].ljust(size, b"\0")), dtype=torch.int64)
        rows.append([bytes(row.view(torch.uint8).tolist()) for row in gather(words.to(device)).cpu()])
        start, size = start + size, 2 * size
        if differ or start >= MOST or not any(part.strip(b"\0") for part in rows[-1]):
            return [b"".join(parts).rstrip(b"\0").decode(errors="ignore") for parts in zip(*rows, strict=True)]
        differ = len({*rows[-1]}) > 1


def _difference(texts: Sequence[str], different: Sequence[int], whose: str) -> str:
    """The message of the error. texts: of each rank, "1" and an error or "0" and the arguments. different: ranks."""
    for rank, text in enumerate(texts):
        if text.startswith("1"):
            return f"{text[1:]} (rank {rank})"
    message = f"{whose} {different} were asked something else than rank 0"
    shown = next((rank for rank in different if texts[rank] != texts[0]), None)
    if shown is None:
        return f"{message}; the difference is beyond the first {MOST} bytes"
    lines = [texts[rank][1:].splitlines() for rank in (shown, 0)]
    for other, first in zip(*lines, strict=False) if len(lines[0]) > 1 else ():
        if other != first:
            return f"rank {shown}: {other}; on rank 0: {first}"
    first, other = texts[0][1:], texts[shown][1:]
    begin = max(0, len(os.path.commonprefix([first, other])) - EQUAL)
    first, other = (f"{'...' if begin else ''}{text[begin : begin + SHOWN]}" for text in (first, other))
    return f"{message}: {other} instead of {first}"
