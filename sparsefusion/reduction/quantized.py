"""The quantized all-reduce: fewer bytes for a sum, and the same bits on every rank.

There are three algorithms. P is the number of ranks, n that of elements, and b(n) the bytes of n elements in the format
(see `collectives.wire_formats`):

| algorithm | what happens | a rank sends | rounds |
|---|---|---|---|
| native | one all-reduce of gloo or NCCL, in the dtype of the format (not int8) | 2 (P-1)/P b(n) | depends |
| one_shot | all-gather of all elements; every rank adds them up in rank order | (P-1) b(n) | 1 |
| two_shot | all-to-all of P chunks; a chunk's owner adds it up; all-gather of the sums | 2 (P-1) b(n/P) | 2 |

one_shot and two_shot add in at least fp32. native fp16 sends x / P^2, so that no partial sum overflows, and loses
precision below about 1e-4 P^2. Values that must not be rounded (`exact`) are sent in the same messages. Every rank
decodes the same bytes in the same order, including its own, so all results have the same bits. fp16 and bf16 give the
same bits by one_shot and by two_shot.
"""

import logging
import math
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sparsefusion import FORMATS
from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.wire_formats import BLOCK, at_least_fp32, padded, rows_of, view_bytes, wire_format
from sparsefusion.fabric.cost_model import Fabric
from sparsefusion.fabric.measurement import measure

ALGORITHMS = ("native", "one_shot", "two_shot")
KNEE_BYTES = 32 * 1024  # about as many bytes as can be sent during the latency of a round (alpha / beta)
# From which `auto` chooses, the most exact first.
CANDIDATES = (
    ("fp32", "native"), ("fp32", "one_shot"), ("fp16", "native"), ("fp16", "one_shot"), ("fp16", "two_shot"),
    ("bf16", "one_shot"), ("bf16", "two_shot"), ("int8", "one_shot"), ("int8", "two_shot"),
)  # fmt: skip
AUTO_SIZES = [*(1 << bits for bits in range(11, 21)), 1 << 22]  # bytes
TIE = 1.05

log = logging.getLogger(__name__)


def all_reduce(tensor, group=None, format="fp16", algorithm=None, counter=None, exact=None):
    """The sum of the ranks' tensors: a new tensor with the same bits on all ranks.

    tensor: floating point, with the same shape and dtype on all ranks, which the sum has too. group: None is torch's
    default group, or one rank if there is none. format: fp32, fp16, bf16, int8 (see `collectives.wire_formats`), or
    auto: the format and algorithm that are fastest on the links of this group, measured in the first such call (a few
    seconds), and the same on all ranks. algorithm: one of ALGORITHMS; None: `default_algorithm`. counter: a `Counter`.
    exact: a second floating-point tensor, which is summed in at least fp32; then the result is (sum, exact sum).

    Backward is the identity and sends nothing, because every rank uses the same sum in the same way (Megatron's g).
    ValueError: an unknown format or algorithm; int8 with native; a tensor that is not floating point; a group that this
    rank does not belong to.
    """
    _check(tensor, group, format, algorithm, exact)
    group = dist.group.WORLD if group is None and dist.is_initialized() else group
    nothing = not tensor.numel() and (exact is None or not exact.numel())
    if group is None or group.size() == 1 or nothing:
        return (tensor.clone(), exact.clone()) if exact is not None else tensor.clone()
    if format == "auto":
        format, algorithm = format_choice(group, tensor.device).choose(tensor.numel())
    algorithm = algorithm or default_algorithm(format, tensor.numel(), group.size(), tensor.device.type)
    sums = _AllReduce.apply if torch.is_grad_enabled() else _sums
    total, exact_total = sums(tensor, exact, group, format, algorithm, counter)
    return total if exact is None else (total, exact_total)


def _check(tensor, group, format, algorithm, exact) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if algorithm not in (None, *ALGORITHMS):
        raise ValueError(f"algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
    if (format, algorithm) == ("int8", "native"):
        raise ValueError("int8 has no native all-reduce: sums of 8-bit integers overflow; take one_shot or two_shot")
    if format == "auto" and algorithm is not None:
        raise ValueError(f"format 'auto' chooses the algorithm too: algorithm {algorithm!r} was given")
    for given in (tensor, exact):
        if given is not None and not (isinstance(given, torch.Tensor) and given.is_floating_point()):
            raise ValueError(f"{getattr(given, 'dtype', type(given).__name__)} is not a tensor of floating point")
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        raise ValueError(f"group {group!r} is no process group that this rank is a member of")


def default_algorithm(format: str, numel: int, ranks: int, device: str = "cpu") -> str:
    """The algorithm of a format. It depends on sizes only, so that results are reproducible.

    fp32, and fp16 and bf16 on CUDA, use native. The others use one_shot as long as it sends at most KNEE_BYTES more
    than two_shot, which has one more round: among two ranks always, and for small messages.
    """
    if format == "fp32" or (format != "int8" and device == "cuda"):
        return "native"
    nbytes = wire_format(format, torch.float32).nbytes(padded(numel, BLOCK))
    return "one_shot" if (ranks - 1) * (ranks - 2) * nbytes <= ranks * KNEE_BYTES else "two_shot"


def wire_bytes(format: str, algorithm: str, numel: int, ranks: int, exact: int = 0) -> int:
    """Bytes that a rank sends for an all-reduce of `numel` float32 elements, and of `exact` more that are not rounded."""
    form = wire_format(format, torch.float32)
    if algorithm == "native":
        calls = [4 * (numel + exact)] if format == "fp32" else [form.nbytes(numel), 4 * exact]
        return sum(-(-2 * (ranks - 1) * nbytes // ranks) for nbytes in calls)
    if algorithm == "one_shot":
        return (ranks - 1) * (4 * exact + form.nbytes(padded(numel, form.block)))
    chunk, exact_chunk = padded(numel, ranks * form.block) // ranks, padded(exact, ranks) // ranks
    return 2 * (ranks - 1) * (4 * exact_chunk + form.nbytes(chunk))


@dataclass
class FormatChoice:
    """The fastest format and algorithm for each size, from a fabric with the times of CANDIDATES."""

    fabric: Fabric
    ranks: int
    _known: dict = field(default_factory=dict)

    def choose(self, numel: int) -> tuple[str, str]:
        """(format, algorithm) for `numel` elements: the most exact of those within 5 % of the fastest.

        Larger sizes than those measured count as the largest one. A candidate that was dropped at a smaller size is
        left out.
        """
        if numel not in self._known:
            curves = [self.fabric.curve(operation(*each), self.ranks) for each in CANDIDATES]
            nbytes = min(4 * numel, max(curve.nbytes[-1] for curve in curves))
            seconds = [curve.interpolated(nbytes) if nbytes <= curve.nbytes[-1] else math.inf for curve in curves]
            fast = [each for each, time in zip(CANDIDATES, seconds, strict=True) if time <= TIE * min(seconds)]
            self._known[numel] = fast[0]
        return self._known[numel]

    def __str__(self):
        choices = {}
        for bits in range(8, 21):
            choices.setdefault(" ".join(self.choose(1 << bits)), f"{(4 << bits) // 1024} KB")
        return ", ".join(f"from {size} {choice}" for choice, size in choices.items())


_CHOICES = weakref.WeakKeyDictionary()  # {group: FormatChoice}, because the links of a group are measured once


def format_choice(group, device="cpu") -> FormatChoice:
    """The `FormatChoice` of a group. The first call measures its links; all ranks call it together."""
    if group not in _CHOICES:
        calls = {operation(*each): _candidate(group, device, *each) for each in CANDIDATES}
        _CHOICES[group] = FormatChoice(measure(group, calls, AUTO_SIZES, device, race=True), group.size())
        log.info("all-reduce among %d ranks: %s", group.size(), _CHOICES[group])
    return _CHOICES[group]


def operation(format: str, algorithm: str) -> str:
    """The name, in a fabric, of the all-reduce in this format by this algorithm."""
    return "all_reduce" if (format, algorithm) == ("fp32", "native") else f"all_reduce {format} {algorithm}"


def _candidate(group, device, format, algorithm):
    """A function: nbytes -> a function that does one such all-reduce of that many bytes of float32."""

    def prepare(nbytes):
        tensor = torch.ones(nbytes // 4, device=device)
        return lambda: all_reduce(tensor, group, format, algorithm)

    return prepare


class _AllReduce(torch.autograd.Function):
    """The sums of (tensor, exact) over the group; identity in backward."""

    @staticmethod
    def forward(ctx, tensor, exact, *how):
        return _sums(tensor, exact, *how)

    @staticmethod
    def backward(ctx, grad, exact_grad):
        return grad, exact_grad, None, None, None, None


def _sums(tensor, exact, group, format, algorithm, counter):
    """The sums of `tensor`, in a format, and of `exact` (or None), with their shapes and dtypes."""
    wide = at_least_fp32(tensor.dtype)
    x = tensor.detach().to(wide).reshape(-1).contiguous()
    beside = x.new_empty(0) if exact is None else exact.detach().reshape(-1).contiguous()
    beside = beside.to(at_least_fp32(beside.dtype))
    move = {"native": _native, "one_shot": _one_shot, "two_shot": _two_shot}[algorithm]
    total, beside = move(x, beside, wire_format(format, wide), group, counter)
    total = total[: x.numel()].view(tensor.shape).to(tensor.dtype)
    return total, None if exact is None else beside[: exact.numel()].view(exact.shape).to(exact.dtype)


def _native(x, beside, form, group, counter):
    """The all-reduce of gloo or NCCL. Exact values need a second one, unless nothing is rounded."""
    if form.name == "fp32" and beside.numel() == 0:
        return collectives.all_reduce(x, group, counter), beside
    if form.name == "fp32" and beside.dtype == x.dtype:
        both = collectives.all_reduce(torch.cat([x, beside]), group, counter)
        return both.split([x.numel(), beside.numel()])
    ranks = group.size()
    # Partial sums in fp16 may reach `ranks` times the largest value.
    shrink = ranks if form.name == "fp16" else 1
    total = view_bytes(form.encode(x[None], ranks * shrink), form.dtype)
    total = collectives.all_reduce(total, group, counter).to(x.dtype).mul_(shrink)
    if beside.numel():
        beside = collectives.all_reduce(beside, group, counter)
    return form.restore(form.rounded(total, ranks), ranks)[0], beside


def _one_shot(x, beside, form, group, counter):
    """Send everything to every rank."""
    ranks = group.size()
    message = _pack(beside[None], form.encode(rows_of(x, 1, form.block), ranks))
    total, beside = _sum(collectives.all_gather(message[0], group, counter), beside.numel(), x, beside, form)
    return form.restore(form.rounded(total, ranks), ranks)[0], beside


def _two_shot(x, beside, form, group, counter):
    """Send each chunk to its owner, and its sum to every rank."""
    ranks = group.size()
    beside = rows_of(beside, ranks, 1)
    message = _pack(beside, form.encode(rows_of(x, ranks, form.block), ranks))
    total, exact = _sum(collectives.all_to_all(message, group, counter), beside.shape[1], x, beside, form)
    received = collectives.all_gather(_pack(exact[None], form.encode_sum(total, ranks))[0], group, counter)
    beside, encoded = _unpack(received, beside.shape[1], beside.dtype)
    return form.restore(form.decode(encoded, x.dtype), ranks).flatten(), beside.flatten()


def _pack(beside, encoded):
    """Join rows of exact values and rows of encoded bytes into one message."""
    return torch.cat([beside.view(torch.uint8), encoded], dim=1) if beside.shape[1] else encoded


def _unpack(message, exact: int, dtype):
    """(exact values (rows, exact) of dtype, the encoded bytes behind them)."""
    if not exact:
        return message.new_empty(len(message), 0, dtype=dtype), message
    front = exact * dtype.itemsize
    return view_bytes(message[:, :front], dtype), message[:, front:]


def _sum(received, exact: int, x, beside, form):
    """Add up the rows of a message (ranks, bytes), in rank order: (decoded values (1, n), exact values)."""
    beside, encoded = _unpack(received, exact, beside.dtype)
    total = form.decode(encoded[:1], x.dtype)
    for rank in range(1, len(encoded)):
        total += form.decode(encoded[rank : rank + 1], x.dtype)
    return total, collectives.in_rank_order(beside)
