"""All-reduce and all-gather between ranks of one machine through shared memory, in microseconds instead of hundreds.

`connect` makes a `SharedMemory` of a process group, if its ranks run on one machine and have the C library. It uses the
group only for that. `native/shared_memory.c` describes the protocol and the formats.
"""

import ctypes
import os
import time
import weakref
from functools import cache, wraps

import torch
import torch.distributed as dist

from sparsefusion.native.library import INT, POINTER, SIZE, Library

from .counted import in_rank_order
from .host import describe_rank, gather_objects, map_shared_file, reason_not_to_share
from .wire_formats import at_least_fp32, padded, rows_of, wire_format

FORMATS = ("fp32", "fp16", "bf16", "int8")
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
OPERATIONS, GATHER = {"sum": 0, "max": 1}, 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3, torch.float64: 4}
CODES = {"fp32": 0, "bf16": 1, "int8": 2, "fp16": 3, "fp64": 4, "bytes": 5}


class _Part(ctypes.Structure):
    _fields_ = [("given", POINTER), ("total", POINTER), ("numel", SIZE), ("dtype", INT), ("format", INT)]


@cache
def kernels() -> Library:
    """The C library of the package, or the reason why it cannot be used."""
    return Library("sparsefusion", SIGNATURES)


def connect(group, timeout=None, library=None, wanted=True):
    """(SharedMemory, "") on every rank of `group`, or (None, reason), with the same reason on every rank.

    All ranks of the group call this together. It exchanges objects, so it needs a gloo group. timeout: seconds that a
    rank waits for another one in a call; None: the group's timeout. library: a `Library` with SIGNATURES; None: the
    package's own. wanted: False on any rank declines for all ranks. ValueError: not a process group, or one that this
    rank is not in.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group {group!r} is no process group that this rank is a member of")
    if group.size() == 1:
        return None, "one rank has nobody to share memory with"
    library = kernels() if library is None else library
    ranks = gather_objects(describe_rank(library) if wanted else {"why": "shared_memory=False"}, group)
    if why := reason_not_to_share(ranks):
        return None, why
    memory, watch, why = map_shared_file(
        library.functions.shared_memory_bytes(group.size()), [p["pid"] for p in ranks], group
    )
    if why:
        return None, why
    seconds = _timeout_of(group) if timeout is None else timeout
    return SharedMemory(library.functions, memory, watch, group.rank(), seconds), ""


def _untraced(method):
    """torch.compiler.disable(method), made when torch first compiles: it imports torch._dynamo, which takes two seconds."""
    made = {}

    @wraps(method)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if "disabled" not in made:
            made["disabled"] = torch.compiler.disable(method)
        return made["disabled"](*args, **kwargs)

    return call


class SharedMemory:
    """Memory that the ranks of one machine share. It is made by `connect`, and used by one thread at a time.

    rank, size: this rank's number in the group, and the size of the group. All ranks make the same calls in the same
    order, with tensors on the CPU. Results have no gradients. RuntimeError in a call, naming the rank: another rank has
    died, has closed its memory, or has not called within the timeout. ValueError: another rank makes another call, or
    has another size. After an error the memory cannot be used any more, and every call gives the reason.
    """

    def __init__(self, functions, memory, watch, rank, timeout):
        self.rank, self.size = rank, len(watch.pids)
        self._watch, self._timeout, self._why = watch, timeout, "is closed"
        self._report, self._parts = (ctypes.c_int64 * 8)(), (_Part * 2)()
        self._sum, self._reduce = functions.shared_memory_sum, functions.shared_memory_reduce
        self._gather, self._proceed = functions.shared_memory_gather, functions.shared_memory_proceed
        self._peer, self._leave = functions.shared_memory_peer, functions.shared_memory_leave
        channel = (ctypes.c_int64 * (functions.shared_memory_channel() // 8 + 1))()
        self._channel = ctypes.addressof(channel)  # None once it must not be used
        view = ctypes.c_char.from_buffer(memory)
        functions.shared_memory_attach(channel, ctypes.addressof(view), rank, self.size, SPINS, self._report)
        self._close = weakref.finalize(self, _release, self._leave, channel, [memory, view], watch, os.getpid())

    @_untraced
    def all_reduce(self, tensor, format="fp32", counter=None, exact=None, op="sum"):
        """The sum of every rank's `tensor`: a new tensor of its shape and dtype, equal bit for bit on all ranks.

        tensor: floating point, of the same shape and dtype on all ranks. The result is that of
        `sparsefusion.all_reduce(tensor, group, format, "one_shot")`: added up in rank order, in at least float32.
        format: one of FORMATS. counter: a `collectives.Counter`; it gets one "all_reduce" of the bytes on the wire, of
        which all other ranks are sent a copy (fp32: of a ring's share, as `collectives.all_reduce` counts). exact: a
        second tensor, summed in at least float32 whatever the format; then the result is (sum, exact sum). op: "sum",
        or with fp32 and without exact "max", in which nan is the largest. ValueError: anything else, or not on the CPU.
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
        _check(tensor, format, exact, op)
        tensors = [tensor.contiguous()] if exact is None else [tensor.contiguous(), exact.contiguous()]
        self.check()
        if not any(given.numel() for given in tensors):
            totals = [given.detach().clone() for given in tensors]
        elif tensor.dtype == torch.float64 and format != "fp32" and tensor.numel():
            totals = [self._sum_by_torch(tensors[0], format)]
            totals += [self._totals([beside], "fp32")[0] for beside in tensors[1:]]
        else:
            totals = self._totals(tensors, format, op)
        if counter is not None:
            self._count(counter, format, _bytes_on_wire(tensors, format))
        return tuple(totals) if exact is not None else totals[0]

    @_untraced
    def all_gather(self, tensor, counter=None) -> torch.Tensor:
        """Every rank's `tensor`, of any dtype, in rank order, on every rank: shape (P, *tensor.shape)."""
        _check_place(tensor)
        tensor = tensor.contiguous()
        self.check()
        parts = tensor.new_empty(self.size, *tensor.shape)
        if tensor.numel():
            if code := self._gather(self._channel, tensor.data_ptr(), parts.data_ptr(), tensor.nbytes):
                self.wait(code)
        if counter is not None:
            counter.add("all_gather", tensor.nbytes, (self.size - 1) * tensor.nbytes)
        return parts

    def addresses(self) -> tuple:
        """(C's function that reduces, this rank's channel), which are valid while `check` raises nothing."""
        self.check()
        return ctypes.cast(self._reduce, POINTER).value, self._channel

    def close(self) -> None:
        """Release the memory; ranks that wait for this one fail at once. A second call does nothing."""
        self._channel = None
        self._close()

    def _totals(self, tensors, format, op="sum") -> list:
        """The sums of one tensor, in a format, or of two, the second in fp32; all contiguous."""
        totals = [torch.empty_like(given) for given in tensors]
        _fill(self._parts, tensors, totals, format)
        if code := self._reduce(self._channel, self._parts, len(tensors), OPERATIONS[op]):
            self.wait(code)
        return totals

    def _sum_by_torch(self, tensor, format) -> torch.Tensor:
        """The sum of float64 in a lossy format, which is too rare for C."""
        form = wire_format(format, torch.float64)
        message = form.encode(rows_of(tensor.detach().flatten(), 1, form.block), self.size)[0]
        total = in_rank_order(form.decode(self.all_gather(message), torch.float64))[None]
        return form.restore(form.rounded(total, self.size), self.size)[0, : tensor.numel()].view(tensor.shape)

    def _count(self, counter, format, nbytes) -> None:
        if nbytes:
            counter.add("all_reduce", nbytes, self.sent(format, nbytes))

    def sent(self, format, nbytes) -> int:
        """What a rank sends for an all-reduce of so many bytes on the wire."""
        times, parts = (2 * (self.size - 1), self.size) if format == "fp32" else (self.size - 1, 1)
        return -(-times * nbytes // parts)

    # Waiting, and what ends it

    def check(self) -> None:
        """RuntimeError if it cannot be used any more."""
        if self._channel is None:
            raise RuntimeError(f"the shared memory of rank {self.rank} of {self.size} {self._why}")

    def wait(self, code) -> None:
        """Until a C call that returned `code` is done; whatever is raised here ends the use of this memory."""
        since, piece = 0.0, None
        try:
            while code != DONE:
                self.check()
                if code == BUSY:
                    raise RuntimeError("an earlier call was interrupted")
                if code == MISMATCH:
                    raise ValueError(self._difference())
                if piece != self._report[7]:
                    since, piece = time.monotonic(), self._report[7]
                self._check_others(time.monotonic() - since)
                code = self._proceed(self._channel)
        except BaseException as error:
            if self._channel is not None:
                self._leave(self._channel, FAILED)
                self._channel, self._why = None, f"cannot be used any more: {str(error) or type(error).__name__}"
            raise

    def _check_others(self, seconds) -> None:
        """RuntimeError if one of the ranks that are waited for will not come, or has not come in `seconds`."""
        dead_ranks = self._watch.dead_ranks()  # before their counters are read: who posted and then died was here
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

    def _name(self, rank) -> str:
        return f"rank {rank} of {self.size} (process {self._watch.pids[rank]})"

    def _difference(self) -> str:
        """Who calls what, where two ranks' calls differ."""
        other, *headers = self._report[:7]
        theirs, own = headers[:3], headers[3:]
        return f"rank {self.rank} calls {_described(*own)}, and rank {other} {_described(*theirs)}"


class SumInPlace:
    """An all_reduce of a tensor, or of two of which the second is summed exactly, that C code starts again and again.

    C calls `reduce(channel, parts, count, 0)`, all addresses but `count`; each time, the sums of `tensors` (contiguous,
    float32 or bfloat16, not empty) stand in their places. Unless it returns 0, `memory.wait` of what it returned
    finishes it. `memory.check()` comes first, each time. Whoever has C do it counts it: nbytes and sent (see
    `collectives.Counter`), in `counter`.
    """

    def __init__(self, memory, tensors, format, counter):
        self.memory, self.counter, self.count = memory, counter, len(tensors)
        self._held = tensors, (parts := (_Part * len(tensors))())
        _fill(parts, tensors, tensors, format)
        self.parts, (self.reduce, self.channel) = ctypes.addressof(parts), memory.addresses()
        self.nbytes = _bytes_on_wire(tensors, format)
        self.sent = memory.sent(format, self.nbytes)


def _release(leave, channel, held, watch, pid) -> None:
    """Tell the others that this rank has closed, unless this process is only a fork of it, and unmap."""
    if os.getpid() == pid:
        leave(channel, CLOSED)
    held.pop()  # the view, without which the memory can be closed
    held.pop().close()
    watch.close()


def _described(kind, nbytes, beside) -> str:
    """A header in words."""
    names = {code: name for name, code in CODES.items()}
    size = f"{nbytes} bytes" if kind >> 4 & 15 == 1 else f"{nbytes} + {beside} bytes"
    if kind & 15 == GATHER:
        return f"all_gather of {size}"
    return f"all_reduce ({[*OPERATIONS][kind & 15]}, {names[kind >> 8 & 15]}) of {size}"


def _check(tensor, format, exact, op) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if op not in OPERATIONS:
        raise ValueError(f"op {op!r} is none of {', '.join(OPERATIONS)}")
    if op == "max" and (format != "fp32" or exact is not None):
        raise ValueError(
            f"op 'max' is for format fp32 and one tensor, not for {format}{' and exact' * (exact is not None)}"
        )
    for given in (tensor, exact):
        if given is not None:
            _check_place(given)
            if given.dtype not in DTYPES:
                raise ValueError(f"{given.dtype} is none of {', '.join(map(str, DTYPES))}")


def _check_place(tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{type(tensor).__name__} is no tensor")
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}, and shared memory is for the CPU's")


def _fill(parts, tensors, totals, format) -> None:
    """Say in C's words what is summed, and where the sums shall lie: of the second tensor in fp32."""
    for part, given, total, name in zip(parts, tensors, totals, (format, "fp32"), strict=False):
        part.given, part.total, part.numel = given.data_ptr(), total.data_ptr(), given.numel()
        part.dtype, wide = DTYPES[given.dtype], name == "fp32" and given.dtype == torch.float64
        part.format = CODES["fp64" if wide else name]


def _bytes_on_wire(tensors, format) -> int:
    """Of a tensor's numbers in a format, and of a second one's in fp32."""
    total = 0
    for tensor, name in zip(tensors, (format, "fp32"), strict=False):
        form = wire_format(name, at_least_fp32(tensor.dtype))
        total += form.nbytes(padded(tensor.numel(), form.block))
    return total


def _timeout_of(group) -> float:
    """The seconds that a group's own operations wait, as far as this torch tells."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if limit is not None else MINUTES_5
