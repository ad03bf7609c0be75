"""Writes a tape: operators add operations on buffers, which share one arena by the time in which they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.native.arguments import address
from megatron_ssm.native.kernels import LARGEST_STATE, LONGEST_KERNEL, TYPES, usable
from megatron_ssm.native.products import columns_of
from megatron_ssm.ops.experts import FORMS, Router
from megatron_ssm.ops.quantized_matrices import QuantizedMatrix

from .structs import ACTIVATIONS, KINDS, Matrix, Op, View

LINE = 64  # bytes to which buffers are aligned
MOST_EXPERTS = 1024  # of a layer (tape.h)


class NotLowered(Exception):
    """C does not compute this operator; it stays in Python."""


@dataclass(frozen=True)
class Buffer:
    """Columns of a temporary tensor (rows, stride): `width` of them from `first` on. place: the bytes before it, per row."""

    place: int
    width: int
    dtype: torch.dtype
    first: int = 0
    stride: int = 0

    @property
    def view(self) -> View:
        """C's struct."""
        return View(self.place, self.first, self.stride or self.width)

    def columns(self, first: int, width: int) -> "Buffer":
        """Some of the columns."""
        return Buffer(self.place, width, self.dtype, self.first + first, self.stride or self.width)

    def tensor(self, arena: Tensor, rows: int) -> Tensor:
        """(rows, width): the columns as a tensor."""
        size, stride = self.dtype.itemsize, self.stride or self.width
        start = rows * self.place
        whole = arena[start : start + rows * stride * size].view(self.dtype).view(rows, stride)
        return whole[:, self.first : self.first + self.width]


@dataclass(frozen=True)
class SumOf:
    """An all-reduce of a buffer over ranks. columns: a second buffer, which is summed exactly in the same message."""

    ranks: Any
    part: Buffer
    columns: Buffer | None
    is_exact: bool


@dataclass(frozen=True)
class Summed:
    """The result of `Builder.sum`: number of the sum, and what it adds up."""

    number: int
    part: Buffer


@dataclass
class Builder:
    """A tape that is being written. dtype: of activations. sum_dtype: of the residual stream.

    speculative: whether tokens may be taken back, so that what recurrences read is kept. prompt: whether the tokens are part
    of prompts, whose attention is done in Python. slots: names of the cache's tensors, "path name". kept: what the tape has
    the addresses of.
    """

    dtype: torch.dtype
    sum_dtype: torch.dtype
    speculative: bool = False
    prompt: bool = False
    ops: list[Op] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sums: list[SumOf] = field(default_factory=list)
    slots: list[tuple[str, str]] = field(default_factory=list)
    stops: dict[int, Callable] = field(default_factory=dict)
    tables: list[tuple[int, Op, Callable]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    weights: set[tuple] = field(default_factory=set)
    width: int = 0
    has_experts: bool = False
    path: str = ""
    _free: list[tuple[int, int]] = field(default_factory=list)

    # Buffers

    def buffer(self, width: int, dtype: torch.dtype | None = None) -> Buffer:
        """A new buffer (rows, width); dtype None: that of activations."""
        dtype = dtype or self.dtype
        size = -(-width * dtype.itemsize // LINE) * LINE
        for index, (place, free) in enumerate(self._free):
            if free >= size:
                self._free[index] = (place + size, free - size)
                return Buffer(place, width, dtype)
        place, self.width = self.width, self.width + size
        return Buffer(place, width, dtype)

    def release(self, *buffers: Buffer) -> None:
        """The buffers are not needed after the operations so far."""
        for each in buffers:
            size = -(-(each.stride or each.width) * each.dtype.itemsize // LINE) * LINE
            self._free.append((each.place, size))
        merged: list[tuple[int, int]] = []
        for place, size in sorted(each for each in self._free if each[1]):
            if merged and sum(merged[-1]) == place:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((place, size))
        self._free = merged

    def release_unless_speculative(self, *buffers: Buffer) -> None:
        """`release`, unless the tokens may be taken back: `keep_tokens` then reads the buffers."""
        if not self.speculative:
            self.release(*buffers)

    def mark(self) -> tuple:
        """A point to which `reset` goes back."""
        lists: tuple[Any, ...] = (self.ops, self.names, self.sums, self.slots, self.tables, self.kept)
        return (*map(len, lists), dict(self.stops), set(self.weights), list(self._free))

    def reset(self, mark: tuple) -> None:
        """Forget what was written since the mark; the arena stays as large as it has become."""
        lists: tuple[list, ...] = (self.ops, self.names, self.sums, self.slots, self.tables, self.kept)
        for each, length in zip(lists, mark, strict=False):
            del each[length:]
        self.stops, self.weights, self._free = mark[6], mark[7], mark[8]

    # Operations

    def _add(self, kind: str, detail: str = "", **fields: Any) -> Op:
        """Append an operation. fields: of `Op`; buffers are given as such, numbers n and f as sequences."""
        op = Op(kind=KINDS.index(kind))
        op.type = op.from_type = TYPES[self.dtype]
        for name, value in fields.items():
            if isinstance(value, Buffer):
                value = value.view
            elif isinstance(value, Tensor):
                value = self._address(value)
            if name in ("n", "f"):
                getattr(op, name)[: len(value)] = value
            elif value is not None:
                setattr(op, name, value)
        self.ops.append(op)
        self.names.append(f"{self.path} {kind} {detail}".strip())
        return op

    def _address(self, tensor: Tensor) -> int | None:
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise NotLowered("a tensor that is not contiguous, or not on the CPU")
        self.kept.append(tensor)
        return address(tensor)

    def _typed(self, *tensors: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """NotLowered unless the tensors have a dtype; None: that of activations."""
        if not usable(torch.empty(0, dtype=dtype or self.dtype), *tensors):
            raise NotLowered("tensors of several dtypes")

    def _floats(self, *tensors: Tensor) -> None:
        if any(t.dtype is not torch.float32 for t in tensors):
            raise NotLowered("a parameter that is not float32")

    def _matrix(
        self, weight: Tensor | QuantizedMatrix, has_gaps: bool = False, dtype: torch.dtype | None = None
    ) -> Matrix:
        """The struct of a matrix. dtype: of what it is multiplied by, if not that of activations."""
        dtype = dtype or self.dtype
        if not Matrix.supports(weight, dtype, 1, has_gaps):
            raise NotLowered("a matrix that C does not multiply, or not as fast as torch")
        values = weight if isinstance(weight, Tensor) else weight.values
        self.kept.extend((weight,) if isinstance(weight, Tensor) else (weight.values, weight.scales))
        self.weights.add((values.dtype, dtype, columns_of(values), has_gaps))
        return Matrix.of(weight)

    @staticmethod
    def _activation(activation: str) -> int:
        name = "silu" if activation == "swish" else activation
        if name not in ACTIVATIONS:
            raise NotLowered(f"the activation {activation}")
        return ACTIVATIONS.index(name)

    def embed(self, weight: Any, first: int, count: int, size: int) -> Buffer:
        """This rank's part of the embeddings of the ids, those from `first` on."""
        y = self.buffer(size)
        self._add("embed", y=y, matrix=self._matrix(weight), n=(first, count, size))
        return y

    def sum(self, ranks: Any, part: Buffer, columns: Buffer | None = None, is_exact: bool = False) -> Summed:
        """The sum of a whole buffer over ranks."""
        self.sums.append(SumOf(ranks, part, columns, is_exact))
        self._add("sum", f"of {part.width} numbers", sum=len(self.sums) - 1)
        return Summed(len(self.sums) - 1, part)

    def converted(self, x: Buffer, dtype: torch.dtype, factor: float = 1.0) -> Buffer:
        """factor * x in a dtype."""
        y = self.buffer(x.width, dtype)
        self._add("convert", x=x, y=y, from_type=TYPES[x.dtype], type=TYPES[dtype], n=(x.width,), f=(factor,))
        return y

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor, each rounded to x's dtype."""
        if factor != 1.0:
            self._add("convert", x=x, y=x, from_type=TYPES[x.dtype], type=TYPES[x.dtype], n=(x.width,), f=(factor,))

    def concat(self, x: Buffer, z: Buffer) -> Buffer:
        """[x | z]."""
        y = self.buffer(x.width + z.width)
        self._add("concat", x=x, y=y, z=z, n=(x.width, z.width))
        return y

    def norm(self, x: Buffer, norm: Any) -> Buffer:
        """A `parallel.layers.RMSNorm` of a whole buffer."""
        self._typed(norm.weight)
        y, f = self.buffer(x.width), (norm.eps, norm.offset)
        self._add("norm", x=x, y=y, from_type=TYPES[x.dtype], weight=norm.weight, n=(x.width,), f=f)
        return y

    def head_norms(self, x: Buffer, heads: int, weight: Tensor, eps: float, offset: float) -> None:
        """RMSNorm of each head in place; weight: (size of a head)."""
        self._typed(weight)
        self._add("head_norms", x=x, weight=weight, n=(heads, x.width // heads), f=(eps, offset))

    def squares(self, x: Buffer, y: Buffer) -> None:
        """y (one float32) = the sum of the squares of x."""
        self._add("squares", x=x, y=y, n=(x.width,))

    def whole_norm(
        self, x: Buffer, summed: Summed, column: int, count: int, weight: Tensor, eps: float, offset: float
    ) -> None:
        """RMSNorm in place of `count` numbers, of which x are this rank's; column: of the sum that has their squares."""
        self._typed(weight)
        n = x.width, column, summed.part.width, count
        self._add("whole_norm", x=x, weight=weight, sum=summed.number, n=n, f=(eps, offset))

    def matmul(self, x: Buffer, weight: Any, bias: Tensor | None = None) -> Buffer:
        """x W^T + bias, in x's dtype."""
        out, inputs = weight.shape
        self._typed(bias, dtype=x.dtype)
        y, matrix = self.buffer(out, x.dtype), self._matrix(weight, dtype=x.dtype)
        n = out, inputs
        self._add("matmul", f"({out}, {inputs})", x=x, y=y, type=TYPES[x.dtype], matrix=matrix, bias=bias, n=n)
        return y

    def head_matmuls(self, x: Buffer, y: Buffer, weight: Tensor, out: int, inputs: int, steps: Sequence[int]) -> None:
        """See tape.c. steps: heads; from head to head of W, x and y; from row to row of W."""
        self._add("head_matmuls", x=x, y=y, matrix=self._matrix(weight, has_gaps=steps[0] > 1), n=(out, inputs, *steps))

    def logits(self, x: Buffer, weight: Any, width: int) -> None:
        """`width` logits of the head, of which this rank's vocabulary may have fewer."""
        out, inputs = weight.shape
        y = self.buffer(out)
        self._add("logits", f"({out}, {inputs})", x=x, y=y, matrix=self._matrix(weight), n=(out, inputs, width))
        self.release(y)

    def slot(self, *names: str) -> int:
        """The number of the first of some tensors of this operator's state."""
        self.slots.extend((self.path, name) for name in names)
        return len(self.slots) - len(names)

    def conv(self, x: Buffer, weight: Tensor, bias: Tensor | None) -> Buffer:
        """The convolution of x, with its state `conv`; weight: (channels, 1, K)."""
        self._typed(weight, bias)
        if weight.shape[-1] > LONGEST_KERNEL:
            raise NotLowered("a long convolution")
        y = self.buffer(x.width)
        n = x.width, weight.shape[-1]
        self._add("conv", x=x, y=y, weight=weight, bias=bias, slot=self.slot("conv"), n=n)
        return y

    def step_sizes(self, x: Buffer, dt_bias: Tensor, limits: tuple[float, float]) -> Buffer:
        """softplus(x + dt_bias) in float32, clamped in prompts."""
        self._floats(dt_bias)
        y = self.buffer(x.width, torch.float32)
        self._add("step_sizes", x=x, y=y, dt_bias=dt_bias, n=(x.width,), f=limits)
        return y

    def ssd(
        self, x: Buffer, dt: Buffer, A_log: Tensor, D: Tensor, heads: int, head_dim: int, groups: int, state: int,
        may_round: bool,
    ) -> Buffer:  # fmt: skip
        """Mamba-2's recurrence of [x | B | C], with its state `state`."""
        self._floats(A_log, D)
        if state > LARGEST_STATE:
            raise NotLowered("a large state")
        y, n = self.buffer(heads * head_dim), (heads, head_dim, groups, state)
        self._add("ssd", x=x, y=y, z=dt, A_log=A_log, D=D, slot=self.slot("state"), n=n, flag=may_round)
        return y

    def selective_scan(
        self, x: Buffer, dt: Buffer, gate: Buffer, parameters: Summed, A_log: Tensor, D: Tensor, dt_bias: Tensor,
        heads: int, rank: int, state: int,
    ) -> Buffer:  # fmt: skip
        """Mamba-1's recurrence, with its state `state`, times silu of the gate. parameters: [dt | B | C] of each head."""
        self._floats(A_log, D, dt_bias)
        if state > LARGEST_STATE:
            raise NotLowered("a large state")
        y, z = self.buffer(x.width), gate.view
        n = x.width, heads, rank, state, z.place, z.first, z.stride
        tensors: dict[str, Any] = dict(A_log=A_log, D=D, dt_bias=dt_bias)
        self._add("selective_scan", x=x, y=y, z=dt, **tensors, slot=self.slot("state"), sum=parameters.number, n=n)
        return y

    def inner_norms(
        self, parameters: Summed, heads: int, rank: int, state: int, eps: float, weight: Tensor | None
    ) -> None:
        """Norms of dt, B and C in the sum, in place."""
        self._typed(weight)
        self._add("inner_norms", sum=parameters.number, n=(heads, rank, state), f=(eps,), weight=weight)

    def delta_rates(self, gates: Buffer, A_log: Tensor, dt_bias: Tensor, max_beta: float) -> Buffer:
        """[beta | g] of gated delta nets in float32, of [b | a]."""
        self._floats(A_log, dt_bias)
        y = self.buffer(gates.width, torch.float32)
        self._add("delta_rates", x=gates, y=y, A_log=A_log, dt_bias=dt_bias, n=(len(A_log),), f=(max_beta,))
        return y

    def gated_delta(self, x: Buffer, rates: Buffer, key_heads: int, heads: int, size: int, width: int) -> Buffer:
        """The gated delta rule of [q | k | v], with its state `state`; size, width: of a state."""
        if size > LARGEST_STATE:
            raise NotLowered("a large state")
        y = self.buffer(heads * width)
        self._add("gated_delta", x=x, y=y, z=rates, slot=self.slot("state"), n=(key_heads, heads, size, width))
        return y

    def norm_gated(self, x: Buffer, gate: Buffer, weight: Tensor, eps: float) -> Buffer:
        """The norm of each head of x times weight (size of a head), and then times silu of the gate."""
        self._typed(weight)
        y = self.buffer(x.width)
        self._add("norm_gated", x=x, y=y, z=gate, weight=weight, n=(x.width // len(weight), len(weight)), f=(eps,))
        return y

    def gated_norm(
        self, x: Buffer, gate: Buffer, weight: Tensor, groups: int, eps: float, squares: Buffer | None
    ) -> Buffer:
        """norm(x * silu(gate)) * weight; squares: receives the sums of squares instead of the norm."""
        self._typed(weight)
        y = self.buffer(x.width)
        n = groups, x.width // groups, 0 if squares is None else squares.place + 1
        self._add("gated_norm", x=x, y=y, z=gate, weight=weight, n=n, f=(eps,))
        return y

    def add(self, x: Buffer, z: Buffer, factor: float = 1.0, into: bool = False) -> Buffer:
        """x + factor * z, in x's dtype. into: overwrite x."""
        y = x if into else self.buffer(x.width, x.dtype)
        kinds: dict[str, Any] = dict(from_type=TYPES[x.dtype], type=TYPES[z.dtype])
        self._add("add", x=x, y=y, z=z, n=(x.width,), f=(factor,), **kinds)
        return y

    def residual(
        self, x: Buffer, summed: Summed, biases: Sequence[Tensor] = (), scales: tuple[float, float] = (1.0, 1.0),
        group: int = 1, eps: float = 0.0,
    ) -> Buffer:  # fmt: skip
        """x + r (o sum + bias), in place; with exact columns, the sum is first divided by the root of their mean square.

        biases: at most two.
        """
        fields: dict[str, Any] = dict(sum=summed.number, n=(x.width, group), f=(*scales, eps), **self._biases(biases))
        self._add("residual", x=x, y=x, from_type=TYPES[x.dtype], **fields)
        return x

    def whole(self, summed: Summed, biases: Sequence[Tensor]) -> Buffer:
        """A sum plus its biases, at most two, as a buffer of activations."""
        y = self.buffer(summed.part.width)
        fields: dict[str, Any] = dict(sum=summed.number, n=(y.width, 1), f=(1.0, 1.0), **self._biases(biases))
        self._add("residual", "alone", x=y, y=y, flag=True, **fields)
        return y

    def _biases(self, biases: Sequence[Tensor]) -> dict[str, Tensor]:
        if len(biases) > 2:
            raise NotLowered("more than two operators with biases")
        self._typed(*biases)
        return dict(zip(("bias", "weight"), biases, strict=False))

    def activate(self, gate: Buffer, up: Buffer | None, activation: str, factor: float = 1.0) -> Buffer:
        """activation(factor * gate) * up; up None: without it."""
        y, n = self.buffer(gate.width), (gate.width, self._activation(activation))
        self._add("activate", activation, x=gate, y=y, z=up or gate, n=n, f=(factor,), flag=up is not None)
        return y

    def score(self, x: Buffer, score: Buffer) -> None:
        """x *= the sigmoid of a buffer of one number."""
        self._add("score", x=x, y=x, z=score, n=(x.width,))

    def route(self, logits: Buffer, router: Router, correction: Tensor | None, first: int = 0) -> Buffer:
        """The experts that each token chooses, counted from `first`, this rank's, and their weights.

        correction: of `Router.route`, in float32.
        """
        if router.experts > MOST_EXPERTS:
            raise NotLowered("many experts")
        self._floats(*[] if correction is None else [correction])
        y = self.buffer(2 * router.chosen, torch.float32)
        n: tuple = router.experts, router.chosen, FORMS.index(router.form), router.renormalized
        n = *n, router.groups, router.chosen_groups, first
        self._add("route", x=logits, y=y, from_type=TYPES[logits.dtype], weight=correction, n=n, f=(router.scale,))
        return y

    def experts(
        self, x: Buffer, routes: Buffer, held: int, chosen: int, up: Any, down: Any, activation: str, gated: bool
    ) -> Buffer:
        """The weighted sums of what the experts of this rank, `held`, that `route` has chosen make of x.

        up, down: as of `ops.experts.apply_experts`.
        """
        number, size, channels = self._activation(activation), x.width, down.shape[1]
        width = up.shape[0] // held
        y, each, inner = self.buffer(size), self.buffer(chosen * size), self.buffer(chosen * width)
        places = self.buffer(chosen, torch.float32)
        n = held, chosen, size, channels, number, each.place, inner.place, places.place
        matrices: dict[str, Any] = dict(matrix=self._matrix(up), down=self._matrix(down))
        detail = f"{chosen} of {held} ({width}, {size})"
        self._add("experts", detail, x=x, y=y, z=routes, **matrices, n=n, flag=gated)
        self.release(each, inner, places)
        self.has_experts = True
        return y

    def rotate(self, x: Buffer, heads: int, head_dim: int, size: int, table: Callable[[int], Tensor]) -> None:
        """Rotate heads in place. table(length): (length, size) of the activations' dtype, cosines and then sines."""
        op = self._add("rotate", x=x, n=(heads, head_dim, size))
        self.tables.append((size, op, table))

    def append(self, x: Buffer, name: str) -> int:
        """Store a row of x in a per-token tensor of the state; returns its slot."""
        slot = self.slot(name)
        self._add("append", name, x=x, slot=slot, n=(x.width,))
        return slot

    def attend(self, q: Buffer, slot: int, heads: int, kv_heads: int, head_dim: int, scale: float) -> Buffer:
        """Attention of q to the keys in a slot, and to the values in the next one."""
        y = self.buffer(q.width)
        self._add("attend", x=q, y=y, slot=slot, n=(heads, kv_heads, head_dim), f=(scale,))
        return y

    def stop(self, function: Callable, detail: str) -> None:
        """Let Python do something: function(call), with a `run.BoundCall`."""
        self._add("stop", detail)
        self.stops[len(self.ops) - 1] = function


def rotary_table(theta: float, size: int, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """For `Builder.rotate`: cosines and sines of position * theta^(-2i/size), as `operators.attention.rotate` has them."""

    def table(length: int) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = 1.0 / theta ** (torch.arange(0, size, 2).to(wide) / size)
        angles = torch.arange(length).unsqueeze(1).to(wide) * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    return table
