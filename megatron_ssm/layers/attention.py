"""Attention with grouped key/value heads, split by head over the tensor-parallel ranks.

Each of T ranks holds 1/T of the query heads and the key/value heads that they use. With fewer key/value heads than ranks,
consecutive ranks hold the same head and sum its gradients.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    apply_layer,
    bias_of,
    rms_norm,
    weighted,
)
from megatron_ssm.parallel.operators import sum_over_ranks
from megatron_ssm.spec.fields import Field, divide_either_way, divides, norm_field, row_parallel, rows_of
from megatron_ssm.spec.sizes import AttentionSizes, Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .low_rank import adapter_of, adapter_of_parts
from .operator import Lowered, Operator, Partial, Place, lowered_linear
from .state import State
from .tape_builder import Buffer, Builder, NotLowered, rotary_table


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """The sizes of causal attention, softmax(scale * q k^T) v.

    Attributes:
        hidden_size: The size of the output.
        heads, kv_heads: The number of query heads and of key/value heads. heads/kv_heads consecutive query heads use the
            same key/value head.
        input_size: The size of the input; 0: hidden_size.
        scale: The scale of the scores; None: 1/sqrt(head_dim).
        rope_theta: The base of the rotary embedding; 0: no rotary embedding.
        rope_size: The number of rotated elements of each head; 0: all.
        qk_norm_eps: The eps of the norms of queries and keys; None: no norms.
        norm_offset: The number that these norms add to their weights.
        whole_norms: True if they normalize over all heads together, False if over each head.
        gated: True if the output is multiplied by the sigmoid of a gate. In files, the rows of a head's gate follow those
            of its query.
        qkv_bias, bias: True if the projections of queries, keys and values have biases, and if o_proj has one.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    input_size: int = 0
    scale: float | None = None
    rope_theta: float = 0.0
    rope_size: int = 0
    qk_norm_eps: float | None = None
    norm_offset: float = 0.0
    whole_norms: bool = False
    gated: bool = False
    qkv_bias: bool = False
    bias: bool = False

    @property
    def attention(self) -> AttentionSizes:
        return AttentionSizes(self.heads, self.kv_heads, self.head_dim)

    def fields(self) -> Iterator[Field]:
        """Queries are split by head, keys and values by key/value head, o_proj by input column."""
        inputs, dim = self.input_size or self.hidden_size, self.head_dim
        units, rows = self._units, self.rows(1)
        for kind, trailing, init in (("weight", (inputs,), "linear"), ("bias", (), "bias"))[: 1 + self.qkv_bias]:
            for name, parts in (("q_proj", ("q", "gate") if self.gated else "q"), ("k_proj", "k"), ("v_proj", "v")):
                inside, blocks = {part: rows[part] for part in parts}, self.heads if len(parts) > 1 else 1
                yield from rows_of(f"qkv.{kind}", f"{name}.{kind}", inside, units, trailing, blocks, init)
        for name in ("q", "k") if self.qk_norm_eps is not None else ():
            field = norm_field(f"{name}_norm", f"{name}_norm.weight", dim, self.norm_offset)
            yield replace(field, shape=(rows[name],), split=0, units=units[name]) if self.whole_norms else field
        yield from row_parallel("o_proj", (self.hidden_size, self.heads * dim), self.heads, self.bias)

    def check_ranks(self, size: int) -> None:
        divides(self.heads, size, "attention heads")
        divide_either_way(self.kv_heads, size, "key/value heads")
        if self.whole_norms:
            divides(self.kv_heads, size, "key/value heads")

    def build(self, place: Place) -> "Attention":
        return Attention(self, place)

    def rows(self, ranks: int) -> dict[str, int]:
        """{part of qkv: its rows on one of `ranks` tensor-parallel ranks}."""
        q, kv = self.heads // ranks * self.head_dim, max(1, self.kv_heads // ranks) * self.head_dim
        return {"q": q, **({"gate": q} if self.gated else {}), "k": kv, "v": kv}

    @property
    def _units(self) -> dict[str, int]:
        return {"q": self.heads, "gate": self.heads, "k": self.kv_heads, "v": self.kv_heads}

    def adapted(self, ranks: int) -> dict[str, int]:
        """{projection in files: its rows on one of `ranks` ranks}, for the low-rank adapters of projections."""
        rows = self.rows(ranks)
        return {"q_proj": rows["q"] + rows.get("gate", 0), "k_proj": rows["k"], "v_proj": rows["v"]}

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`.

        In a prompt, the projection stays in memory until the output is computed. Norms make two copies in at least fp32.
        Rotation needs its input and another copy of the keys. The output needs queries, keys, and the gated output of
        attention.

        Training stores queries, keys and values; their normalized values before the weights are applied; the inputs of
        attention if they differ; cosines and sines; the output; one number for each head and norm; and the sigmoid of the
        gate and its product, also if activations are recomputed. Backward frees the tensors of the gate before it reaches
        attention.
        """
        s, wide, rows, hidden = work.itemsize, work.wide_itemsize, self.rows(work.ranks), self.hidden_size
        q, kv, heads = rows["q"], rows["k"], self.heads // work.ranks
        inputs, gate = self.input_size or hidden, rows.get("gate", 0)
        projected = q + gate + 2 * kv
        rotated = q + kv if self.rope_theta else 0
        normed = q + kv if self.qk_norm_eps is not None else 0
        changed = max(rotated, normed)
        copied = 2 * q if work.amx and s == 2 else 0
        summed = (2,) if self.whole_norms and work.ranks > 1 else ()  # squares of queries and of keys
        factors = 0 if not normed else 2 if self.whole_norms else (q + kv) // self.head_dim
        angles = 2 * (self.rope_size or self.head_dim) if rotated else 0
        stored = projected + normed + factors + changed + angles + q + heads + 2 * gate
        copies = 2 * self.kv_heads * self.head_dim if self.kv_heads < work.ranks else 0
        widths = (inputs,) + (1,) * self.qkv_bias
        in_norms = 0
        if normed and s != wide:
            copied_number = 2 * wide + s  # the bytes of all copies of a number while its norm is computed
            in_norms = (
                2 * wide * normed + s * q if self.whole_norms else max(copied_number * q, s * q + copied_number * kv)
            )
        in_rotation, gated = normed + rotated + kv if rotated else 0, changed + q + max(copied, 2 * gate)
        return Sizes(
            keys=2 * kv * s,
            stages={
                "attention": s * projected + max(in_norms, s * in_rotation, s * gated),
                "output": s * (projected + q + hidden * (1 + self.bias)),
            },
            projected=s * projected, stored=stored, kept=stored, inner=summed, backward=summed,
            gradients=(inputs + hidden) * work.share + 2 * (q + kv) - gate,
            parameters=tuple(copies * width for width in widths) if copies else (), attention=4 * self.heads * self.head_dim,
        )  # fmt: skip


class Attention(Operator):
    """Attention between the projections `qkv` and `o_proj`. Its parameters may also be those of a larger block.

    Forward sends the messages of attention over context ranks (`Place.core`) and, for norms over all heads, one all-reduce
    of squares. Backward sends:

    - for norms over all heads, one all-reduce of the gradients of the squares;
    - for norms over single heads, one all-reduce for each weight;
    - with fewer key/value heads than ranks, one all-reduce for the weight of qkv and one for its bias.
    """

    q_norm: nn.Parameter  # None if there are no norms
    k_norm: nn.Parameter

    recomputes_mix = False

    def __init__(self, spec: AttentionSpec, place: Place):
        super().__init__(place)
        self.build_attention(spec, place)

    def build_attention(self, spec: AttentionSpec, place: Place) -> None:
        """Create the parameters."""
        ranks, where = place.ranks, place.where
        self.core = place.core or attend_with_cache
        self.attention_spec, self.rows = spec, spec.rows(ranks.size)
        self.scale = 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale
        shared: dict[str, Any] = dict(shared=("k", "v"), pieces=spec.kv_heads) if spec.kv_heads < ranks.size else {}
        inputs = spec.input_size or spec.hidden_size
        self.qkv = ColumnParallelLinear(inputs, self.rows, spec.qkv_bias, ranks, **where, **shared)
        for name in ("q", "k") if spec.qk_norm_eps is not None else ():
            size = self.rows[name] if spec.whole_norms else spec.head_dim
            self.register_parameter(f"{name}_norm", nn.Parameter(torch.empty(size, **where)))
        self.o_proj = RowParallelLinear(self.rows["q"], spec.hidden_size, spec.bias, ranks, **where)

    def new_state(self, batch: int) -> State:
        """keys, values: (batch, 0, this rank's key/value heads, head_dim)."""
        spec, weight = self.attention_spec, self.o_proj.weight  # the dtype of a quantized weight is that of activations
        shape = batch, 0, self.rows["k"] // spec.head_dim, spec.head_dim
        names = "keys", "values"
        return State(per_token={name: torch.zeros(shape, dtype=weight.dtype, device=weight.device) for name in names})

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[q | k | v] of this rank."""
        adapted = self.attention_spec.adapted(self.ranks.size)
        return apply_layer(self.qkv, x, adapter_of_parts(self.lora, adapted))

    def mix(self, projected: torch.Tensor, call: Call, state: State | None = None) -> Partial:
        out = apply_layer(self.o_proj, self.attended(projected, call, state), adapter_of(self.lora, "o_proj"))
        return Partial(out, bias=bias_of(self.o_proj))

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        adapted = self.attention_spec.adapted(self.ranks.size)
        qkv = lowered_linear(tape, self.qkv, x, adapter_of_parts(self.lora, adapted))
        y = self.lower_attention(tape, qkv)
        out = lowered_linear(tape, self.o_proj, y, adapter_of(self.lora, "o_proj"))
        tape.release(y)
        return Lowered(out, bias=self.o_proj.bias)

    def lower_attention(self, tape: Builder, qkv: Buffer) -> Buffer:
        """`attended` on a tape; releases qkv. In prompts, the tape stops and Python computes attention."""
        spec, rows = self.attention_spec, self.rows
        if tape.prompt:
            y, path = tape.buffer(rows["q"]), tape.path

            def attend_prompt(call: Any) -> None:
                call.tensor(y).copy_(self.attended(call.tensor(qkv), call.call, call.cache.states[path]))

            tape.stop(attend_prompt, "attention")
            tape.release(qkv)
            return y
        if self.core is not attend_with_cache:
            raise NotLowered("attention over context ranks")
        starts = itertools.accumulate(rows.values(), initial=0)
        parts = {name: qkv.columns(first, rows[name]) for name, first in zip(rows, starts, strict=False)}
        q, k, v = (parts[name] for name in "qkv")
        size, table = spec.rope_size or spec.head_dim, None
        heads, kv_heads = rows["q"] // spec.head_dim, rows["k"] // spec.head_dim
        if spec.whole_norms:
            self._lower_whole_norms(tape, q, k)
        elif spec.qk_norm_eps is not None:
            tape.head_norms(q, heads, self.q_norm, spec.qk_norm_eps, spec.norm_offset)
            tape.head_norms(k, kv_heads, self.k_norm, spec.qk_norm_eps, spec.norm_offset)
        if spec.rope_theta:
            table = rotary_table(spec.rope_theta, size, tape.dtype)
            for part, count in ((q, heads), (k, kv_heads)):
                tape.rotate(part, count, spec.head_dim, size, table)
        slot = tape.append(k, "keys")
        tape.append(v, "values")
        y = tape.attend(q, slot, heads, kv_heads, spec.head_dim, self.scale)
        if spec.gated:
            y, attended = tape.activate(parts["gate"], y, "sigmoid"), y
            tape.release(attended)
        tape.release(qkv)
        return y

    def _lower_whole_norms(self, tape: Builder, q: Buffer, k: Buffer) -> None:
        spec = self.attention_spec
        assert spec.qk_norm_eps is not None
        squares = tape.buffer(2, torch.float32)
        for column, x in enumerate((q, k)):
            tape.squares(x, squares.columns(column, 1))
        summed = tape.sum(self.ranks, squares, is_exact=True)
        for column, (x, weight, heads) in enumerate(((q, self.q_norm, spec.heads), (k, self.k_norm, spec.kv_heads))):
            tape.whole_norm(x, summed, column, heads * spec.head_dim, weight, spec.qk_norm_eps, spec.norm_offset)
        tape.release(squares)

    def attended(self, projected: torch.Tensor, call: Call, state: State | None) -> torch.Tensor:
        """[q | k | v] -> (batch, seq, this rank's heads * head_dim), the input of o_proj."""
        spec, positions = self.attention_spec, call.positions
        assert positions is not None
        parts = dict(zip(self.rows, projected.split(list(self.rows.values()), dim=-1), strict=True))
        if spec.whole_norms:
            parts["q"], parts["k"] = self._whole_norms(parts["q"], parts["k"])
        q, k, v = (parts[name].unflatten(-1, (-1, spec.head_dim)) for name in "qkv")  # (batch, seq, heads, head_dim)
        if spec.qk_norm_eps is not None and not spec.whole_norms:
            q, k = (self._normed(t, name) for t, name in ((q, "q_norm"), (k, "k_norm")))
        if spec.rope_theta:
            q, k = (rotate(t, positions.new, spec.rope_theta, spec.rope_size) for t in (q, k))
        y = self.core(q, k, v, self.scale, call, state).flatten(-2)
        return y * torch.sigmoid(parts["gate"]) if spec.gated else y

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The norm of each head, times a weight that is replicated on all ranks."""
        spec = self.attention_spec
        assert spec.qk_norm_eps is not None
        return weighted(rms_norm(x, spec.qk_norm_eps), self.copied(getattr(self, name)), spec.norm_offset)

    def _whole_norms(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms over all queries and over all keys of a token. Sends one all-reduce of both sums of squares."""
        spec, wide = self.attention_spec, at_least_fp32(q.dtype)
        assert spec.qk_norm_eps is not None
        both = q.to(wide), k.to(wide)
        squares = torch.stack([t.square().sum(-1) for t in both], dim=-1)  # (batch, seq, 2)
        if self.ranks.size > 1:
            squares = sum_over_ranks(squares, self.ranks.group, self.ranks.all_reduce_exact_once)
        counts = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        means = (total / count for total, count in zip(squares.split(1, dim=-1), counts, strict=True))
        normed = (t * torch.rsqrt(mean + spec.qk_norm_eps) for t, mean in zip(both, means, strict=True))
        weights = self.q_norm, self.k_norm
        q, k = (weighted(t, weight, spec.norm_offset) for t, weight in zip(normed, weights, strict=True))
        return q, k


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(scale * q k^T) v on one rank, exact: (batch, seq, heads, head_dim). Sends nothing.

    Args:
        q: (batch, seq, heads, head_dim).
        k, v: (batch, keys, kv_heads, head_dim); heads/kv_heads consecutive query heads use the same key/value head.
        causal: True if a query attends only to the keys up to its own position; then there are as many keys as queries.
        scale: The scale of the scores.
        mask: (batch or 1, 1, seq, keys) bool, True where a query may attend; or None.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def attend_with_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, call: Call, state: State | None
) -> torch.Tensor:
    """`attend` to the keys and values in the state, after adding those of the call; without a state, only to those."""
    positions = call.positions
    assert positions is not None
    if state is not None:
        padded = call.mask is not None
        k, v = state.append(positions.new, positions.longest, call.rows, padded, keys=k, values=v)
    return attend(q, k, v, positions.causal, scale, positions.mask)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, size: int = 0) -> torch.Tensor:
    """The rotary position embedding of x, of the same shape. The angles are computed in at least fp32, as in transformers.

    Elements i and i + size/2 of each head are rotated by the angle positions * theta^(-2i/size).

    Args:
        x: (batch, seq, heads, head_dim).
        positions: (batch, seq). Negative positions, of padding, count as 0.
        theta: The base.
        size: The number of rotated elements at the beginning of each head; 0: all.
    """
    if 0 < size < x.shape[-1]:
        rotated = rotate(x[..., :size], positions, theta)
        return torch.cat([rotated, x[..., size:]], dim=-1)
    wide, size = at_least_fp32(x.dtype), x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).to(wide) / size)
    angles = positions.clamp(min=0).unsqueeze(-1).to(wide) * frequencies
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (angles.cos(), angles.sin()))  # (batch, seq, 1, size/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
