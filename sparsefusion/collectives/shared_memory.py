"""All-reduce and all-gather between ranks of one machine through shared memory, in microseconds instead of hundreds.

`connect` creates a `SharedMemory` for a process group if its ranks run on one machine and have the C library. It uses the
group for nothing else. `native/shared_memory.c` describes the protocol, and `native/formats.h` the formats.
"""

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from sparsefusion.native.library import INT, POINTER, SIZE, Library

from .agreement import gather_objects
from .counted import Counter, in_rank_order
from .host import ProcessWatch, describe_rank, map_shared_file, reason_not_to_share
from .shared_memory_calls import (
    OPERATIONS,
    Part,
    bytes_on_wire,
    check_arguments,
    check_device,
    describe_header,
    fill_parts,
)
from .wire_formats import rows_of, wire_format

MINUTES_5 = 300.0
SPINS = 100  # reads of a counter before the processor is yielded, because two ranks may run on one
SIGNATURES = {
    "shared_memory_bytes": [INT],
    "shared_memory_channel": [],
    "shared_memory_attach": [POINTER, POINTER, INT, INT, INT, POINTER],
    "shared_memory_sum": [POINTER, POINTER, POINTER, SIZE],
    "shared_memory_reduce": [POINTER, POINTER, INT, INT],
    "shared_memory_gather": [POINTER, POINTER, POINTER, SIZE],
    "shared_memory_proceed": [POINTER],
    "shared_memory_peer": [POINTER, INT],
    "shared_memory_leave": [POINTER, INT],
}
# Constants of shared_memory.c.
DONE, NOT_YET, LEFT, MISMATCH, BUSY, GONE = range(6)
HERE, MISSING, CLOSED, FAILED = range(4)
PROGRESS = 7

P = ParamSpec("P")
T = TypeVar("T")


@cache
def kernels() -> Library:
    """The C library of this package, or the reason why it cannot be used."""
    return Library("sparsefusion", SIGNATURES)


def connect(
    group: dist.ProcessGroup, timeout: float | None = None, library: Library | None = None, wanted: bool = True
) -> "tuple[SharedMemory, str] | tuple[None, str]":
    """(SharedMemory, "") on every rank of `group`, or (None, reason), with the same reason on every rank.

    All ranks of the group call this together. It gathers objects, so it needs a gloo group. timeout: seconds that a
    rank waits for another one in a call; None: the group's timeout. library: a `Library` with SIGNATURES; None: the
    package's own. wanted: False on any rank declines for all ranks. ValueError: not a process group, or one that this
    rank is not in.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group {group!r} is no process group that this rank is a member of")
    if group.size() == 1:
        return None, "one rank has nobody to share memory with"
    library = kernels() if library is None else library
    mine: dict[str, Any] = describe_rank(library) if wanted else {"why": "shared_memory=False"}
    ranks = gather_objects(mine, group)
    if why := reason_not_to_share(ranks):
        return None, why
    nbytes = library.functions.shared_memory_bytes(group.size())
    if not nbytes:
        return None, f"{group.size()} ranks would share 2 GiB or more"
    memory, watch, why = map_shared_file(nbytes, [description["pid"] for description in ranks], group)
    if memory is None or watch is None:
        return None, why
    seconds = _timeout_of(group) if timeout is None else timeout
    return SharedMemory(library.functions, memory, watch, group.rank(), seconds), ""


def _untraced(method: Callable[P, T]) -> Callable[P, T]:
    """torch.compiler.disable(method), called when torch first compiles: it imports torch._dynamo, for two seconds."""
    disabled: list[Callable[P, T]] = []

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    return call


class SharedMemory:
    """Memory that the ranks of one machine share. It is created by `connect`, and used by one thread at a time.

    rank, size: this rank's number in the group, and the size of the group. All ranks make the same calls in the same
    order, with tensors on the CPU. Results have no gradients. RuntimeError in a call, naming the rank: another rank has
    died, has closed its memory, or has not called within the timeout. ValueError: another rank makes another call, or
    passes another dtype or number of elements. After an error the memory cannot be used any more, and every call gives
    the reason.
    """

    def __init__(self, functions: Any, memory: mmap.mmap, watch: ProcessWatch, rank: int, timeout: float):
        self.rank, self.size = rank, len(watch.pids)
        self._watch, self._timeout, self._why = watch, timeout, "is closed"
        self._report, self._parts = (ctypes.c_int64 * 8)(), (Part * 2)()
        self._sum, self._reduce = functions.shared_memory_sum, functions.shared_memory_reduce
        self._gather, self._proceed = functions.shared_memory_gather, functions.shared_memory_proceed
        self._peer, self._leave = functions.shared_memory_peer, functions.shared_memory_leave
        channel = (ctypes.c_int64 * (functions.shared_memory_channel() // 8 + 1))()
        self._channel: int | None = ctypes.addressof(channel)  # None once it must not be used
        view = ctypes.c_char.from_buffer(memory)
        functions.shared_memory_attach(channel, ctypes.addressof(view), rank, self.size, SPINS, self._report)
        self._close = weakref.finalize(self, _release, self._leave, channel, [memory, view], watch, os.getpid())

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        format: str = ...,
        counter: Counter | None = ...,
        exact: None = ...,
        op: str = ...,
    ) -> torch.Tensor:
        """One tensor."""

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        format: str = ...,
        counter: Counter | None = ...,
        exact: torch.Tensor = ...,
        op: str = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors, of which the second is summed in at least float32."""

    @_untraced
    def all_reduce(
        self,
        tensor: torch.Tensor,
        format: str = "fp32",
        counter: Counter | None = None,
        exact: torch.Tensor | None = None,
        op: str = "sum",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The sum of every rank's `tensor`: a new tensor of its shape and dtype, with the same bits on all ranks.

        tensor: floating point, with the same shape and dtype on all ranks. The result is that of
        `sparsefusion.all_reduce(tensor, group, format, "one_shot")`: added up in rank order, in at least float32.
        format: one of FORMATS. counter: a `collectives.Counter`; it counts one "all_reduce" of the bytes in the wire
        format, of which every other rank is sent a copy (fp32: a ring's share, as `collectives.all_reduce` counts).
        exact: a second tensor, summed in at least float32 whatever the format; then the result is (sum, exact sum).
        op: "sum", or "max" with fp32 and without exact; NaN is the largest. ValueError: anything else, or a tensor that
        is not on the CPU.
        """
        if (
            format == "fp32"
            and type(tensor) is torch.Tensor
            and tensor.dtype is torch.float32
            and exact is None
            and op == "sum"
            and tensor.is_cpu
            and tensor.is_contiguous()
            and (numel := tensor.numel())
        ):
            total = torch.empty_like(tensor)  # these few lines take 2 us
            if code := self._sum(self._channel, tensor.data_ptr(), total.data_ptr(), numel):
                self.wait(code)
            if counter is not None:
                self._count(counter, format, 4 * numel)
            return total
        check_arguments(tensor, format, exact, op)
        tensors = [tensor.contiguous()] if exact is None else [tensor.contiguous(), exact.contiguous()]
        self.check()
        if not any(each.numel() for each in tensors):
            totals = [each.detach().clone() for each in tensors]
        elif tensor.dtype == torch.float64 and format != "fp32" and tensor.numel():
            totals = [self._sum_in_torch(tensors[0], format)]
            totals += [self._totals([second], "fp32")[0] for second in tensors[1:]]
        else:
            totals = self._totals(tensors, format, op)
        if counter is not None:
            self._count(counter, format, bytes_on_wire(tensors, format))
        return totals[0] if exact is None else (totals[0], totals[1])

    @_untraced
    def all_gather(self, tensor: torch.Tensor, counter: Counter | None = None) -> torch.Tensor:
        """Every rank's `tensor`, of any dtype, in rank order, on every rank: shape (P, *tensor.shape)."""
        check_device(tensor)
        tensor = tensor.contiguous()
        self.check()
        parts = tensor.new_empty(self.size, *tensor.shape)
        if tensor.numel():
            if code := self._gather(self._channel, tensor.data_ptr(), parts.data_ptr(), tensor.nbytes):
                self.wait(code)
        if counter is not None:
            counter.add("all_gather", tensor.nbytes, (self.size - 1) * tensor.nbytes)
        return parts

    def addresses(self) -> tuple[int, int]:
        """The addresses of the C function that reduces and of this rank's channel, valid while `check` raises nothing."""
        return ctypes.cast(self._reduce, POINTER).value or 0, self.check()

    def close(self) -> None:
        """Release the memory; ranks that wait for this one fail at once. A second call does nothing."""
        self._channel = None
        self._close()

    def _totals(self, tensors: Sequence[torch.Tensor], format: str, op: str = "sum") -> list[torch.Tensor]:
        """The sums of one tensor in a format, or of two tensors, the second in fp32; all contiguous."""
        totals = [torch.empty_like(each) for each in tensors]
        fill_parts(self._parts, tensors, totals, format)
        if code := self._reduce(self._channel, self._parts, len(tensors), OPERATIONS[op]):
            self.wait(code)
        return totals

    def _sum_in_torch(self, tensor: torch.Tensor, format: str) -> torch.Tensor:
        """The sum of a float64 tensor in a lossy format, which is too rare for a C kernel."""
        form = wire_format(format, torch.float64)
        message = form.encode(rows_of(tensor.detach().flatten(), 1, form.block), self.size)[0]
        total = in_rank_order(form.decode(self.all_gather(message), torch.float64))[None]
        return form.restore(form.rounded(total, self.size), self.size)[0, : tensor.numel()].view(tensor.shape)

    def _count(self, counter: Counter, format: str, nbytes: int) -> None:
        if nbytes:
            counter.add("all_reduce", nbytes, self.sent(format, nbytes))

    def sent(self, format: str, nbytes: int) -> int:
        """The bytes that a rank sends for an all-reduce of `nbytes` in the wire format, as they are counted."""
        times, parts = (2 * (self.size - 1), self.size) if format == "fp32" else (self.size - 1, 1)
        return -(-times * nbytes // parts)

    # Waiting, and what ends it

    def check(self) -> int:
        """This rank's channel. RuntimeError: the memory cannot be used any more."""
        if self._channel is None:
            raise RuntimeError(f"the shared memory of rank {self.rank} of {self.size} {self._why}")
        return self._channel

    def wait(self, code: int) -> None:
        """Wait until the operation of a C call that returned `code` is done. An error ends the use of this memory."""
        since, piece = 0.0, None
        try:
            while code != DONE:
                channel = self.check()
                if code == BUSY:
                    raise RuntimeError("an earlier call was interrupted")
                if code == MISMATCH:
                    raise ValueError(self._difference())
                if piece != self._report[PROGRESS]:
                    since, piece = time.monotonic(), self._report[PROGRESS]
                self._check_others(time.monotonic() - since)
                code = self._proceed(channel)
        except BaseException as error:
            if self._channel is not None:
                self._leave(self._channel, FAILED)
                self._channel, self._why = None, f"cannot be used any more: {str(error) or type(error).__name__}"
            raise

    def _check_others(self, seconds: float) -> None:
        """RuntimeError if a rank that this one waits for has died or left, or has not called in `seconds`."""
        # Looked up before the counters: a rank that posted this piece and then died counts as here.
        dead_ranks = self._watch.dead_ranks()
        states = {rank: self._peer(self._channel, rank) for rank in range(self.size)}
        missing = {rank: state for rank, state in states.items() if state != HERE}
        for rank, state in sorted(missing.items(), key=lambda each: each[1]):
            if state == MISSING and rank in dead_ranks:
                raise RuntimeError(f"{self._name(rank)} has died")
            if state == CLOSED:
                raise RuntimeError(f"{self._name(rank)} has closed its shared memory")
            if state == FAILED:
                raise RuntimeError(f"{self._name(rank)} has given up after an error of its own")
        if missing and seconds > self._timeout:
            raise RuntimeError(f"{self._name(min(missing))} has not come within {self._timeout:g} s")

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.size} (process {self._watch.pids[rank]})"

    def _difference(self) -> str:
        """The message of an error: which ranks call what, where the calls of two ranks differ."""
        other, *headers = self._report[:PROGRESS]
        theirs, own = headers[:3], headers[3:]
        return f"rank {self.rank} calls {describe_header(*own)}, and rank {other} {describe_header(*theirs)}"


class SumInPlace:
    """An all-reduce of one tensor, or of two of which the second is summed exactly, that C code starts again and again.

    tensors: contiguous, float32 or bfloat16, not empty; each call overwrites them with their sums. C code calls
    `reduce(channel, parts, count, 0)`; all of these but `count` are addresses. If that returns a code other than 0,
    `memory.wait(code)` finishes the call. Each time, `memory.check()` comes first. The caller counts the calls in
    `counter`, each with `nbytes` and `sent` (see `collectives.Counter`).
    """

    def __init__(self, memory: SharedMemory, tensors: Sequence[torch.Tensor], format: str, counter: Counter | None):
        self.memory, self.counter, self.count = memory, counter, len(tensors)
        self._kept_alive = tensors, (parts := (Part * len(tensors))())
        fill_parts(parts, tensors, tensors, format)
        self.parts, (self.reduce, self.channel) = ctypes.addressof(parts), memory.addresses()
        self.nbytes = bytes_on_wire(tensors, format)
        self.sent = memory.sent(format, self.nbytes)


def _release(leave: Callable[..., int], channel: Any, held: list[Any], watch: ProcessWatch, pid: int) -> None:
    """Unmap the memory, and tell the other ranks, unless this process is a fork of the one that connected.

    held: [memory, a view of it]; the memory can be closed only when nothing refers to the view.
    """
    if os.getpid() == pid:
        leave(channel, CLOSED)
    held.pop()
    held.pop().close()
    watch.close()


def _timeout_of(group: dist.ProcessGroup) -> float:
    """The timeout of the group's own operations in seconds, or 5 minutes if this version of torch does not tell."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if limit is not None else MINUTES_5
