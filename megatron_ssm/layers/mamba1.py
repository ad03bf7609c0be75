"""The Mamba-1 mixer, split by channel over the tensor-parallel ranks.

Each of T ranks holds I/T of the I inner channels: their rows of in_proj, their convolution, their A, D and dt. Two
projections mix channels, so their outputs are summed over the ranks: x_proj, whose output (dt, B and C) every channel
reads, and out_proj. These are two all-reduces per block, of R + 2N and of H elements per token, with dt of rank R, N states
per channel and hidden size H. docs/concepts/splitting-an-ssm.md describes each step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels import cuda_kernels
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.parallel.blocks import halo
from megatron_ssm.parallel.channel_exchange import selective_scan_by_channels
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    RowParallelLinear,
    apply_layer,
    bias_of,
    is_plain,
    rms_norm,
    with_adapter,
)  # fmt: skip
from megatron_ssm.parallel.operators import copy_to_ranks, reduce_from_ranks, sum_over_ranks
from megatron_ssm.parallel.scans import NO_STEP, ScanInputs, selective_scan_over_context
from megatron_ssm.parallel.token_sharding import TokenSharding
from megatron_ssm.spec.fields import Field, divide_either_way, divides, packed, row_parallel
from megatron_ssm.spec.sizes import RecurrenceSizes, Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .convolution import Convolution, keep_last_inputs
from .low_rank import adapter_of
from .operator import Lowered, Operator, Partial, Place, lowered_linear
from .state import State
from .tape_builder import Buffer, Builder, NotLowered

SELECTIVE_NUMBERS = 256  # the C kernel of the scan keeps a state for SELECTIVE_NUMBERS / N tokens


@dataclass(frozen=True)
class Mamba1Spec(Spec):
    """The sizes of a Mamba-1 mixer.

    Attributes:
        hidden_size: The size of the input and the output.
        channels: The number of inner channels.
        state_size: N; the state of a channel has N elements.
        conv_kernel: The number of taps of the convolution.
        heads: The number of heads; each has its own x_proj.
        bias, conv_bias: True if in_proj and out_proj have biases, and if the convolution has one.
        inner_norm_eps: The eps of the norms of dt, B and C; None: no norms.
        inner_norm_weights: True if these norms have weights, in mixers with one head.
        dt_range: (smallest dt, largest dt, floor) for the initialization of dt_bias.
        interleaved: True if files store the rows of x and z alternately.
        stored_by_head: True if parameters that are split by channel have the heads as first dimension in files.
    """

    hidden_size: int
    channels: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    heads: int = 1
    bias: bool = False
    conv_bias: bool = True
    inner_norm_eps: float | None = None
    inner_norm_weights: bool = False
    dt_range: tuple[float, float, float] = field(default=(0.001, 0.1, 1e-4), compare=False)
    interleaved: bool = False
    stored_by_head: bool = False

    @property
    def history(self) -> int:
        return self.conv_kernel - 1

    @property
    def recurrence(self) -> RecurrenceSizes:
        """See `Spec`. Channels are heads of one element."""
        return RecurrenceSizes(self.channels, 1, self.state_size, self.heads, "channels")

    def fields(self) -> Iterator[Field]:
        """Parameters are split by channel, x_proj and out_proj by input channel.

        The x_proj of several heads are concatenated; a rank with only some channels of a head has their columns.
        """
        inner, rank, state = self.channels, self.dt_rank, self.state_size
        by_channel: dict[str, Any] = dict(units=inner, heads=self.heads if self.stored_by_head else 0)
        yield Field("A_log", "A_log", (inner, state), 0, **by_channel, fp32=True, init="A_log")
        yield Field("D", "D", (inner,), 0, **by_channel, fp32=True, init="one")
        parts = {"x": inner, "z": inner}
        yield from packed("in_proj", parts, parts, (self.hidden_size,), self.bias, inner if self.interleaved else 1)
        x = {"x": inner}
        yield from packed("conv", x, x, (1, self.conv_kernel), self.conv_bias, hf="conv1d", init="convolution")
        yield Field("x_proj", "x_proj.weight", (rank + 2 * state, inner), 1, **by_channel)
        yield Field("dt_proj", "dt_proj.weight", (inner, rank), 0, **by_channel)
        for name, size in (("dt", rank), ("B", state), ("C", state)) if self.inner_norm_weights else ():
            yield Field(f"inner_norm.{name}", f"{name.lower()}_layernorm.weight", (size,), init="one")
        dt: dict[str, Any] = dict(fp32=True, init="dt_bias", init_range=self.dt_range)
        yield Field("dt_bias", "dt_proj.bias", (inner,), 0, **by_channel, **dt)
        yield from row_parallel("out_proj", (self.hidden_size, inner), inner, self.bias, init="mixer_out_proj")

    def check_ranks(self, size: int) -> None:
        divides(self.channels, size, "channels")
        if self.heads > 1:
            divide_either_way(self.heads, size, "mamba heads")

    def build(self, place: Place) -> "MambaMixer":
        return MambaMixer(self, place)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`.

        In a prompt, the scan needs x and z, the convolution's output (which y overwrites), dt, and the projection to dt, B
        and C; on CUDA also copies of x, dt, z, B and C with channels first, y, and the gated y.
        """
        s, i, N, rank = work.itemsize, self.channels // work.ranks, self.state_size, self.dt_rank
        heads, hidden = max(1, self.heads // work.ranks), self.hidden_size
        copies = s * (5 * i // heads + 2 * N) if work.on_cuda else 0  # heads are computed one after the other
        parameters = heads * (rank + 2 * N)  # dt, B and C of this rank's channels, before dt is projected
        normalized = parameters + 3 if self.inner_norm_eps is not None else 0
        parts = 5 if self.inner_norm_weights else 1  # copies of dt, B and C
        states = i * N / max(1, SELECTIVE_NUMBERS // N)
        inner = (rank + 2 * N,) if work.ranks > self.heads else ()
        return Sizes(
            state=self.history * i * s + N * i * work.wide_itemsize,
            stages={
                "scan": s * (4 if heads == 1 else 5) * i + s * parts * (rank + 2 * N) + copies,
                "output": s * i + s * hidden * (1 + self.bias),
            },
            stored=5 * i + parameters + normalized + states,  # in_proj (2), convolution, dt, y
            kept=parameters if inner else 0,
            gradients=hidden * work.share + 3 * i + parameters,
            inner=inner, backward=inner, passed=i * N, convolved=i, scan=7 * self.channels * N,
        )  # fmt: skip


class MambaMixer(Operator):
    """The selective state-space mixer.

    Inner norms apply to dt, B and C after their sum over the ranks, so they send nothing more. With several heads, a rank
    that holds whole heads needs no sum of x_proj; with more ranks than heads, the ranks of one head (`head_ranks`) sum it.

    Forward sends the all-reduce of x_proj if there are fewer heads than ranks, and backward that of its gradient. Over
    context ranks, both directions also pass the convolution's inputs and states, or exchange channels
    (see `parallel/scans.py`).
    """

    small_matrices = ("x_proj", "dt_proj")
    inner_norm: Packed | None

    def __init__(self, spec: Mamba1Spec, place: Place):
        ranks, where, wide = place.ranks, place.where, at_least_fp32(place.dtype)
        super().__init__(place)
        inner, state, rank = spec.channels // ranks.size, spec.state_size, spec.dt_rank
        self.head_ranks = place.ranks_with_same_piece(spec.heads)
        self.channels, self.splits = inner, (rank, state, state)
        self.heads = max(1, spec.heads // ranks.size)
        self.inner_norm_eps = spec.inner_norm_eps
        self.kernel, self.state_size = spec.conv_kernel, state
        self.A_log = nn.Parameter(torch.empty(inner, state, dtype=wide, device=place.device))
        self.D = nn.Parameter(torch.empty(inner, dtype=wide, device=place.device))
        self.in_proj = ColumnParallelLinear(spec.hidden_size, {"x": inner, "z": inner}, spec.bias, ranks, **where)
        self.conv = Convolution({"x": inner}, spec.conv_kernel, spec.conv_bias, ranks, **where)
        self.x_proj = nn.Parameter(torch.empty(rank + 2 * state, inner, **where))
        self.dt_proj = nn.Parameter(torch.empty(inner, rank, **where))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=wide, device=place.device))
        sizes = dict(zip(("dt", "B", "C"), self.splits, strict=True))
        norm = Packed(sizes, (), place.ranks, **where) if spec.inner_norm_weights else None
        self.register_module("inner_norm", norm)
        self.out_proj = RowParallelLinear(inner, spec.hidden_size, spec.bias, ranks, **where)

    def new_state(self, batch: int) -> State:
        """An empty state.

        conv: (batch, K-1, this rank's channels), the last inputs of the convolution of K taps. state: (batch, N, this rank's
        channels), at least fp32.
        """
        device, dtype = self.D.device, self.conv.weight.fields[0].dtype
        conv = torch.zeros(batch, self.kernel - 1, self.channels, dtype=dtype, device=device)
        wide = at_least_fp32(self.D.dtype)
        return State(
            dict(conv=conv, state=torch.zeros(batch, self.state_size, self.channels, dtype=wide, device=device))
        )

    def mix(self, projected: torch.Tensor, call: Call, state: State | None = None) -> Partial:
        """See `Operator`. projected: [x | z], (batch, seq, 2 * this rank's channels)."""
        x, z = projected.chunk(2, dim=-1)
        is_sharded = self.context is not None and call.sharding is not None
        y = self._gated_over_context(x, z, call, state) if is_sharded else self._gated(x, z, call, state)
        out = apply_layer(self.out_proj, y, adapter_of(self.lora, "out_proj"))
        return Partial(out, bias=bias_of(self.out_proj))

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        channels, heads, (rank, N, _) = self.channels, self.heads, self.splits
        width, head_width = rank + 2 * N, channels // heads
        if heads > 1 and head_width % 2:
            raise NotLowered("an odd number of channels per head")  # the kernel reads bfloat16 numbers in pairs
        xz = lowered_linear(tape, self.in_proj, x, adapter_of(self.lora, "in_proj"))
        mixed, z = xz.columns(0, channels), xz.columns(channels, channels)
        convolved = tape.conv(mixed, *self.conv.tensors())
        parameters = tape.buffer(heads * width)
        tape.head_matmuls(
            convolved, parameters, self.x_proj, width, head_width, (heads, head_width, head_width, width, channels)
        )
        if adapter_of(self.lora, "x_proj") is not None or adapter_of(self.lora, "dt_proj") is not None:
            raise NotLowered("adapters of x_proj or dt_proj")
        summed = tape.sum(self.head_ranks, parameters, is_exact=True)
        if self.inner_norm_eps is not None:
            weight = None if self.inner_norm is None else self.inner_norm()
            tape.inner_norms(summed, heads, rank, N, self.inner_norm_eps, weight)
        dt = tape.buffer(channels)
        low = parameters.columns(0, heads * width)
        tape.head_matmuls(low, dt, self.dt_proj, head_width, rank, (heads, head_width * rank, width, head_width, rank))
        y = tape.selective_scan(convolved, dt, z, summed, self.A_log, self.D, self.dt_bias, heads, rank, N)
        tape.release_unless_speculative(xz, convolved, parameters, dt, y)
        out = lowered_linear(tape, self.out_proj, y, adapter_of(self.lora, "out_proj"))
        return Lowered(out, bias=self.out_proj.bias)

    def _gated(self, x: torch.Tensor, z: torch.Tensor, call: Call, cache: State | None) -> torch.Tensor:
        """The input of out_proj (batch, seq, this rank's channels). Its temporaries are freed when it returns."""
        conv, state = (None, None) if cache is None else (cache["conv"][call.rows], cache["state"][call.rows])
        state = None if call.begins and cuda_kernels.on_cuda(x) else state  # mamba-ssm's scan starts from zeros
        x = x if call.mask is None else x * call.mask
        x, conv = self.conv(x, conv, overwrite=cache is not None)
        x = x if call.mask is None else x * call.mask
        heads = self._head_slices()
        scans = [self._scan(x[..., h], z[..., h], h, None if state is None else state[..., h]) for h in heads]
        y, state = map(_side_by_side, zip(*scans, strict=True))
        if cache is not None:
            cache.update(call.rows, conv=conv, state=state)
        return y

    def _gated_over_context(
        self, mixed: torch.Tensor, z: torch.Tensor, call: Call, cache: State | None
    ) -> torch.Tensor:
        """`_gated` for this rank's tokens of a sequence that is split over the context ranks."""
        context: Any = self.context
        history, state = None, None
        if cache is not None and not call.begins:
            history, state = cache["conv"][call.rows], cache["state"][call.rows]
        x = context.to_blocks(mixed)
        x, _ = self.conv(x, halo(x, self.kernel - 1, context, history))
        sharding = None if cache is None else call.sharding  # without a cache, the final state is unused
        inputs = [self._scan_inputs(x[..., h], context.to_blocks(z)[..., h], h, sharding) for h in self._head_slices()]
        if cache is None and context.exchanges_channels:
            return context.from_blocks(selective_scan_by_channels(inputs, context))
        y, passed = selective_scan_over_context(inputs, context, state)
        if cache is not None and call.sharding is not None:
            keep_last_inputs(mixed, call, cache)
            cache["state"][call.rows] = passed.whole_final().transpose(1, 2)
        return context.from_blocks(y)

    def _head_slices(self) -> list[slice]:
        width = self.channels // self.heads
        return [slice(h * width, (h + 1) * width) for h in range(self.heads)] if self.heads > 1 else [slice(None)]

    def _sum(self, parameters: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of their summands of [dt | B | C] (..., R + 2N), then the inner norms if there are any."""
        ranks = self.head_ranks
        if self.inner_norm_eps is None:
            return sum_over_ranks(parameters, ranks.group, ranks.all_reduce_exact_once)
        parameters = reduce_from_ranks(parameters, ranks.group, ranks.all_reduce_exact_once)
        parts = (rms_norm(t, self.inner_norm_eps).to(t.dtype) for t in parameters.split(self.splits, dim=-1))
        normed = torch.cat(list(parts), dim=-1)
        normed = normed if self.inner_norm is None else self.inner_norm() * normed
        return copy_to_ranks(normed, ranks.group, ranks.all_reduce_exact)  # so the gradient of the weights is whole

    def _scan(self, x, z, head: slice, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The gated output and the next state of one head's channels (batch, seq, width). Its temporaries are freed.

        The state is overwritten, and so is x, the output of the convolution, unless a hook may have stored it.
        """
        return self._scan_inputs(x, z, head).scan(state, state is not None, is_plain(self.conv, Convolution))

    def _scan_inputs(
        self, x: torch.Tensor, z: torch.Tensor, head: slice, sharding: TokenSharding | None = None
    ) -> ScanInputs:
        """The inputs of the scan of one head's channels (batch, seq, width), after x_proj and dt_proj.

        sharding: The split of the tokens, whose padding must not change the state.
        """
        parameters = linear(x, self.x_proj[:, head] if self.heads > 1 else self.x_proj)
        parameters = self._sum(with_adapter(parameters, adapter_of(self.lora, "x_proj"), x))
        low, B, C = parameters.split(self.splits, dim=-1)  # (batch, seq, R), (batch, seq, N), (batch, seq, N)
        dt = with_adapter(linear(low, self.dt_proj[head]), adapter_of(self.lora, "dt_proj"), low)
        if sharding is not None and self.context is not None:
            dt = self.context.to_blocks(sharding.mask_padding(self.context.from_blocks(dt), NO_STEP))
        return ScanInputs(x, dt, self.A_log[head], B, C, self.D[head], z, self.dt_bias[head])


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)
