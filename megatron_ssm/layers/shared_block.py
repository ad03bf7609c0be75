"""A shared transformer block: attention and an MLP that several units invoke with one set of weights.

The input of an invocation is [hidden state | embeddings], (batch, seq, 2 * hidden), the same on every rank. Attention and
MLP follow one another without residual connections, and the output is whole. Each invocation has its own keys and values,
and sends two all-reduces of `hidden` elements per token.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron_ssm.kernels.matrices import linear
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    Product,
    RMSNorm,
    apply_layer,
    bias_of,
    is_plain,
    with_adapter,
)  # fmt: skip
from megatron_ssm.parallel.operators import copy_to_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import divide_gradient, replicated
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.spec.fields import Field, rows_of
from megatron_ssm.spec.sizes import AttentionSizes, Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .attention import Attention, AttentionSpec
from .call import Call
from .low_rank import Adapters, adapter_of, adapter_of_parts
from .mlp import Mlp, MlpSpec
from .operator import Partial, Place, add_low_rank, as_input, lowered_linear, sum_of
from .state import State
from .tape_builder import Buffer, Builder, NotLowered


@dataclass(frozen=True)
class SharedBlockSpec(Spec):
    """The sizes of norm -> attention -> norm -> MLP. The input of the attention has size 2 * hidden."""

    attended: AttentionSpec
    mlp: MlpSpec
    norm_eps: float

    @property
    def attention(self) -> AttentionSizes:
        return self.attended.attention

    def fields(self) -> Iterator[Field]:
        hidden = self.mlp.hidden_size
        yield Field("norm.weight", "input_layernorm.weight", (2 * hidden,), init="one")
        yield from (replace(field, hf="self_attn." + field.hf) for field in self.attended.fields())
        yield Field("mlp_norm.weight", "pre_ff_layernorm.weight", (hidden,), init="one")
        yield from (replace(field, hf="feed_forward." + field.hf) for field in self.mlp.fields())

    def check_ranks(self, size: int) -> None:
        self.attended.check_ranks(size)
        self.mlp.check_ranks(size)

    def build(self, place: Place) -> "SharedBlock":
        return SharedBlock(self, place)

    def sizes(self, work: Workload) -> Sizes:
        return Sizes()


@dataclass(frozen=True)
class SharedBlockInvocationSpec(Spec):
    """The modules of one invocation of a shared block: a linear layer, and low-rank adapters of the block.

    In files, names of the linear layer begin with `linear`, those of adapters with `block.`.

    Attributes:
        block: The specification of the shared block.
        index: The number of the invocation among those of all blocks.
        adapter_rank: The rank of the adapters; 0: none.
        attention_adapters: True if q, k and v have adapters, and not only the MLP.
        idle: The numbers of other invocations whose adapters files repeat here. They are kept only to be saved again.
    """

    block: SharedBlockSpec
    index: int
    adapter_rank: int = 0
    attention_adapters: bool = False
    idle: tuple[int, ...] = ()

    @property
    def attention(self) -> AttentionSizes:
        return self.block.attention

    def fields(self) -> Iterator[Field]:
        """See `Spec`. Every rank holds the whole linear layer and one factor of each adapter."""
        attended, mlp, rank = self.block.attended, self.block.mlp, self.adapter_rank
        hidden, name = mlp.hidden_size, "block.self_attn.linear_{}_adapter_list.{}."
        yield Field("linear", "linear.weight", (hidden, hidden), init="out_proj")
        for part in "qkv" if self.attention_adapters else "":
            files = name.format(part, self.index)
            yield Field(f"qkv.down.{part}", files + "0.weight", (rank, 2 * hidden))
            yield Field(f"qkv.up.{part}", files + "1.weight", (2 * hidden, rank), 0, attended.heads)
        files = f"block.feed_forward.gate_up_proj_adapter_list.{self.index}."
        if rank:
            yield Field("gate_up.down.low", files + "0.weight", (rank, hidden))
            rows = dict.fromkeys(mlp.inputs, mlp.channels)
            yield from rows_of("gate_up.up", files + "1.weight", rows, rows, (rank,))
        for other in self.idle:
            yield from self._idle_fields(other)

    def _idle_fields(self, index: int) -> Iterator[Field]:
        """The adapters of another invocation, not split over the ranks."""
        hidden, rank = self.block.mlp.hidden_size, self.adapter_rank
        parts = {part: f"self_attn.linear_{part}_adapter_list" for part in "qkv"} if self.attention_adapters else {}
        wide = dict.fromkeys(parts, 2 * hidden) | {"gate_up": len(self.block.mlp.inputs) * self.block.mlp.channels}
        inputs = dict.fromkeys(parts, 2 * hidden) | {"gate_up": hidden}
        for part, files in {**parts, "gate_up": "feed_forward.gate_up_proj_adapter_list"}.items():
            yield Field(f"idle.{index}_{part}_down", f"block.{files}.{index}.0.weight", (rank, inputs[part]))
            yield Field(f"idle.{index}_{part}_up", f"block.{files}.{index}.1.weight", (wide[part], rank))

    def check_ranks(self, size: int) -> None:
        self.block.check_ranks(size)

    def build(self, place: Place) -> "SharedBlockInvocation":
        return SharedBlockInvocation(self, place)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`: the sizes of the block, for one invocation.

        The input of attention is twice as wide as the model, and stays in memory while it is projected. Adapters have as
        many outputs as their layers.
        """
        attended, s = self.block.attended.sizes(work), work.itemsize
        H, low = self.block.mlp.hidden_size, self.adapter_rank
        rows, mlp = self.block.attended.rows(work.ranks), self.block.mlp.channels // work.ranks
        q, kv = rows["q"], rows["k"]
        adapted = 2 * H + 3 * (q + 2 * kv) + 3 * low if self.attention_adapters else 0
        elements = {
            "shared norm": 4 * H, "attention's adapters": adapted, "MLP": H + 4 * mlp,
            "MLP's adapter": 2 * H + 4 * mlp + low if low else 0,
        }  # fmt: skip
        whole = H * work.share
        projected = work.norm(2 * H) + (3 * low if self.attention_adapters else 0)
        inner = work.norm(H) + 4 * mlp + whole + low
        lows = (low,) * (4 if self.attention_adapters else 1) if low else ()
        stages = {name: s * count for name, count in elements.items()}
        return replace(
            attended,
            stages=stages | {"attention": max(attended.stages["attention"], s * (2 * H + q + 2 * kv))},
            stored=projected + attended.stored + inner,
            kept=2 * whole + attended.stored + (whole if work.ranks > 1 else 0),
            gradients=0, peaks=(projected + 2 * whole, inner + 2 * mlp), outputs=(H, H), backward=(H, 2 * H, *lows),
        )  # fmt: skip


class Adapter(TrackedModule):
    """A low-rank adapter, x down^T up^T, whose output is added to that of a column-parallel layer.

    Every rank has all of `down`; `up` is split like the layer. Forward sends nothing. Backward sends one all-reduce of the
    gradient of the low-rank activations, which makes the gradients of `down` and of x whole. So the layer's own all-reduce
    of the gradient of x must not include this one.

    Args:
        in_features: The size of the input.
        downs: The names of the low-rank activations: one for each field, or one for all fields.
        rows: This rank's rows of each field of the layer.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        downs: Iterable[str],
        rows: Mapping[str, int],
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.down = Packed(dict.fromkeys(downs, rank), (in_features,), ranks, dtype, device)
        self.up = Packed(rows, (rank,), ranks, dtype, device)
        self.rows = [sum(rows.values())] if len(self.down.sizes) == 1 else list(rows.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features), whole -> (..., this rank's rows of all fields)."""
        low = copy_to_ranks(linear(x, self.down()), self.ranks.group, self.ranks.all_reduce_exact)
        parts = zip(low.split(self.rank, dim=-1), self.up().split(self.rows), strict=True)
        fields = [linear(part, up) for part, up in parts]
        return fields[0] if len(fields) == 1 else torch.cat(fields, dim=-1)


def lower_adapter(tape: Builder, adapter: Adapter | None, y: Buffer, x: Buffer) -> None:
    """Add the adapter's output for x to y on a tape."""
    if adapter is None:
        return
    if not (adapter.down.is_packed and adapter.up.is_packed):
        raise NotLowered("a parameter that shared one packed matrix with others was replaced or moved")
    low, first = tape.matmul(x, adapter.down()), 0
    for index, up in enumerate(adapter.up().split(adapter.rows)):
        product = tape.matmul(low.columns(index * adapter.rank, adapter.rank), up)
        tape.add(y.columns(first, len(up)), product, into=True)
        tape.release(product)
        first += len(up)
    tape.release(low)


class SharedBlockInvocation(TrackedModule):
    """The parameters of one invocation of a shared block: a linear layer, which is not split, and adapters.

    Attributes:
        idle: Tensors of files that the unit does not use. They are kept to be saved again, and get no gradient.
        lora: Low-rank adapters of this unit's linear layers, and of those of the block in this invocation; or None.
    """

    lora: Adapters | None

    def __init__(self, spec: SharedBlockInvocationSpec, place: Place):
        super().__init__()
        ranks, where, block = place.ranks, place.where, spec.block
        hidden, rank = block.mlp.hidden_size, spec.adapter_rank
        self.linear = nn.Parameter(torch.empty(hidden, hidden, **where))
        idle = {
            field.name.removeprefix("idle."): field.shape for field in spec.fields() if field.name.startswith("idle.")
        }
        self.idle = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, **where), requires_grad=False) for name, shape in idle.items()}
        )
        self.register_module("lora", None)
        self.qkv = self.gate_up = None
        rows = block.attended.rows(ranks.size), block.mlp.rows(ranks.size)
        if spec.attention_adapters:
            self.qkv = Adapter(2 * hidden, rank, "qkv", rows[0], ranks, **where)
        if rank:
            self.gate_up = Adapter(hidden, rank, ("low",), rows[1], ranks, **where)
        self._like = block.attended, ranks.size

    def new_state(self, batch: int) -> State:
        """keys, values: (batch, 0, this rank's key/value heads, head_dim)."""
        attended, ranks = self._like
        shape = batch, 0, attended.rows(ranks)["k"] // attended.head_dim, attended.head_dim
        return State(per_token={name: self.linear.new_zeros(shape, requires_grad=False) for name in ("keys", "values")})


class SharedBlock(Attention, Mlp):
    """norm -> attention -> norm -> MLP, without residual connections. A rank has 1/T of the heads and of the MLP.

    It has the parameters of both operators. Forward sends two all-reduces (o_proj, down_proj). Backward sends two, of the
    gradients of the inputs of qkv and gate_up, and one for each adapter; attention over context ranks adds its messages.
    """

    def __init__(self, spec: SharedBlockSpec, place: Place):
        nn.Module.__init__(self)
        self.ranks, self.context, self.lora = place.ranks, place.context, None
        hidden = spec.mlp.hidden_size
        self.norm = RMSNorm(2 * hidden, spec.norm_eps, **place.where, ranks=place.ranks)
        self.build_attention(spec.attended, place)
        self.mlp_norm = RMSNorm(hidden, spec.norm_eps, **place.where, ranks=place.ranks)
        self.build_mlp(spec.mlp, place)

    def forward(
        self,
        x: torch.Tensor,
        embeddings: torch.Tensor,
        invocation: SharedBlockInvocation,
        call: Call,
        state: State | None = None,
    ) -> torch.Tensor:
        """x, embeddings: (batch, seq, hidden), the same on every rank -> the same shape.

        invocation: The parameters of this invocation. state: Its keys and values, to which the new ones are appended.
        """
        run = self.ranks.recomputation.run  # not for attention itself, which would send keys and values again
        y = self._attention(run(self._projected, x, embeddings, invocation), invocation, call, state)
        return run(self._mlp, y, invocation)

    def lower_invocation(
        self, tape: Builder, x: Buffer, embeddings: Buffer, invocation: SharedBlockInvocation
    ) -> Buffer:
        """The output for x and the embeddings on a tape."""
        if x.dtype is not tape.dtype:
            raise NotLowered("a residual stream in another dtype")
        both = tape.concat(x, embeddings)
        normed = tape.norm(both, self.norm)
        tape.release(both)
        lora: Any = adapter_of_parts(invocation.lora, {f"{name}_proj": rows for name, rows in self.rows.items()})
        qkv = lowered_linear(tape, self.qkv, normed, lora)
        lower_adapter(tape, invocation.qkv, qkv, normed)
        tape.release(normed)
        attended = self.lower_attention(tape, qkv)
        y = self._lower_whole(tape, self.o_proj, attended, adapter_of(invocation.lora, "o_proj"))
        normed = tape.norm(y, self.mlp_norm)
        gate_up = lowered_linear(tape, self.gate_up, normed, self.input_adapter(invocation.lora))
        lower_adapter(tape, invocation.gate_up, gate_up, normed)
        tape.release(y, normed)
        inner = self.lower_activated(tape, gate_up)
        y = self._lower_whole(tape, self.down_proj, inner, adapter_of(invocation.lora, "down_proj"))
        out = tape.matmul(y, invocation.linear)
        adapter: Any = adapter_of(invocation.lora, "linear")
        if adapter is not None:
            add_low_rank(tape, out, y, adapter.down, adapter.up(), adapter.scale)
        tape.release(y)
        return out

    def _lower_whole(self, tape: Builder, layer: Any, x: Buffer, lora: Any) -> Buffer:
        """The output of a row-parallel layer, summed over the ranks; releases its input."""
        part = lowered_linear(tape, layer, x, lora)
        tape.release(x)
        y = tape.sum_with_biases(tape.sum(self.ranks, part), [] if layer.bias is None else [layer.bias])
        tape.release(part)
        return y

    def _attention(
        self, qkv: torch.Tensor, invocation: SharedBlockInvocation, call: Call, state: State | None
    ) -> torch.Tensor:
        """The output of the attention, summed over the ranks. Its temporaries are freed when it returns."""
        out = apply_layer(self.o_proj, self.attended(qkv, call, state), adapter_of(invocation.lora, "o_proj"))
        return sum_of([Partial(out, bias=bias_of(self.o_proj))], self.ranks)

    def _projected(self, x: torch.Tensor, embeddings: torch.Tensor, invocation: SharedBlockInvocation) -> torch.Tensor:
        """[q | k | v] of this rank."""
        lora = adapter_of_parts(invocation.lora, {f"{name}_proj": rows for name, rows in self.rows.items()})
        return self._adapted(self.qkv, invocation.qkv, self.norm(torch.cat([x, embeddings], dim=-1)), lora)

    def _mlp(self, y: torch.Tensor, invocation: SharedBlockInvocation) -> torch.Tensor:
        lora = self.input_adapter(invocation.lora)
        y = self.activated(self._adapted(self.gate_up, invocation.gate_up, self.mlp_norm(y), lora))
        part = apply_layer(self.down_proj, y, adapter_of(invocation.lora, "down_proj"))
        y = sum_of([Partial(part, bias=bias_of(self.down_proj))], self.ranks, keep_for_recomputation=True)
        return with_adapter(
            linear(y, replicated(invocation.linear, self.ranks)), adapter_of(invocation.lora, "linear"), y
        )

    def _adapted(
        self, layer: ColumnParallelLinear, adapter: Adapter | None, x: torch.Tensor, lora: Product | None
    ) -> torch.Tensor:
        """The output of a layer plus the outputs of its adapter and of `lora`, if they exist.

        Without gradients it adds in place, unless a hook may have stored the layer's output.
        """
        with as_input(x, self.ranks) as whole:
            y = apply_layer(layer, whole, lora)
            if adapter is None:
                return y
            product = adapter(divide_gradient(whole, self.ranks) if self.ranks.sequence_parallel else x)
        return y + product if torch.is_grad_enabled() or not is_plain(layer, ColumnParallelLinear) else y.add_(product)
