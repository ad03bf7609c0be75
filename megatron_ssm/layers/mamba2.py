"""The Mamba-2 mixer, split by head over the tensor-parallel ranks.

Each of T ranks holds 1/T of the heads: their rows of z, x and dt, and the B and C of their groups. With fewer groups G
than ranks, T/G consecutive ranks hold the same B and C and sum their gradients. in_proj computes dt, B and C, so nothing
has to be summed before the scan. The ranks sum the output of out_proj and, if a group of the gated norm spans several
ranks, the sums of squares of the norm:

- G % T = 0: the norm is local. One all-reduce per block.
- G = 1: 1/sqrt(mean square) is one number per token, and multiplying by it commutes with out_proj. So the sum of squares is
  one more column in the all-reduce of out_proj, exact in every format, and the sum is scaled afterwards. One all-reduce.
- 1 < G < T: the sums of squares (G elements per token) are summed before out_proj. Two all-reduces.

docs/concepts/all-reduce-count.md derives this.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.quantized_matrices import QuantizedMatrix
from megatron_ssm.kernels.scan import ssd
from megatron_ssm.parallel.blocks import halo
from megatron_ssm.parallel.channel_exchange import ssd_by_heads
from megatron_ssm.parallel.layers import ColumnParallelLinear, RowParallelLinear, apply_layer, bias_of
from megatron_ssm.parallel.operators import sum_over_ranks
from megatron_ssm.parallel.scans import ssd_over_context
from megatron_ssm.spec.fields import Field, divide_either_way, divides, packed, row_parallel
from megatron_ssm.spec.sizes import RecurrenceSizes, Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .convolution import Convolution, keep_last_inputs
from .low_rank import adapter_of
from .operator import Lowered, Operator, Partial, Place, lowered_linear
from .state import State
from .tape_builder import Buffer, Builder, NotLowered

CUDA_SSD_CHUNK = 256  # mamba_chunk_scan_combined keeps a state for each chunk of this many tokens
SSD_CHUNK = 16  # tokens for which the C kernel keeps one state

NO_LIMIT = (0.0, math.inf)
NO_SCALES = (1.0,) * 5  # of z, x, B, C, dt
GATE_FIRST, NORM_FIRST, NO_NORM = "gate first", "norm first", "no norm"


@dataclass(frozen=True)
class Mamba2Spec(Spec):
    """The sizes of a Mamba-2 mixer. The heads of a group share B and C, and the gated norm is over a group's channels.

    Attributes:
        hidden_size: The size of the input and the output.
        state_size: N; the state of a head is (N, head_dim).
        conv_kernel: The number of taps of the convolution.
        norm_eps: The eps of the gated norm.
        bias, out_bias: True if in_proj has a bias, and if out_proj has one; None: as in_proj.
        conv_bias: True if the convolution has a bias.
        dt_limit: The limits of dt in prompts.
        dt_range: (smallest dt, largest dt, floor) for the initialization of dt_bias.
        norm: The input of out_proj. GATE_FIRST: norm(y * silu(z)), NORM_FIRST: norm(y) * silu(z), NO_NORM: y * silu(z).
        scales: Constants that multiply z, x, B, C and dt after in_proj.
    """

    hidden_size: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int
    norm_eps: float
    bias: bool = False
    conv_bias: bool = True
    dt_limit: tuple[float, float] = NO_LIMIT
    dt_range: tuple[float, float, float] = field(default=(0.001, 0.1, 1e-4), compare=False)
    norm: str = GATE_FIRST
    out_bias: bool | None = None
    scales: tuple[float, ...] = NO_SCALES

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def has_out_bias(self) -> bool:
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def history(self) -> int:
        return self.conv_kernel - 1

    @property
    def recurrence(self) -> RecurrenceSizes:
        return RecurrenceSizes(self.heads, self.head_dim, self.state_size, self.groups)

    def fields(self) -> Iterator[Field]:
        """z, x, dt and the norm are split by head, B and C by group."""
        heads, inner, bc = self.heads, self.channels, self.groups * self.state_size
        parts = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": heads}
        units = {"z": heads, "x": heads, "B": self.groups, "C": self.groups, "dt": heads}
        yield Field("A_log", "A_log", (heads,), 0, heads, fp32=True, init="A_log")
        yield Field("D", "D", (heads,), 0, heads, fp32=True, init="one")
        yield Field("dt_bias", "dt_bias", (heads,), 0, heads, fp32=True, init="dt_bias", init_range=self.dt_range)
        if self.norm != NO_NORM:
            yield Field("norm_weight", "norm.weight", (inner,), 0, heads, init="one")
        yield from packed("in_proj", parts, units, (self.hidden_size,), self.bias)
        xBC = {name: parts[name] for name in "xBC"}
        yield from packed("conv", xBC, units, (1, self.conv_kernel), self.conv_bias, hf="conv1d", init="convolution")
        yield from row_parallel("out_proj", (self.hidden_size, inner), heads, self.has_out_bias, init="mixer_out_proj")

    def check_ranks(self, size: int) -> None:
        divides(self.heads, size, "heads")
        divide_either_way(self.groups, size, "groups")

    def build(self, place: Place) -> "Mamba2Mixer":
        return Mamba2Mixer(self, place)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`.

        In a prompt, the scan needs z, x, B, C, dt; the convolution's outputs; two copies of dt in at least fp32; y. On CUDA
        it also needs, in fp32, the state of each chunk alone and with all earlier chunks, and C B^T within chunks. Training
        stores the projection, the convolution, dt, and after the scan y, silu(z), their product, the norm's products, and a
        sum.
        """
        ranks, s, N, hidden = work.ranks, work.itemsize, self.state_size, self.hidden_size
        i, heads, groups = self.channels // ranks, self.heads // ranks, max(1, self.groups // ranks)
        has_norm = self.norm != NO_NORM
        is_fused, summed = has_norm and self.groups == 1 < ranks, has_norm and 1 < self.groups < ranks
        bc = 2 * groups * N
        rows = i + i + bc + heads
        scan = s * (rows + i + bc + i) + 2 * work.wide_itemsize * heads
        if work.on_cuda:
            scan += 4 * (2 * i * N // CUDA_SSD_CHUNK + groups * CUDA_SSD_CHUNK)
        wide_copies = 3 + (s != work.wide_itemsize)
        # NORM_FIRST has no kernel, so torch makes copies in at least fp32.
        normed = (wide_copies * work.wide_itemsize - s) * i if self.norm == NORM_FIRST else 0
        steps, whole = 2 if self.dt_limit == NO_LIMIT else 3, hidden * work.share
        gated = 4 * i + 1 + whole + 2 * work.share if is_fused else 5 * i + groups if has_norm else 3 * i
        in_norm = 2 * i + (hidden - whole if is_fused else 0)
        in_scan = 3 * i - gated + i * N / SSD_CHUNK + 2 * bc + 4 * heads
        inner, copied = (self.groups,) if summed else (), 2 * self.groups * N  # rows that several ranks hold
        widths = (hidden, self.conv_kernel) + (1,) * (self.conv_bias + self.bias)
        return Sizes(
            state=(self.history * (i + bc) * s + N * i * work.wide_itemsize),
            stages={"scan": max(scan, s * (rows + 2 * i) + normed), "output": s * i + s * hidden * (1 + self.has_out_bias)},
            projected=s * rows, stored=2 * i + bc + heads + i + bc + steps * heads + gated,
            kept=whole + work.share if is_fused else 0,
            gradients=whole + max(in_norm, in_scan),
            columns=1 if has_norm and self.groups == 1 else 0, inner=inner, backward=inner,
            parameters=tuple(copied * width for width in widths) if self.groups % ranks else (),
            passed=i * N, convolved=i + bc, scan=7 * self.channels * N,
        )  # fmt: skip


class Mamba2Mixer(Operator):
    """The mixer of state-space duality.

    Forward sends nothing, or one all-reduce if 1 < groups < ranks. With one group, its partial output has the sums of
    squares as a column. Backward sends one all-reduce of the gradients of the sums of squares if 1 < groups < ranks. With
    fewer groups than ranks it also sends one all-reduce for each parameter with rows of B and C: the weights and biases of
    in_proj and of the convolution. Over context ranks, both directions also pass the convolution's inputs and states, or
    exchange channels (see `parallel/scans.py`).
    """

    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter
    norm_weight: nn.Parameter  # None without a norm

    def __init__(self, spec: Mamba2Spec, place: Place):
        ranks, where, wide = place.ranks, place.where, at_least_fp32(place.dtype)
        super().__init__(place)
        self.heads, self.head_dim, self.state_size = spec.heads // ranks.size, spec.head_dim, spec.state_size
        self.groups = max(1, spec.groups // ranks.size)
        self.all_groups, self.eps, self.dt_limit = spec.groups, spec.norm_eps, spec.dt_limit
        self.group_channels, self.norm, self.scales = spec.channels // spec.groups, spec.norm, spec.scales
        self.kernel = spec.conv_kernel
        inner, bc = self.heads * self.head_dim, self.groups * self.state_size
        self.rows = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": self.heads}
        shared: dict[str, Any] = dict(shared=("B", "C"), pieces=spec.groups) if spec.groups < ranks.size else {}
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.heads, dtype=wide, device=place.device)))
        weight = None if spec.norm == NO_NORM else nn.Parameter(torch.empty(inner, **where))
        self.register_parameter("norm_weight", weight)
        self.in_proj = ColumnParallelLinear(spec.hidden_size, self.rows, spec.bias, ranks, **where, **shared)
        channels = {name: self.rows[name] for name in "xBC"}
        self.conv = Convolution(channels, spec.conv_kernel, spec.conv_bias, ranks, **where, **shared)
        self.out_proj = RowParallelLinear(inner, spec.hidden_size, spec.has_out_bias, ranks, **where)

    def new_state(self, batch: int) -> State:
        """An empty state.

        conv: (batch, K-1, channels of x, B and C), the last inputs of the convolution of K taps. state: (batch, this rank's
        heads, N, head_dim), at least fp32.
        """
        device, wide = self.D.device, at_least_fp32(self.D.dtype)
        channels = sum(self.rows[name] for name in "xBC")
        conv = torch.zeros(batch, self.kernel - 1, channels, dtype=self.conv.weight.fields[0].dtype, device=device)
        state = torch.zeros(batch, self.heads, self.state_size, self.head_dim, dtype=wide, device=device)
        return State(dict(conv=conv, state=state))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """See `Operator`: [z | x | B | C | dt] of this rank."""
        projected = super().project(x)
        if self.scales == NO_SCALES:
            return projected
        parts = zip(self.scales, self.rows.values(), strict=True)
        factors = torch.cat([projected.new_full((rows,), scale) for scale, rows in parts])
        return projected * factors if torch.is_grad_enabled() else projected.mul_(factors)

    def mix(self, projected: torch.Tensor, call: Call, state: State | None = None) -> Partial:
        """See `Operator`. projected: [z | x | B | C | dt] of this rank.

        dt is clamped to the specification's limits, except while decoding: transformers does so, and the logits of
        checkpoints with limits depend on it.
        """
        normed, squares = self._normed(*self._scanned(projected, call, state))
        out = apply_layer(self.out_proj, normed, adapter_of(self.lora, "out_proj"))
        return Partial(out, squares, None if squares is None else self._finished, bias_of(self.out_proj))

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        if not (self.local_norm or self.fused_norm):
            raise NotLowered("a norm over a group that spans some of the ranks")
        if self.norm == NORM_FIRST:
            raise NotLowered("norm before gate")
        inner, bc = self.rows["x"], self.rows["B"]
        projected, first = lowered_linear(tape, self.in_proj, x, adapter_of(self.lora, "in_proj")), 0
        for scale, rows in zip(self.scales, self.rows.values(), strict=True):
            tape.scale(projected.columns(first, rows), scale)
            first += rows
        z, xBC = projected.columns(0, inner), projected.columns(inner, inner + 2 * bc)
        convolved = tape.conv(xBC, *self.conv.tensors())
        dt = tape.step_sizes(projected.columns(2 * inner + 2 * bc, self.heads), self.dt_bias, self.dt_limit)
        may_round = isinstance(self.out_proj.weight, QuantizedMatrix)
        sizes = self.heads, self.head_dim, self.groups, self.state_size
        y = tape.ssd(convolved, dt, self.A_log, self.D, *sizes, may_round)
        squares = tape.buffer(1, torch.float32) if self.fused_norm else None
        if self.norm == NO_NORM:
            normed = tape.activate(z, y, "silu")
        else:
            normed = tape.gated_norm(y, z, self.norm_weight, self.groups, self.eps, squares)
        tape.release_unless_speculative(projected, convolved, dt, y)
        out = lowered_linear(tape, self.out_proj, normed, adapter_of(self.lora, "out_proj"))
        tape.release(normed)
        if squares is not None and tape.dtype is not torch.float32:
            narrow, out = out, tape.converted(out, torch.float32)
            tape.release(narrow)
        return Lowered(out, squares, self.out_proj.bias, self.group_channels, self.eps)

    def _finished(self, out: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return out * torch.rsqrt(squares / self.group_channels + self.eps)

    def _scanned(self, projected, call: Call, cache: State | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the scan and the gate z, both (batch, seq, this rank's channels). Frees its temporaries."""
        inner, bc = self.rows["x"], self.rows["B"]
        conv, state = (None, None) if cache is None else (cache["conv"][call.rows], cache["state"][call.rows])
        z, xBC, dt = projected.split([inner, inner + 2 * bc, self.heads], dim=-1)  # (batch, seq, ...), z like y
        if self.context is not None and call.sharding is not None:
            return self._scanned_over_context(xBC, dt, call, cache), z
        dt = self._step_sizes(dt, call.decoding)
        xBC = xBC if call.mask is None else xBC * call.mask
        xBC, conv = self.conv(xBC, conv, overwrite=cache is not None)
        xBC = xBC if call.mask is None else xBC * call.mask
        x, B, C = self._parts(xBC)
        may_round = isinstance(getattr(self.out_proj, "weight", None), QuantizedMatrix)  # its products round as well
        how: dict[str, Any] = dict(one_by_one=True) if call.speculative else dict(may_round=may_round)
        y, state = ssd(x, dt, self.A_log, B, C, self.D, state, overwrite=cache is not None, **how)
        if cache is not None:
            cache.update(call.rows, conv=conv, state=state)
        return y.flatten(2), z

    def _scanned_over_context(
        self, mixed: torch.Tensor, dt: torch.Tensor, call: Call, cache: State | None
    ) -> torch.Tensor:
        """The output of the scan for this rank's tokens of a sequence that is split over the context ranks."""
        context: Any = self.context
        history, state = None, None
        if cache is not None and not call.begins:
            history, state = cache["conv"][call.rows], cache["state"][call.rows]
        xBC, dt = context.to_blocks(mixed), self._step_sizes(dt)
        xBC, _ = self.conv(xBC, halo(xBC, self.kernel - 1, context, history))
        x, B, C = self._parts(xBC)
        if cache is not None and call.sharding is not None:
            dt = call.sharding.mask_padding(dt)
        inputs = x, context.to_blocks(dt), self.A_log, B, C, self.D, context
        if cache is None and context.exchanges_channels:
            return context.from_blocks(ssd_by_heads(*inputs)).flatten(2)
        y, passed = ssd_over_context(*inputs, state)
        if cache is not None and call.sharding is not None:
            keep_last_inputs(mixed, call, cache)
            cache["state"][call.rows] = passed.whole_final().unflatten(2, cache["state"].shape[2:])
        return context.from_blocks(y).flatten(2)

    def _parts(self, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (batch, seq, this rank's heads, head_dim), and B and C (batch, seq, this rank's groups, N)."""
        x, B, C = xBC.split([self.rows[name] for name in "xBC"], dim=-1)
        B, C = (t.unflatten(2, (self.groups, self.state_size)) for t in (B, C))
        return x.unflatten(2, (self.heads, self.head_dim)), B, C

    def _step_sizes(self, dt: torch.Tensor, decoding: bool = False) -> torch.Tensor:
        dt = F.softplus(dt + self.dt_bias)
        return dt if decoding or self.dt_limit == NO_LIMIT else dt.clamp(*self.dt_limit)

    @property
    def local_norm(self) -> bool:
        """True if this rank holds all channels of its groups, or there is no norm, so that the norm is local."""
        return self.all_groups >= self.ranks.size or self.norm == NO_NORM

    @property
    def fused_norm(self) -> bool:
        """True if the sum of squares of the only group is a column in the all-reduce of out_proj."""
        return self.ranks.size > 1 and self.all_groups == 1 and self.norm != NO_NORM

    def _normed(self, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input of out_proj (batch, seq, this rank's channels), and the sums of squares for its all-reduce or None.

        See `Mamba2Spec.norm`. The norm is over all channels of a group, on all ranks that hold them. With `fused_norm`,
        the input of out_proj lacks the factor 1/sqrt(mean square), and the sums are this rank's sum of squares (batch,
        seq, 1).
        """
        if self.norm == NO_NORM:
            gate = F.silu(z)
            return gate * y if torch.is_grad_enabled() else gate.mul_(y), None
        gates_first, fused = self.norm == GATE_FIRST, self.fused_norm
        is_local = self.local_norm or fused
        if gates_first and is_local and not torch.is_grad_enabled() and kernels.usable(y, z, self.norm_weight):
            return kernels.gated_norm(y, z, self.norm_weight, self.groups, None if fused else self.eps)
        wide = at_least_fp32(self.norm_weight.dtype)
        gate = F.silu(z.to(wide))
        y = y.to(wide) * gate if gates_first else y.to(wide)
        local = y.unflatten(-1, (self.groups, -1))  # (batch, seq, this rank's groups, channels of a group)
        squares = local.square().sum(-1)  # (batch, seq, this rank's groups)
        if not fused:
            squares = squares if self.local_norm else self._sum_of_group(squares)
            scale = torch.rsqrt(squares / self.group_channels + self.eps)
            y = (local * scale.unsqueeze(-1)).view_as(y)
        y = self.norm_weight * y.to(self.norm_weight.dtype)
        return y if gates_first else y * gate.to(y.dtype), squares if fused else None

    def _sum_of_group(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of squares (batch, seq, 1) of this rank's group. Sends one all-reduce with a column for each group."""
        group = self.ranks.piece_index(self.all_groups)
        columns = F.pad(squares, (group, self.all_groups - 1 - group))
        return sum_over_ranks(columns, self.ranks.group, self.ranks.all_reduce_exact_once)[..., group : group + 1]
