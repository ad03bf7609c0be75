"""The builder of a tape: operators add operations on buffers. Buffers that are not needed at the same time share memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.kernels.experts import FORMS, Router
from megatron_ssm.kernels.kernels import LARGEST_STATE, LONGEST_KERNEL, TYPES, usable
from megatron_ssm.kernels.products import columns_of
from megatron_ssm.kernels.quantized_matrices import QuantizedMatrix

from .tape_operations import ACTIVATIONS, KINDS, Matrix, Op, View

ALIGNMENT = 64  # bytes to which buffers are aligned
MOST_EXPERTS = 1024  # the limit of experts in a layer (tape.h)


class NotLowered(Exception):
    """C does not support an operator, so Python computes it."""


@dataclass(frozen=True)
class Buffer:
    """Columns of a temporary tensor (rows, stride) in the arena of a call.

    Attributes:
        offset: The tensor starts at byte `offset` * rows of the arena.
        width: The number of columns.
        dtype: The dtype.
        first: The index of the first column.
        stride: The number of columns of the tensor; 0: `width`.
    """

    offset: int
    width: int
    dtype: torch.dtype
    first: int = 0
    stride: int = 0

    @property
    def view(self) -> View:
        return View(self.offset, self.first, self.stride or self.width)

    def columns(self, first: int, width: int) -> "Buffer":
        return Buffer(self.offset, width, self.dtype, self.first + first, self.stride or self.width)

    def tensor(self, arena: Tensor, rows: int) -> Tensor:
        """The columns as a tensor (rows, width)."""
        size, stride = self.dtype.itemsize, self.stride or self.width
        start = rows * self.offset
        whole = arena[start : start + rows * stride * size].view(self.dtype).view(rows, stride)
        return whole[:, self.first : self.first + self.width]


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of a buffer, `part`, over `parallel.ranks.Ranks`.

    columns: A second buffer, which the same message sums without rounding to the wire format; or None. is_exact: True to sum
    in at least fp32, and not in the model's wire format.
    """

    ranks: Any
    part: Buffer
    columns: Buffer | None
    is_exact: bool


@dataclass(frozen=True)
class SumResult:
    """The result of `Builder.sum`: the index of the all-reduce, and its buffer."""

    number: int
    part: Buffer


@dataclass
class Builder:
    """A tape that is being written.

    Attributes:
        dtype: The dtype of activations.
        sum_dtype: The dtype of the residual stream.
        speculative: True if tokens may be rejected, so that the inputs of recurrences must stay in memory.
        prompt: True if the tokens are part of prompts, whose attention Python computes.
        ops, names: The operations, and a description of each.
        sums: The all-reduces.
        slots: (path of an operator, name of a tensor of its state), for the tensors of the cache.
        stops: {index of a "stop": the function that Python calls}.
        tables: (size, operation, function of the length) for the tables of rotations.
        tensors: The tensors whose addresses are in the tape.
        products: (dtype of the matrix, dtype of x, columns, has_gaps) of each product for which C needs a kernel (see
            `products.has_kernel`).
        has_experts: True if a layer has routed experts.
        path: The path of the operator that is being written.
    """

    dtype: torch.dtype
    sum_dtype: torch.dtype
    speculative: bool = False
    prompt: bool = False
    ops: list[Op] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sums: list[AllReduce] = field(default_factory=list)
    slots: list[tuple[str, str]] = field(default_factory=list)
    stops: dict[int, Callable] = field(default_factory=dict)
    tables: list[tuple[int, Op, Callable]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    products: set[tuple] = field(default_factory=set)
    arena_bytes_per_row: int = 0
    has_experts: bool = False
    path: str = ""
    _free: list[tuple[int, int]] = field(default_factory=list)

    # Buffers

    def buffer(self, width: int, dtype: torch.dtype | None = None) -> Buffer:
        """A new buffer (rows, width), by default in the dtype of activations."""
        dtype = dtype or self.dtype
        size = -(-width * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index] = (offset + size, free - size)
                return Buffer(offset, width, dtype)
        offset, self.arena_bytes_per_row = self.arena_bytes_per_row, self.arena_bytes_per_row + size
        return Buffer(offset, width, dtype)

    def release(self, *buffers: Buffer) -> None:
        """Let later operations reuse the memory of these buffers."""
        for buffer in buffers:
            size = -(-(buffer.stride or buffer.width) * buffer.dtype.itemsize // ALIGNMENT) * ALIGNMENT
            self._free.append((buffer.offset, size))
        merged: list[tuple[int, int]] = []
        for offset, size in sorted((offset, size) for offset, size in self._free if size):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    def release_unless_speculative(self, *buffers: Buffer) -> None:
        """Release the buffers, unless tokens may be rejected: C's `keep_tokens` then reads them."""
        if not self.speculative:
            self.release(*buffers)

    def mark(self) -> tuple:
        """The state of the tape, to which `reset` can return."""
        lists: tuple[Any, ...] = (self.ops, self.names, self.sums, self.slots, self.tables, self.tensors)
        return (*map(len, lists), dict(self.stops), set(self.products), list(self._free))

    def reset(self, mark: tuple) -> None:
        """Remove the operations since `mark`. The arena does not shrink."""
        lists: tuple[list, ...] = (self.ops, self.names, self.sums, self.slots, self.tables, self.tensors)
        for entries, length in zip(lists, mark, strict=False):
            del entries[length:]
        self.stops, self.products, self._free = mark[6], mark[7], mark[8]

    # Operations

    def _add(self, kind: str, detail: str = "", **fields: Any) -> Op:
        """Append an operation.

        Args:
            kind: A name of KINDS.
            detail: A text for `FinishedTape.describe`.
            fields: {field of `Op`: value}. Buffers become views, tensors become addresses; n and f take sequences of
                numbers; other values are stored unchanged.
        """
        op = Op(kind=KINDS.index(kind))
        op.type = op.from_type = TYPES[self.dtype]
        for name, value in fields.items():
            if isinstance(value, Buffer):
                value = value.view
            elif isinstance(value, Tensor):
                if not value.is_cpu or not value.is_contiguous():
                    raise NotLowered("a tensor that is not contiguous, or not on the CPU")
                self.tensors.append(value)
                value = value.data_ptr()
            if name in ("n", "f"):
                getattr(op, name)[: len(value)] = value
            elif value is not None:
                setattr(op, name, value)
        self.ops.append(op)
        self.names.append(f"{self.path} {kind} {detail}".strip())
        return op

    def _check_typed(self, *tensors: Tensor | None, dtype: torch.dtype | None = None) -> None:
        if not usable(torch.empty(0, dtype=dtype or self.dtype), *tensors):
            raise NotLowered("tensors of several dtypes")

    def _check_float32(self, *tensors: Tensor) -> None:
        if any(t.dtype is not torch.float32 for t in tensors):
            raise NotLowered("a parameter that is not float32")

    def _matrix(
        self, weight: Tensor | QuantizedMatrix, has_gaps: bool = False, dtype: torch.dtype | None = None
    ) -> Matrix:
        """The struct of a matrix that is multiplied by rows of `dtype`, by default that of activations."""
        dtype = dtype or self.dtype
        if not Matrix.supports(weight, dtype, 1, has_gaps):
            raise NotLowered("a matrix for which C has no kernel that is as fast as torch")
        values = weight if isinstance(weight, Tensor) else weight.values
        self.tensors.extend((weight,) if isinstance(weight, Tensor) else (weight.values, weight.scales))
        self.products.add((values.dtype, dtype, columns_of(values), has_gaps))
        return Matrix.of(weight)

    @staticmethod
    def _activation(activation: str) -> int:
        name = "silu" if activation == "swish" else activation
        if name not in ACTIVATIONS:
            raise NotLowered(f"the activation {activation}")
        return ACTIVATIONS.index(name)

    def embed(self, weight: Any, first: int, count: int, size: int) -> Buffer:
        """The embeddings of ids `first` to `first` + `count` - 1, which this rank holds; zeros for other ids."""
        y = self.buffer(size)
        self._add("embed", y=y, matrix=self._matrix(weight), n=(first, count, size))
        return y

    def sum(self, ranks: Any, part: Buffer, columns: Buffer | None = None, is_exact: bool = False) -> SumResult:
        """The sum of a whole buffer over ranks. columns: as in `AllReduce`."""
        self.sums.append(AllReduce(ranks, part, columns, is_exact))
        self._add("sum", f"of {part.width} numbers", sum=len(self.sums) - 1)
        return SumResult(len(self.sums) - 1, part)

    def converted(self, x: Buffer, dtype: torch.dtype, factor: float = 1.0) -> Buffer:
        """factor * x in another dtype."""
        y = self.buffer(x.width, dtype)
        self._add("convert", x=x, y=y, from_type=TYPES[x.dtype], type=TYPES[dtype], n=(x.width,), f=(factor,))
        return y

    def scale(self, x: Buffer, factor: float) -> None:
        if factor != 1.0:
            self._add("convert", x=x, y=x, from_type=TYPES[x.dtype], type=TYPES[x.dtype], n=(x.width,), f=(factor,))

    def concat(self, x: Buffer, z: Buffer) -> Buffer:
        """[x | z]."""
        y = self.buffer(x.width + z.width)
        self._add("concat", x=x, y=y, z=z, n=(x.width, z.width))
        return y

    def norm(self, x: Buffer, norm: Any) -> Buffer:
        """The output of `norm`, a `parallel.layers.RMSNorm`, for a whole buffer."""
        self._check_typed(norm.weight)
        y, f = self.buffer(x.width), (norm.eps, norm.offset)
        self._add("norm", x=x, y=y, from_type=TYPES[x.dtype], weight=norm.weight, n=(x.width,), f=f)
        return y

    def head_norms(self, x: Buffer, heads: int, weight: Tensor, eps: float, offset: float) -> None:
        """RMSNorm of each head, in place. weight: (size of a head,)."""
        self._check_typed(weight)
        self._add("head_norms", x=x, weight=weight, n=(heads, x.width // heads), f=(eps, offset))

    def squares(self, x: Buffer, y: Buffer) -> None:
        """y, one float32, = the sum of squares of x."""
        self._add("squares", x=x, y=y, n=(x.width,))

    def whole_norm(
        self, x: Buffer, summed: SumResult, column: int, count: int, weight: Tensor, eps: float, offset: float
    ) -> None:
        """RMSNorm over `count` numbers on all ranks, in place for this rank's x.

        Column `column` of `summed` is the sum of squares of these numbers over all ranks.
        """
        self._check_typed(weight)
        n = x.width, column, summed.part.width, count
        self._add("whole_norm", x=x, weight=weight, sum=summed.number, n=n, f=(eps, offset))

    def matmul(self, x: Buffer, weight: Any, bias: Tensor | None = None) -> Buffer:
        """The product x W^T + bias, in x's dtype."""
        out, inputs = weight.shape
        self._check_typed(bias, dtype=x.dtype)
        y, matrix = self.buffer(out, x.dtype), self._matrix(weight, dtype=x.dtype)
        n = out, inputs
        self._add("matmul", f"({out}, {inputs})", x=x, y=y, type=TYPES[x.dtype], matrix=matrix, bias=bias, n=n)
        return y

    def head_matmuls(self, x: Buffer, y: Buffer, weight: Tensor, out: int, inputs: int, steps: Sequence[int]) -> None:
        """y = x W^T for each head, which has its own columns of x and y and its own rows or columns of W.

        out, inputs: The size of the matrix of a head. steps: (heads, stride of heads in W, in x, in y, stride of rows in W),
        in elements.
        """
        self._add("head_matmuls", x=x, y=y, matrix=self._matrix(weight, has_gaps=steps[0] > 1), n=(out, inputs, *steps))

    def logits(self, x: Buffer, weight: Any, width: int) -> None:
        """The logits of this rank's rows of the head, padded to `width` columns."""
        out, inputs = weight.shape
        y = self.buffer(out)
        self._add("logits", f"({out}, {inputs})", x=x, y=y, matrix=self._matrix(weight), n=(out, inputs, width))
        self.release(y)

    def state_slot(self, *names: str) -> int:
        """Add tensors of this operator's state to the slots; return the index of the first one."""
        self.slots.extend((self.path, name) for name in names)
        return len(self.slots) - len(names)

    def conv(self, x: Buffer, weight: Tensor, bias: Tensor | None) -> Buffer:
        """The causal convolution of x, with the state `conv`. weight: (channels, 1, K)."""
        self._check_typed(weight, bias)
        if weight.shape[-1] > LONGEST_KERNEL:
            raise NotLowered("a long convolution")
        y = self.buffer(x.width)
        n = x.width, weight.shape[-1]
        self._add("conv", x=x, y=y, weight=weight, bias=bias, slot=self.state_slot("conv"), n=n)
        return y

    def step_sizes(self, x: Buffer, dt_bias: Tensor, limits: tuple[float, float]) -> Buffer:
        """softplus(x + dt_bias) in float32, clamped to `limits` in prompts."""
        self._check_float32(dt_bias)
        y = self.buffer(x.width, torch.float32)
        self._add("step_sizes", x=x, y=y, dt_bias=dt_bias, n=(x.width,), f=limits)
        return y

    def ssd(
        self, x: Buffer, dt: Buffer, A_log: Tensor, D: Tensor, heads: int, head_dim: int, groups: int, state: int,
        may_round: bool,
    ) -> Buffer:  # fmt: skip
        """`kernels.scan.ssd`. x: a buffer with the columns [x | B | C]; the recurrent state is the tensor "state"."""
        self._check_float32(A_log, D)
        if state > LARGEST_STATE:
            raise NotLowered("a large state")
        y, n = self.buffer(heads * head_dim), (heads, head_dim, groups, state)
        self._add("ssd", x=x, y=y, z=dt, A_log=A_log, D=D, slot=self.state_slot("state"), n=n, flag=may_round)
        return y

    def selective_scan(
        self, x: Buffer, dt: Buffer, gate: Buffer, parameters: SumResult, A_log: Tensor, D: Tensor, dt_bias: Tensor,
        heads: int, rank: int, state: int,
    ) -> Buffer:  # fmt: skip
        """`kernels.scan.selective_scan`, with the state `state`.

        Args:
            x, dt, gate: The inputs, one column per channel.
            parameters: [dt | B | C] of each head, before the projection of dt.
            A_log, D, dt_bias: The parameters, in float32.
            heads, rank, state: The number of heads, the rank of dt, and N.
        """
        self._check_float32(A_log, D, dt_bias)
        if state > LARGEST_STATE:
            raise NotLowered("a large state")
        y, z = self.buffer(x.width), gate.view
        n = x.width, heads, rank, state, z.offset, z.first, z.stride
        tensors: dict[str, Any] = dict(A_log=A_log, D=D, dt_bias=dt_bias)
        self._add(
            "selective_scan", x=x, y=y, z=dt, **tensors, slot=self.state_slot("state"), sum=parameters.number, n=n
        )
        return y

    def inner_norms(
        self, parameters: SumResult, heads: int, rank: int, state: int, eps: float, weight: Tensor | None
    ) -> None:
        """RMSNorm of dt, of B and of C of each head in [dt | B | C], in place."""
        self._check_typed(weight)
        self._add("inner_norms", sum=parameters.number, n=(heads, rank, state), f=(eps,), weight=weight)

    def delta_rates(self, gates: Buffer, A_log: Tensor, dt_bias: Tensor, max_beta: float) -> Buffer:
        """[beta | g] of a gated delta net in float32, from its gates [b | a]."""
        self._check_float32(A_log, dt_bias)
        y = self.buffer(gates.width, torch.float32)
        self._add("delta_rates", x=gates, y=y, A_log=A_log, dt_bias=dt_bias, n=(len(A_log),), f=(max_beta,))
        return y

    def gated_delta(self, x: Buffer, rates: Buffer, key_heads: int, heads: int, size: int, width: int) -> Buffer:
        """`kernels.gated_delta.gated_delta` of x, [q | k | v], and rates, [beta | g], with the state `state`.

        key_heads, heads: The number of key heads and of value heads. size, width: The size of a key and of a value.
        """
        if size > LARGEST_STATE:
            raise NotLowered("a large state")
        y = self.buffer(heads * width)
        self._add("gated_delta", x=x, y=y, z=rates, slot=self.state_slot("state"), n=(key_heads, heads, size, width))
        return y

    def norm_gated(self, x: Buffer, gate: Buffer, weight: Tensor, eps: float) -> Buffer:
        """weight * RMSNorm(x) * silu(gate), normalized over each head. weight: (size of a head,)."""
        self._check_typed(weight)
        y = self.buffer(x.width)
        self._add("norm_gated", x=x, y=y, z=gate, weight=weight, n=(x.width // len(weight), len(weight)), f=(eps,))
        return y

    def gated_norm(
        self, x: Buffer, gate: Buffer, weight: Tensor, groups: int, eps: float, squares: Buffer | None
    ) -> Buffer:
        """weight * RMSNorm(x * silu(gate)), normalized over each group.

        With `squares`, the result is not normalized, and the sums of squares are written into that buffer.
        """
        self._check_typed(weight)
        y = self.buffer(x.width)
        n = groups, x.width // groups, 0 if squares is None else squares.offset + 1
        self._add("gated_norm", x=x, y=y, z=gate, weight=weight, n=n, f=(eps,))
        return y

    def add(self, x: Buffer, z: Buffer, factor: float = 1.0, into: bool = False) -> Buffer:
        """x + factor * z, in x's dtype. It overwrites x if `into` is True."""
        y = x if into else self.buffer(x.width, x.dtype)
        kinds: dict[str, Any] = dict(from_type=TYPES[x.dtype], type=TYPES[z.dtype])
        self._add("add", x=x, y=y, z=z, n=(x.width,), f=(factor,), **kinds)
        return y

    def residual(
        self, x: Buffer, summed: SumResult, biases: Sequence[Tensor] = (), scales: tuple[float, float] = (1.0, 1.0),
        group: int = 1, eps: float = 0.0,
    ) -> Buffer:  # fmt: skip
        """x + r (o sum + biases), in place, with (r, o) = `scales` and at most two biases.

        A sum with exact columns is divided by sqrt(columns / group + eps); a column covers `group` channels.
        """
        fields: dict[str, Any] = dict(sum=summed.number, n=(x.width, group), f=(*scales, eps), **self._biases(biases))
        self._add("residual", x=x, y=x, from_type=TYPES[x.dtype], **fields)
        return x

    def sum_with_biases(self, summed: SumResult, biases: Sequence[Tensor]) -> Buffer:
        """The sum plus its biases (at most two) in the dtype of activations."""
        y = self.buffer(summed.part.width)
        fields: dict[str, Any] = dict(sum=summed.number, n=(y.width, 1), f=(1.0, 1.0), **self._biases(biases))
        self._add("residual", "alone", x=y, y=y, flag=True, **fields)
        return y

    def _biases(self, biases: Sequence[Tensor]) -> dict[str, Tensor]:
        if len(biases) > 2:
            raise NotLowered("more than two operators with biases")
        self._check_typed(*biases)
        return dict(zip(("bias", "weight"), biases, strict=False))

    def activate(self, gate: Buffer, up: Buffer | None, activation: str, factor: float = 1.0) -> Buffer:
        """activation(factor * gate) * up, or activation(factor * gate) if up is None."""
        y, n = self.buffer(gate.width), (gate.width, self._activation(activation))
        self._add("activate", activation, x=gate, y=y, z=up or gate, n=n, f=(factor,), flag=up is not None)
        return y

    def score(self, x: Buffer, score: Buffer) -> None:
        self._add("score", x=x, y=x, z=score, n=(x.width,))

    def route(self, logits: Buffer, router: Router, correction: Tensor | None, first: int = 0) -> Buffer:
        """[indices | weights] of the experts that each token chooses.

        correction: the bias of `Router.route` in float32, or None. first: the index of this rank's first expert, which
        becomes 0.
        """
        if router.experts > MOST_EXPERTS:
            raise NotLowered(f"more than {MOST_EXPERTS} experts")
        self._check_float32(*[] if correction is None else [correction])
        y = self.buffer(2 * router.chosen, torch.float32)
        n: tuple = router.experts, router.chosen, FORMS.index(router.form), router.renormalized
        n = *n, router.groups, router.chosen_groups, first
        self._add("route", x=logits, y=y, from_type=TYPES[logits.dtype], weight=correction, n=n, f=(router.scale,))
        return y

    def experts(
        self, x: Buffer, routes: Buffer, count: int, chosen: int, up: Any, down: Any, activation: str, gated: bool
    ) -> Buffer:
        """The weighted sum of the outputs of this rank's `count` experts, of which a token chooses `chosen`.

        up, down: The matrices of `kernels.experts.apply_experts`; with `gated`, up has the rows of a gate. activation: a
        name of ACTIVATIONS, or "swish".
        """
        number, size, channels = self._activation(activation), x.width, down.shape[1]
        width = up.shape[0] // count
        y, outputs, inner = self.buffer(size), self.buffer(chosen * size), self.buffer(chosen * width)
        pairs = self.buffer(chosen, torch.float32)
        n = count, chosen, size, channels, number, outputs.offset, inner.offset, pairs.offset
        matrices: dict[str, Any] = dict(matrix=self._matrix(up), down=self._matrix(down))
        detail = f"{chosen} of {count} ({width}, {size})"
        self._add("experts", detail, x=x, y=y, z=routes, **matrices, n=n, flag=gated)
        self.release(outputs, inner, pairs)
        self.has_experts = True
        return y

    def rotate(self, x: Buffer, heads: int, head_dim: int, size: int, table: Callable[[int], Tensor]) -> None:
        """Rotate the first `size` elements of each head, in place. table: see `rotary_table`."""
        op = self._add("rotate", x=x, n=(heads, head_dim, size))
        self.tables.append((size, op, table))

    def append(self, x: Buffer, name: str) -> int:
        """Append x to a per-token tensor of the state; return the slot of the tensor."""
        slot = self.state_slot(name)
        self._add("append", name, x=x, slot=slot, n=(x.width,))
        return slot

    def attend(self, q: Buffer, slot: int, heads: int, kv_heads: int, head_dim: int, scale: float) -> Buffer:
        """The attention of q to the keys in a slot and the values in the next slot."""
        y = self.buffer(q.width)
        self._add("attend", x=q, y=y, slot=slot, n=(heads, kv_heads, head_dim), f=(scale,))
        return y

    def stop(self, function: Callable, detail: str) -> None:
        self._add("stop", detail)
        self.stops[len(self.ops) - 1] = function


def rotary_table(theta: float, size: int, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """A function length -> [cosines | sines] (length, size) of the angles of `layers.attention.rotate`."""

    def table(length: int) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = 1.0 / theta ** (torch.arange(0, size, 2).to(wide) / size)
        angles = torch.arange(length).unsqueeze(1).to(wide) * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    return table
