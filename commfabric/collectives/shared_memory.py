"""All-reduce and all-gather between ranks of one machine through shared memory, in microseconds instead of hundreds.

`connect` creates a `SharedMemory` for a process group if its ranks run on one machine and have the C library. Afterwards
the process group is not used. `native/shared_memory.c` describes the protocol, and `native/formats.h` the formats.
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

from commfabric.native.library import INT, POINTER, SIZE, Library

from .agreement import gather_objects
from .counted import Counter, in_rank_order
from .host import ProcessWatch, describe_rank, map_shared_file, reason_not_to_share
from .shared_memory_calls import OPERATIONS, Part, bytes_on_wire, check_device, describe_header, fill_parts
from .wire_formats import rows_of, wire_format

DEFAULT_TIMEOUT_S = 300.0
SPINS = 100  # reads of a counter before the core is yielded, because two ranks may share a core
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
    return Library("commfabric", SIGNATURES)


def connect(
    group: dist.ProcessGroup, timeout: float | None = None, library: Library | None = None, wanted: bool = True
) -> "tuple[SharedMemory, str] | tuple[None, str]":
    """(SharedMemory, "") on every rank of `group`, or (None, reason) with the same reason on every rank.

    All ranks of the group call it together. It gathers objects.

    Args:
        group: A gloo group of this rank.
        timeout: Seconds that a rank waits for another rank in a call, by default the timeout of the group.
        library: A `Library` with SIGNATURES, by default that of the package.
        wanted: False on any rank declines for all ranks.
    """
    if group.size() == 1:
        return None, "one rank has nobody to share memory with"
    library = kernels() if library is None else library
    description: dict[str, Any] = describe_rank(library) if wanted else {"why": "shared_memory=False"}
    ranks = gather_objects(description, group)
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
    """torch.compiler.disable(method), applied on the first compilation, because importing torch._dynamo takes seconds."""
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

    All ranks make the same calls in the same order, with tensors on the CPU. Results have no gradients. After an error the
    memory cannot be used any more, and every call gives the reason.

    Attributes:
        rank, size: The number of this rank in the group, and the number of ranks.

    Raises:
        RuntimeError: Another rank has died, has closed its memory, or has not called within the timeout.
        ValueError: Another rank makes a different call, or passes another dtype or number of elements.
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
        self, tensor: torch.Tensor, format: str = ..., counter: Counter | None = ..., exact: None = ..., op: str = ...
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
        """Two tensors; the second is summed in at least float32."""

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

        The result is that of `commfabric.all_reduce(tensor, group, format, "one_shot")`: added in rank order, in at least
        float32.

        Args:
            tensor: A floating-point tensor with the same shape and dtype on all ranks.
            format: One of the wire formats fp32, fp16, bf16, int8.
            counter: Counts one "all_reduce" of the bytes in the wire format. One copy is sent to every other rank; fp32
                counts the bytes of a ring, as `collectives.all_reduce` does.
            exact: A second tensor, summed in at least float32. The result is then (sum, exact sum).
            op: "sum", or with fp32 and without `exact` "max", in which NaN is the largest.
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
        tensors = [tensor.contiguous()] if exact is None else [tensor.contiguous(), exact.contiguous()]
        check_device(tensors)
        self.check()
        if not any(part.numel() for part in tensors):
            totals = [part.detach().clone() for part in tensors]
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
        check_device([tensor])
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
        """The addresses of C's reduce function and of this rank's channel, valid as long as `check` raises no error."""
        return ctypes.cast(self._reduce, POINTER).value or 0, self.check()

    def close(self) -> None:
        """Release the memory; ranks that wait for this one fail at once. A second call does nothing."""
        self._channel = None
        self._close()

    def _totals(self, tensors: Sequence[torch.Tensor], format: str, op: str = "sum") -> list[torch.Tensor]:
        """The sums of one or two contiguous tensors: the first in the format, the second in fp32."""
        totals = [torch.empty_like(tensor) for tensor in tensors]
        fill_parts(self._parts, tensors, totals, format)
        if code := self._reduce(self._channel, self._parts, len(tensors), OPERATIONS[op]):
            self.wait(code)
        return totals

    def _sum_in_torch(self, tensor: torch.Tensor, format: str) -> torch.Tensor:
        """The sum of a float64 tensor in a lossy format, which has no C kernel."""
        form = wire_format(format, torch.float64)
        message = form.encode(rows_of(tensor.detach().flatten(), 1, form.block), self.size)[0]
        total = in_rank_order(form.decode(self.all_gather(message), torch.float64))[None]
        return form.undo_scaling(form.round_to_wire(total, self.size), self.size)[0, : tensor.numel()].view(
            tensor.shape
        )

    def _count(self, counter: Counter, format: str, nbytes: int) -> None:
        if nbytes:
            counter.add("all_reduce", nbytes, self.sent(format, nbytes))

    def sent(self, format: str, nbytes: int) -> int:
        """The bytes that are counted as sent for an all-reduce of `nbytes` in the wire format."""
        times, parts = (2 * (self.size - 1), self.size) if format == "fp32" else (self.size - 1, 1)
        return -(-times * nbytes // parts)

    # Waiting

    def check(self) -> int:
        """The address of this rank's channel. RuntimeError if the memory cannot be used any more."""
        if self._channel is None:
            raise RuntimeError(f"the shared memory of rank {self.rank} of {self.size} {self._why}")
        return self._channel

    def wait(self, code: int) -> None:
        """Wait until the operation of a C call that returned `code` is done. After an error the memory is unusable."""
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
        """RuntimeError if an awaited rank has died or left, or if more than the timeout has passed in these `seconds`."""
        # Before the counters are read: a rank that posted this piece and then died counts as present.
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
        """The message of an error that names two ranks and their different calls."""
        other, *headers = self._report[:PROGRESS]
        theirs, ours = headers[:3], headers[3:]
        return f"rank {self.rank} calls {describe_header(*ours)}, and rank {other} {describe_header(*theirs)}"


class SumInPlace:
    """An all-reduce of one or two tensors that C code repeats. The second tensor is summed exactly.

    For each call: `memory.check()`; then C code calls `reduce(channel, parts, count, 0)`, where all but `count` are
    addresses; if it returns a code other than 0, `memory.wait(code)` finishes the call. The caller adds `nbytes` and `sent`
    to `counter`.

    Args:
        tensors: Contiguous float32 or bfloat16 tensors, not empty. Each call overwrites them with their sums.
        format: The wire format of the first tensor.
        counter: The counter of the calls, or None.
    """

    def __init__(self, memory: SharedMemory, tensors: Sequence[torch.Tensor], format: str, counter: Counter | None):
        self.memory, self.counter, self.count = memory, counter, len(tensors)
        self._kept_alive = tensors, (parts := (Part * len(tensors))())
        fill_parts(parts, tensors, tensors, format)
        self.parts, (self.reduce, self.channel) = ctypes.addressof(parts), memory.addresses()
        self.nbytes = bytes_on_wire(tensors, format)
        self.sent = memory.sent(format, self.nbytes)


def _release(leave: Callable[..., int], channel: Any, memory: list[Any], watch: ProcessWatch, pid: int) -> None:
    """Unmap the memory, and tell the other ranks, unless this process is a fork of the one that connected.

    memory: [memory, a view of it]. The memory can be closed only when nothing refers to the view.
    """
    if os.getpid() == pid:
        leave(channel, CLOSED)
    memory.pop()
    memory.pop().close()
    watch.close()


def _timeout_of(group: dist.ProcessGroup) -> float:
    """The timeout of the group's operations in seconds, or DEFAULT_TIMEOUT_S if torch does not tell."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if limit is not None else DEFAULT_TIMEOUT_S
