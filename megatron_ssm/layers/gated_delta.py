"""The gated delta net, split by key head over the tensor-parallel ranks.

Each of T ranks holds 1/T of the key heads and the value heads that use them: their rows of q, k, v, z, a and b, their
channels of the convolution, and their states. With fewer key heads than ranks, consecutive ranks hold the same q and k, sum
their gradients, and have 1/T of the value heads each. The norm is over one head, so only the output of out_proj is summed:
one all-reduce per layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.gated_delta import CHUNK, gated_delta
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.parallel.blocks import halo
from megatron_ssm.parallel.channel_exchange import gated_delta_by_heads
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    RowParallelLinear,
    apply_layer,
    rms_norm,
    with_adapter,
)
from megatron_ssm.parallel.scans import gated_delta_over_context
from megatron_ssm.spec.fields import Field, divide_either_way, divides, norm_field, row_parallel, rows_of
from megatron_ssm.spec.sizes import RecurrenceSizes, Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .convolution import Convolution, keep_last_inputs
from .low_rank import adapter_of, adapter_of_parts
from .operator import Lowered, Operator, Partial, Place, add_parts, lowered_linear
from .state import State
from .tape_builder import Buffer, Builder

# The layouts of the rows of q, k, v, z, b and a in files: four tensors, of which one has q, k and v; six tensors, and a
# convolution for each of q, k and v; or two tensors, with the rows of each key head together
QKV_TOGETHER, APART, BY_KEY_HEAD = "q, k and v together", "apart", "by key head"
FILES: dict[str, dict[str, str]] = {  # {layout: {tensor in files: our parts in it}}
    QKV_TOGETHER: {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"},
    APART: {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"},
    BY_KEY_HEAD: {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"},
}


@dataclass(frozen=True)
class GatedDeltaSpec(Spec):
    """The sizes of a gated delta net. value_heads/key_heads consecutive value heads use the same q and k.

    Attributes:
        hidden_size: The size of the input and the output.
        key_dim, value_dim: The size of a key and of a value; the state of a value head is (key_dim, value_dim).
        conv_kernel: The number of taps of the convolution.
        max_beta: The factor in beta = max_beta * sigmoid(b).
        files: The layout in checkpoint files, a key of FILES.
        dt_range: (smallest dt, largest dt, floor) for the initialization of dt_bias; None: ones.
        A_range: The smallest and largest exp(A_log) of a new model.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    max_beta: float = 1.0
    files: str = QKV_TOGETHER
    dt_range: tuple[float, float, float] | None = field(default=None, compare=False)
    A_range: tuple[float, float] = field(default=(0.01, 16.0), compare=False)

    @property
    def history(self) -> int:
        return self.conv_kernel - 1

    @property
    def recurrence(self) -> RecurrenceSizes:
        return RecurrenceSizes(self.value_heads, self.value_dim, self.key_dim, self.key_heads, "value heads", True)

    def rows(self, ranks: int) -> dict[str, int]:
        """{part of the input projections: its rows on one of `ranks` tensor-parallel ranks}."""
        keys, heads = max(1, self.key_heads // ranks) * self.key_dim, self.value_heads // ranks
        values = heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}

    def fields(self) -> Iterator[Field]:
        """q and k are split by key head, everything else by value head."""
        heads, rows = self.value_heads, self.rows(1)
        units = {"q": self.key_heads, "k": self.key_heads} | dict.fromkeys("vzba", heads)
        low, high = self.A_range
        yield Field("A_log", "A_log", (heads,), 0, heads, fp32=True, init="A_range", init_range=(low, high))
        init: dict[str, Any] = dict(init="one")
        if self.dt_range is not None:
            init = dict(init="dt_bias", init_range=self.dt_range)
        yield Field("dt_bias", "dt_bias", (heads,), 0, heads, fp32=True, **init)
        yield norm_field("norm_weight", "norm.weight", self.value_dim)
        blocks = self.key_heads if self.files == BY_KEY_HEAD else 1
        for tensor, parts in FILES[self.files].items():
            name = "gates" if parts[0] in "ba" else "in_proj.weight"
            inside = {part: rows[part] for part in parts}
            yield from rows_of(name, f"{tensor}.weight", inside, units, (self.hidden_size,), blocks)
        convolved = {f"{part}_conv1d": part for part in "qkv"} if self.files == APART else {"conv1d": "qkv"}
        for tensor, parts in convolved.items():
            inside, taps = {part: rows[part] for part in parts}, (1, self.conv_kernel)
            yield from rows_of("conv.weight", f"{tensor}.weight", inside, units, taps, init="convolution")
        yield from row_parallel("out_proj", (self.hidden_size, rows["v"]), heads, init="mixer_out_proj")

    def adapted(self, ranks: int, gates: bool) -> dict[str, int]:
        """{tensor in files: its rows on one of `ranks` ranks}, for the adapters of the gates b and a or of the others."""
        rows = self.rows(ranks)
        tensors = FILES[self.files].items()
        return {name: sum(rows[p] for p in parts) for name, parts in tensors if (parts[0] in "ba") == gates}

    def check_ranks(self, size: int) -> None:
        divides(self.value_heads, size, "value heads")
        divide_either_way(self.key_heads, size, "key heads")

    def build(self, place: Place) -> "GatedDelta":
        return GatedDelta(self, place)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`.

        In a prompt, the recurrence needs q, k, v, z, b and a, the convolution's outputs, g and beta in at least fp32, and y.
        Training stores the projections except b and a, the convolution, g and beta and their inputs, and after the
        recurrence y, the normalized y, its product with the weight, silu(z), their product, and one number for each head.

        The peak of backward is in torch's chunks, in addition to the tensors stored before the recurrence and the gradients
        of y and z. For each token and value head, the chunks need

        - seven numbers per key dimension (both sides of the triangular system, the inputs and outputs of the state, three
          gradients);
        - five numbers per value dimension (both sides, D, y, a gradient);
        - five rows of matrices within a chunk (one is a gradient), 1/CHUNK of a state, and a gradient that is added to
          another.

        For each key head, they need q and k, four copies for products, and two rows. With several sequences they need up
        to a tenth more, because products copy their inputs.
        """
        ranks, s, wide = work.ranks, work.itemsize, work.wide_itemsize
        rows = self.rows(ranks)
        q, v, heads, hidden, K, V = rows["q"], rows["v"], rows["b"], self.hidden_size, self.key_dim, self.value_dim
        projected, convolved, state = 2 * q + 2 * v + 2 * heads, 2 * q + v, heads * K * V
        copied = 2 * self.key_heads * K if self.key_heads % ranks else 0  # rows that several ranks hold
        parameters = tuple(copied * width for width in (hidden, self.conv_kernel)) if copied else ()
        gated = 5 * v + heads
        in_chunks = heads * (7 * K + 5 * V + 5 * CHUNK + max(K, V, CHUNK) + 3) + state / CHUNK
        in_chunks += 6 * q + q // K * 2 * (CHUNK + 1)
        return Sizes(
            state=self.history * convolved * s + state * wide,
            stages={
                "scan": s * (projected + convolved + v) + 4 * wide * heads,
                "output": s * (v + hidden),
            },
            projected=s * projected, stored=2 * q + 2 * v + convolved + (4 + (self.max_beta != 1.0)) * heads + gated,
            gradients=hidden * work.share + 2 * v - gated + in_chunks,
            parameters=parameters + ((V,) if ranks > 1 else ()), passed=state, mapped=heads * K**2, convolved=convolved,
            scan=8 * self.value_heads * K * V,
        )  # fmt: skip


class GatedDelta(Operator):
    """The gated delta net between its projections.

    Forward sends nothing. Backward sends one all-reduce for the weight of the norm and, with fewer key heads than ranks, one
    for each tensor that holds q and k (the weights of in_proj and of the convolution). Over context ranks, both directions
    also pass the convolution's inputs and states, or exchange heads (see `parallel/scans.py`).
    """

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, spec: GatedDeltaSpec, place: Place):
        ranks, where, wide = place.ranks, place.where, at_least_fp32(place.dtype)
        super().__init__(place)
        self.spec, self.rows = spec, spec.rows(ranks.size)
        self.heads = self.rows["b"]
        shared: dict[str, Any] = dict(shared=("q", "k"), pieces=spec.key_heads) if spec.key_heads < ranks.size else {}
        for name in ("A_log", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.heads, dtype=wide, device=place.device)))
        self.norm_weight = nn.Parameter(torch.empty(spec.value_dim, **where))
        parts = {name: self.rows[name] for name in "qkvz"}
        self.in_proj = ColumnParallelLinear(spec.hidden_size, parts, False, ranks, **where, **shared)
        self.gates = Packed({name: self.heads for name in "ba"}, (spec.hidden_size,), ranks, **where)
        channels = {name: self.rows[name] for name in "qkv"}
        self.conv = Convolution(channels, spec.conv_kernel, False, ranks, **where, **shared)
        self.out_proj = RowParallelLinear(self.rows["v"], spec.hidden_size, False, ranks, **where)

    def new_state(self, batch: int) -> State:
        """An empty state.

        conv: (batch, taps - 1, channels of q, k and v), the last inputs of the convolution. state: (batch, this rank's value
        heads, key_dim, value_dim), at least fp32.
        """
        spec, device = self.spec, self.A_log.device
        channels = sum(self.rows[name] for name in "qkv")
        conv = torch.zeros(batch, spec.history, channels, dtype=self.norm_weight.dtype, device=device)
        shape = batch, self.heads, spec.key_dim, spec.value_dim
        return State(dict(conv=conv, state=torch.zeros(shape, dtype=self.A_log.dtype, device=device)))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operator`: [q | k | v | z] and [b | a] of this rank."""
        ranks = self.ranks.size
        large = apply_layer(self.in_proj, x, adapter_of_parts(self.lora, self.spec.adapted(ranks, gates=False)))
        adapter = adapter_of_parts(self.lora, self.spec.adapted(ranks, gates=True))
        return large, with_adapter(linear(x, self.gates()), adapter, x)

    def mix(self, projected: tuple[torch.Tensor, torch.Tensor], call: Call, state: State | None = None) -> Partial:
        """See `Operator`. projected: [q | k | v | z] and [b | a]."""
        large, gates = projected
        normed = self._normed(*self._scanned(large, gates, call, state))
        return Partial(apply_layer(self.out_proj, normed, adapter_of(self.lora, "out_proj")))

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        spec, ranks, (q, v) = self.spec, self.ranks.size, (self.rows["q"], self.rows["v"])
        lora = adapter_of_parts(self.lora, spec.adapted(ranks, gates=False))
        large = lowered_linear(tape, self.in_proj, x, lora)
        gates = tape.matmul(x, self.gates())
        add_parts(tape, gates, x, adapter_of_parts(self.lora, spec.adapted(ranks, gates=True)))
        convolved = tape.conv(large.columns(0, 2 * q + v), *self.conv.tensors())
        rates = tape.delta_rates(gates, self.A_log, self.dt_bias, spec.max_beta)
        sizes = q // spec.key_dim, self.heads, spec.key_dim, spec.value_dim
        y = tape.gated_delta(convolved, rates, *sizes)
        normed = tape.norm_gated(y, large.columns(2 * q + v, v), self.norm_weight, spec.norm_eps)
        tape.release(gates)
        tape.release_unless_speculative(large, convolved, rates, y)
        out = lowered_linear(tape, self.out_proj, normed, adapter_of(self.lora, "out_proj"))
        tape.release(normed)
        return Lowered(out)

    def _rates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """g and beta, (batch, seq, this rank's value heads) in at least fp32."""
        b, a = gates.to(self.A_log.dtype).split(self.heads, dim=-1)
        beta = b.sigmoid() if self.spec.max_beta == 1.0 else self.spec.max_beta * b.sigmoid()
        return -torch.exp(self.A_log) * F.softplus(a + self.dt_bias), beta

    def _scanned(
        self, large: torch.Tensor, gates: torch.Tensor, call: Call, cache: State | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the recurrence and z, both (batch, seq, this rank's value heads * value_dim)."""
        mixed, z = large.split([2 * self.rows["q"] + self.rows["v"], self.rows["z"]], dim=-1)
        g, beta = self._rates(gates)
        if self.context is not None and call.sharding is not None:
            return self._scanned_over_context(mixed, g, beta, call, cache), z
        conv, state = (None, None) if cache is None else (cache["conv"][call.rows], cache["state"][call.rows])
        mixed = mixed if call.mask is None else mixed * call.mask
        mixed, conv = self.conv(mixed, conv, overwrite=cache is not None)
        inputs = *self._parts(mixed), g, beta
        y, state = gated_delta(*inputs, state, overwrite=cache is not None, one_by_one=call.speculative)
        if cache is not None:
            cache.update(call.rows, conv=conv, state=state)
        return y.flatten(2), z

    def _scanned_over_context(
        self, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, call: Call, cache: State | None
    ) -> torch.Tensor:
        """The output for this rank's tokens of a sequence that is split over the context ranks."""
        context: Any = self.context
        assert call.sharding is not None
        history, state = None, None
        if cache is not None and not call.begins:
            history, state = cache["conv"][call.rows], cache["state"][call.rows]
        blocks = context.to_blocks(mixed)
        blocks, _ = self.conv(blocks, halo(blocks, self.spec.history, context, history))
        if cache is not None:
            g, beta = call.sharding.mask_padding(g), call.sharding.mask_padding(beta)
        inputs = *self._parts(blocks), context.to_blocks(g), context.to_blocks(beta)
        if cache is None and context.exchanges_channels:
            return context.from_blocks(gated_delta_by_heads(*inputs, context)).flatten(2)
        y, passed = gated_delta_over_context(*inputs, context, state)
        if cache is not None:
            keep_last_inputs(mixed, call, cache)
            cache["state"][call.rows] = passed.whole_final().unflatten(2, cache["state"].shape[2:])
        return context.from_blocks(y).flatten(2)

    def _parts(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k (batch, seq, this rank's key heads, key_dim), v (batch, seq, this rank's value heads, value_dim)."""
        spec = self.spec
        q, k, v = mixed.split([self.rows[name] for name in "qkv"], dim=-1)
        q, k = (t.unflatten(2, (-1, spec.key_dim)) for t in (q, k))
        return q, k, v.unflatten(2, (-1, spec.value_dim))

    def _normed(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The norm of each head, times a weight that is replicated on all ranks, times silu(z)."""
        if not torch.is_grad_enabled() and kernels.usable(y, z, self.norm_weight):
            return kernels.norm_gated(y, z, self.norm_weight, self.spec.norm_eps)
        weight = self.copied(self.norm_weight)
        normed = weight * rms_norm(y.unflatten(-1, (-1, self.spec.value_dim)), self.spec.norm_eps).to(weight.dtype)
        return (normed.flatten(-2) * F.silu(z.to(at_least_fp32(z.dtype)))).to(z.dtype)
