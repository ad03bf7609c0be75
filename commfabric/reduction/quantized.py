"""The quantized all-reduce: sends fewer bytes for a sum, and gives the same bits on every rank.

It has three algorithms, for P ranks and n elements that have b(n) bytes in the wire format (see
`collectives.wire_formats`):

| algorithm | messages | bytes that a rank sends | rounds |
|---|---|---|---|
| native | one all-reduce of gloo or NCCL, in the dtype of the format (not int8) | 2 (P-1)/P b(n) | depends on the backend |
| one_shot | all-gather of all elements; every rank adds them up in rank order | (P-1) b(n) | 1 |
| two_shot | all-to-all of P chunks; a chunk's owner adds it up; all-gather of the sums | 2 (P-1) b(n/P) | 2 |

one_shot and two_shot add in at least fp32. native fp16 sends x / P^2, so that no partial sum overflows, and loses
precision below about 1e-4 P^2. Values that must not be rounded (`exact`) are sent in the same messages. Every rank
decodes the same bytes in the same order, its own included, so all results have the same bits. In fp16 and bf16, one_shot
and two_shot give the same bits.
"""

import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
import torch.distributed as dist

from commfabric import FORMATS
from commfabric.collectives import counted as collectives
from commfabric.collectives.agreement import check_member
from commfabric.collectives.counted import Counter
from commfabric.collectives.wire_formats import (
    BLOCK,
    Cast,
    WireFormat,
    at_least_fp32,
    padded,
    rows_of,
    view_bytes,
    wire_format,
)
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.measurement import measure

ALGORITHMS = ("native", "one_shot", "two_shot")
LATENCY_BYTES = 32 * 1024  # the bytes that a link transmits in about the latency of a round (alpha / beta)
# The formats and algorithms of `auto`, the most exact first.
CANDIDATES = (
    ("fp32", "native"), ("fp32", "one_shot"), ("fp16", "native"), ("fp16", "one_shot"), ("fp16", "two_shot"),
    ("bf16", "one_shot"), ("bf16", "two_shot"), ("int8", "one_shot"), ("int8", "two_shot"),
)  # fmt: skip
AUTO_SIZES = [*(1 << bits for bits in range(11, 21)), 1 << 22]  # sizes that `auto` measures, in bytes of float32
TIE_RATIO = 1.05  # candidates within this factor of the fastest time count as equally fast

log = logging.getLogger(__name__)


@overload
def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = ...,
    format: str = ...,
    algorithm: str | None = ...,
    counter: Counter | None = ...,
    exact: None = ...,
) -> torch.Tensor:
    """One tensor."""


@overload
def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = ...,
    format: str = ...,
    algorithm: str | None = ...,
    counter: Counter | None = ...,
    exact: torch.Tensor = ...,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors; the second is summed in at least fp32."""


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    format: str = "fp16",
    algorithm: str | None = None,
    counter: Counter | None = None,
    exact: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The sum of the ranks' tensors: a new tensor with the same bits on all ranks.

    Backward is the identity and sends nothing, because every rank uses the same sum in the same way: the operator g of
    Megatron-LM (Shoeybi et al., 2019).

    Args:
        tensor: A floating-point tensor with the same shape and dtype on all ranks. The sum has the same shape and dtype.
        group: The ranks. By default torch's default group, or one rank if torch.distributed is not initialized.
        format: The wire format: fp32, fp16, bf16, int8 (see `collectives.wire_formats`), or auto. auto measures the links
            of the group in the first call, which takes a few seconds, and uses the fastest format and algorithm, the same
            on all ranks.
        algorithm: native, one_shot or two_shot; by default that of `default_algorithm`.
        counter: Counts the collectives and their bytes.
        exact: A second floating-point tensor, which is summed in at least fp32. The result is then (sum, exact sum).

    Raises:
        ValueError: The format or algorithm is unknown, int8 is combined with native, a tensor is not floating point, or
            this rank does not belong to the group.
    """
    _check(tensor, group, format, algorithm, exact)
    group = dist.group.WORLD if group is None and dist.is_initialized() else group
    is_empty = not tensor.numel() and (exact is None or not exact.numel())
    if group is None or group.size() == 1 or is_empty:
        return (tensor.clone(), exact.clone()) if exact is not None else tensor.clone()
    if format == "auto":
        format, algorithm = format_choice(group, tensor.device).choose(tensor.numel())
    algorithm = algorithm or default_algorithm(format, tensor.numel(), group.size(), tensor.device.type)
    sums = _AllReduce.apply if torch.is_grad_enabled() else _sums
    total, exact_total = sums(tensor, exact, group, format, algorithm, counter)
    return total if exact_total is None else (total, exact_total)


def _check(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    format: str,
    algorithm: str | None,
    exact: torch.Tensor | None,
) -> None:
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: expected {', '.join(FORMATS)}")
    if algorithm not in (None, *ALGORITHMS):
        raise ValueError(f"unknown algorithm {algorithm!r}: expected {', '.join(ALGORITHMS)}")
    if (format, algorithm) == ("int8", "native"):
        raise ValueError(
            "int8 has no native all-reduce, because sums of 8-bit integers overflow: use one_shot or two_shot"
        )
    if format == "auto" and algorithm is not None:
        raise ValueError(f"algorithm must be None with format='auto', not {algorithm!r}")
    for operand in (tensor, exact):
        if operand is not None and not (isinstance(operand, torch.Tensor) and operand.is_floating_point()):
            kind = getattr(operand, "dtype", type(operand).__name__)
            raise ValueError(f"all_reduce needs floating-point tensors, not {kind}")
    check_member(group)


def default_algorithm(format: str, numel: int, ranks: int, device: str = "cpu") -> str:
    """The default algorithm of a format. It depends on sizes only, so that results are reproducible.

    fp32 uses native, and on CUDA so do fp16 and bf16. The others use one_shot as long as it sends at most 32 KB more than
    two_shot, which has one more round; so between two ranks they always use one_shot. device: "cpu" or "cuda".
    """
    if format == "fp32" or (format != "int8" and device == "cuda"):
        return "native"
    nbytes = wire_format(format, torch.float32).nbytes(padded(numel, BLOCK))
    return "one_shot" if (ranks - 1) * (ranks - 2) * nbytes <= ranks * LATENCY_BYTES else "two_shot"


@dataclass
class FormatChoice:
    """Chooses the fastest format and algorithm for each size. fabric: the times of CANDIDATES on `ranks` ranks."""

    fabric: Fabric
    ranks: int
    _known: dict[int, tuple[str, str]] = field(default_factory=dict)

    def choose(self, numel: int) -> tuple[str, str]:
        """(format, algorithm) for `numel` elements of float32: the most exact candidate within 5 % of the fastest.

        Sizes above the largest measured size are treated like it. A candidate that was too slow at smaller sizes was not
        measured at this one, and is left out.
        """
        if numel not in self._known:
            curves = [self.fabric.curve(operation(*each), self.ranks) for each in CANDIDATES]
            nbytes = min(4 * numel, max(curve.nbytes[-1] for curve in curves))
            seconds = [curve.interpolated(nbytes) if nbytes <= curve.nbytes[-1] else math.inf for curve in curves]
            limit = TIE_RATIO * min(seconds)
            self._known[numel] = next(c for c, time in zip(CANDIDATES, seconds, strict=True) if time <= limit)
        return self._known[numel]

    def __str__(self) -> str:
        choices: dict[str, str] = {}
        for bits in range(8, 21):
            choices.setdefault(" ".join(self.choose(1 << bits)), f"{(4 << bits) // 1024} KB")
        return ", ".join(f"from {size} {choice}" for choice, size in choices.items())


# {group: {device type: choice}}: the links of a group are measured once for each type of device.
_CHOICES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, FormatChoice]] = weakref.WeakKeyDictionary()


def format_choice(group: dist.ProcessGroup, device: torch.device | str = "cpu") -> FormatChoice:
    """The `FormatChoice` of a group for tensors on `device`. The first call measures; all ranks call it together."""
    choices, kind = _CHOICES.setdefault(group, {}), torch.device(device).type
    if kind not in choices:
        calls = {operation(*each): _candidate(group, device, *each) for each in CANDIDATES}
        choices[kind] = FormatChoice(measure(group, calls, AUTO_SIZES, device, race=True), group.size())
        log.info("all-reduce among %d ranks: %s", group.size(), choices[kind])
    return choices[kind]


def operation(format: str, algorithm: str) -> str:
    """The operation of a fabric for the all-reduce in this format with this algorithm."""
    return "all_reduce" if (format, algorithm) == ("fp32", "native") else f"all_reduce {format} {algorithm}"


def _candidate(
    group: dist.ProcessGroup, device: torch.device | str, format: str, algorithm: str
) -> Callable[[int], Callable[[], torch.Tensor]]:
    """A factory for `measure`: `prepare(nbytes)` allocates nbytes of float32 and returns a function that all-reduces them
    once.
    """

    def prepare(nbytes: int) -> Callable[[], torch.Tensor]:
        tensor = torch.ones(nbytes // 4, device=device)
        return lambda: all_reduce(tensor, group, format, algorithm)

    return prepare


class _AllReduce(torch.autograd.Function):
    """The sums of `tensor` and `exact` over the group; identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exact: torch.Tensor | None, *options: Any) -> Any:
        return _sums(tensor, exact, *options)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, exact_grad: torch.Tensor) -> Any:
        return grad, exact_grad, None, None, None, None


def _sums(
    tensor: torch.Tensor,
    exact: torch.Tensor | None,
    group: dist.ProcessGroup,
    format: str,
    algorithm: str,
    counter: Counter | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of `tensor` in a format and of `exact` (or None), with their shapes and dtypes."""
    accumulated = at_least_fp32(tensor.dtype)
    x = tensor.detach().to(accumulated).reshape(-1).contiguous()  # (n,)
    exact_values = x.new_empty(0) if exact is None else exact.detach().reshape(-1).contiguous()  # (m,)
    exact_values = exact_values.to(at_least_fp32(exact_values.dtype))
    function = {"native": _native, "one_shot": _one_shot, "two_shot": _two_shot}[algorithm]
    total, exact_total = function(x, exact_values, wire_format(format, accumulated), group, counter)
    total = total[: x.numel()].view(tensor.shape).to(tensor.dtype)
    return total, None if exact is None else exact_total[: exact.numel()].view(exact.shape).to(exact.dtype)


# The algorithms map x (n,) and exact (m,), both at least fp32, to their sums; two_shot pads the sums with zeros.


def _native(
    x: torch.Tensor, exact: torch.Tensor, form: WireFormat, group: dist.ProcessGroup, counter: Counter | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The all-reduce of gloo or NCCL. Exact values need a second all-reduce, except with fp32."""
    assert isinstance(form, Cast)  # all_reduce refuses int8
    if form.name == "fp32" and exact.numel() == 0:
        return collectives.all_reduce(x, group, counter), exact
    if form.name == "fp32" and exact.dtype == x.dtype:
        both = collectives.all_reduce(torch.cat([x, exact]), group, counter)
        return both[: x.numel()], both[x.numel() :]
    ranks = group.size()
    # Partial sums in fp16 may reach `ranks` times the largest value.
    shrink = ranks if form.name == "fp16" else 1
    total = view_bytes(form.encode(x[None], ranks * shrink), form.dtype)
    total = collectives.all_reduce(total, group, counter).to(x.dtype).mul_(shrink)
    if exact.numel():
        exact = collectives.all_reduce(exact, group, counter)
    return form.undo_scaling(form.round_to_wire(total, ranks), ranks)[0], exact


def _one_shot(
    x: torch.Tensor, exact: torch.Tensor, form: WireFormat, group: dist.ProcessGroup, counter: Counter | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = group.size()
    message = _pack(exact[None], form.encode(rows_of(x, 1, form.block), ranks))[0]
    received = collectives.all_gather(message, group, counter)
    total, exact_total = _sum(received, exact.numel(), x.dtype, exact.dtype, form)
    return form.undo_scaling(form.round_to_wire(total, ranks), ranks)[0], exact_total


def _two_shot(
    x: torch.Tensor, exact: torch.Tensor, form: WireFormat, group: dist.ProcessGroup, counter: Counter | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each chunk to its owner, and the owner's sum to every rank."""
    ranks = group.size()
    exact_rows = rows_of(exact, ranks, 1)  # (ranks, count)
    count = exact_rows.shape[1]
    message = _pack(exact_rows, form.encode(rows_of(x, ranks, form.block), ranks))  # (ranks, bytes)
    received = collectives.all_to_all(message, group, counter)
    total, exact_total = _sum(received, count, x.dtype, exact.dtype, form)
    sums = collectives.all_gather(_pack(exact_total[None], form.encode_sum(total, ranks))[0], group, counter)
    exact_sums, encoded = _unpack(sums, count, exact.dtype)
    return form.undo_scaling(form.decode(encoded, x.dtype), ranks).flatten(), exact_sums.flatten()


def _pack(exact: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    """Join exact values (rows, count) and encoded bytes (rows, b) into messages (rows, bytes)."""
    return torch.cat([exact.view(torch.uint8), encoded], dim=1) if exact.shape[1] else encoded


def _unpack(message: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact values (rows, count) of `dtype` in a message, and the encoded bytes that follow them."""
    if not count:
        return message.new_empty(len(message), 0, dtype=dtype), message
    front = count * dtype.itemsize
    return view_bytes(message[:, :front], dtype), message[:, front:]


def _sum(
    received: torch.Tensor, count: int, dtype: torch.dtype, exact_dtype: torch.dtype, form: WireFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows of a message (ranks, bytes) in rank order: (decoded values (1, n), exact values (count,))."""
    exact, encoded = _unpack(received, count, exact_dtype)
    total = form.decode(encoded[:1], dtype)
    for rank in range(1, len(encoded)):
        total += form.decode(encoded[rank : rank + 1], dtype)
    return total, collectives.in_rank_order(exact)
