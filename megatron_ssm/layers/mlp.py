"""The MLP of a transformer layer, gated or not, split by channel over the tensor-parallel ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ssm.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, apply_layer, bias_of
from megatron_ssm.spec.fields import Field, divides, packed, row_parallel, rows_of
from megatron_ssm.spec.sizes import Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .low_rank import Adapters, adapter_of, adapter_of_parts
from .operator import Lowered, Operator, Partial, Place, lowered_linear
from .state import State
from .tape_builder import Buffer, Builder


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": squared_relu,
}


@dataclass(frozen=True)
class MlpSpec(Spec):
    """The sizes of an MLP: down(activation(gate_scale * gate(x)) * up(x)), or down(activation(up(x))) if it is not gated.

    Attributes:
        hidden_size: The size of the input and the output.
        channels: The inner dimension.
        activation: A name of ACTIVATIONS.
        gated: True if there is a gate projection.
        bias: True if all projections have biases.
        packed: True if checkpoint files store gate and up in one tensor.
        gate_scale: A constant that multiplies the gate projection.
        scored: True if the output is multiplied by sigmoid(score(x)), one number per token.
    """

    hidden_size: int
    channels: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    packed: bool = False
    gate_scale: float = 1.0
    scored: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("gate", "up") if self.gated else ("up",)

    def fields(self) -> Iterator[Field]:
        """All parameters but the score are split by channel."""
        rows = dict.fromkeys(self.inputs, self.channels)
        if self.packed:
            yield from packed("gate_up", rows, rows, (self.hidden_size,), self.bias, hf="gate_up_proj")
        else:
            for name in rows:
                one = {name: self.channels}
                yield from rows_of("gate_up.weight", f"{name}_proj.weight", one, one, (self.hidden_size,))
            for name in rows if self.bias else ():
                one = {name: self.channels}
                yield from rows_of("gate_up.bias", f"{name}_proj.bias", one, one, (), init="bias")
        yield from row_parallel("down_proj", (self.hidden_size, self.channels), self.channels, self.bias)
        if self.scored:
            yield Field("score.weight", "score.weight", (1, self.hidden_size), adaptable=False)

    def check_ranks(self, size: int) -> None:
        divides(self.channels, size, "channels of the MLP")

    def build(self, place: Place) -> "Mlp":
        return Mlp(self, place)

    def rows(self, ranks: int) -> dict[str, int]:
        """{projection into the MLP: its rows on one of `ranks` tensor-parallel ranks}."""
        return dict.fromkeys(self.inputs, self.channels // ranks)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`. Training stores the projections, the activated gate, and the product."""
        inner, hidden, count = self.channels // work.ranks, self.hidden_size, len(self.inputs)
        return Sizes(
            stages={
                "MLP": work.itemsize * (count + 2) * inner,
                "output": work.itemsize * (inner + hidden * (1 + self.bias)),
            },
            projected=work.itemsize * (count * inner + self.scored),
            stored=(2 * count + (self.gate_scale != 1.0)) * inner + self.scored * (hidden + 1),
            gradients=hidden * work.share + (2 if self.gated else 3) * inner,
            parameters=(hidden,) if self.scored and work.ranks > 1 else (),
        )


class Mlp(Operator):
    """The MLP between the projections `gate_up` and `down_proj`. Its parameters may also be those of a larger block.

    Sends nothing, except one all-reduce in backward for the weight of `score` if it exists.
    """

    score: ReplicatedLinear

    def __init__(self, spec: MlpSpec, place: Place):
        super().__init__(place)
        self.build_mlp(spec, place)
        if spec.scored:
            self.score = ReplicatedLinear((1, spec.hidden_size), False, place.ranks, **place.where)

    def build_mlp(self, spec: MlpSpec, place: Place) -> None:
        """Create the parameters."""
        ranks, where = place.ranks, place.where
        self.mlp_spec, self.mlp_rows = spec, spec.rows(ranks.size)
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_up = ColumnParallelLinear(spec.hidden_size, self.mlp_rows, spec.bias, ranks, **where)
        self.down_proj = RowParallelLinear(self.mlp_rows["up"], spec.hidden_size, spec.bias, ranks, **where)

    def input_adapter(self, lora: Adapters | None) -> Any:
        """The low-rank product of `gate_up` among adapters: its own, or those of its projections; or None."""
        parts = {f"{name}_proj": rows for name, rows in self.mlp_rows.items()}
        return adapter_of(lora, "gate_up_proj") or adapter_of_parts(lora, parts)

    def project(self, x: torch.Tensor) -> Any:
        """[gate | up] or [up] of this rank; a tuple with the score if it exists."""
        projected = apply_layer(self.gate_up, x, self.input_adapter(self.lora))
        return (projected, self.score(x)) if self.mlp_spec.scored else projected

    def mix(self, projected: Any, call: Call, state: State | None = None) -> Partial:
        projected, score = projected if self.mlp_spec.scored else (projected, None)
        out = apply_layer(self.down_proj, self.activated(projected), adapter_of(self.lora, "down_proj"))
        return Partial(out if score is None else score.sigmoid() * out, bias=bias_of(self.down_proj))

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        inner = self.lower_activated(tape, lowered_linear(tape, self.gate_up, x, self.input_adapter(self.lora)))
        out = lowered_linear(tape, self.down_proj, inner, adapter_of(self.lora, "down_proj"))
        tape.release(inner)
        if self.mlp_spec.scored:
            score = tape.matmul(x, self.score.weight)
            tape.score(out, score)
            tape.release(score)
        return Lowered(out, bias=self.down_proj.bias)

    def lower_activated(self, tape: Builder, projected: Buffer) -> Buffer:
        """`activated` on a tape; releases its input."""
        spec, inner = self.mlp_spec, self.mlp_rows["up"]
        up = projected.columns(inner, inner) if spec.gated else None
        y = tape.activate(projected.columns(0, inner), up, spec.activation, spec.gate_scale)
        tape.release(projected)
        return y

    def activated(self, projected: torch.Tensor) -> torch.Tensor:
        """(batch, seq, this rank's rows of gate_up) -> the input of down_proj."""
        if not self.mlp_spec.gated:
            return self.activation(projected)
        gate, up = projected.chunk(2, dim=-1)
        gate = gate if self.mlp_spec.gate_scale == 1.0 else self.mlp_spec.gate_scale * gate
        return self.activation(gate) * up
