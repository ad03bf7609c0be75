"""A residual unit, and a layer, which is a list of units."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.parallel.layers import RMSNorm
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.spec.stack import Norm, Unit

from .call import Call
from .operator import Lowered, Operator, Partial, Place, as_input, check_plain, mix_with_rollback, sum_of
from .shared_block import SharedBlock
from .state import State
from .tape_builder import Buffer, Builder, NotLowered


class Layer(TrackedModule):
    """The units of a layer, one after the other. Its modules are the norms and operators of all units.

    x is the same on every rank; with sequence parallelism it is this rank's share of the tokens. Each unit sends the
    messages of its operators and one all-reduce of their sum (with sequence parallelism an all-gather and a reduce-scatter).
    """

    def __init__(self, units: Iterable[Unit], hidden: int, residual_in_fp32: bool, place: Place):
        super().__init__()
        self.units, self.ranks = tuple(units), place.ranks
        self.residual_in_fp32, self.dtype = residual_in_fp32, place.dtype
        for unit in self.units:
            for norm in (unit.norm, unit.post_norm):
                if norm is not None:
                    module = RMSNorm(hidden, norm.eps, **place.where, ranks=place.ranks, offset=norm.offset)
                    self.add_module(norm.name, module)
            for part in (*unit.operators, *([unit.side.part] if unit.side else [])):
                self.add_module(part.name, part.spec.build(place))

    @property
    def names_with_state(self) -> list[str]:
        """The names of the operators, and of the invocations of shared blocks, that have a state."""
        modules: Any = self._modules
        names = [
            part.name for unit in self.units for part in (*([unit.side.part] if unit.side else []), *unit.operators)
        ]
        return [name for name in names if modules[name].new_state(0) is not None]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        first = self.units[0].norm if self.units else None
        dtype = self.dtype if first is None else self._norm(first).weight.dtype
        return at_least_fp32(dtype) if self.residual_in_fp32 else dtype

    def forward(
        self,
        x: torch.Tensor,
        call: Call,
        states: Mapping[str, State] | None = None,
        shared: Any = (),
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (batch, seq, hidden) -> the same shape. Reads and updates states, {name of an operator: its state}.

        embeddings: The second input of shared blocks, (batch, seq, hidden).
        """
        for unit in self.units:
            x = self._unit(unit, x, call, states or {}, shared, embeddings)
        return x

    def lower(
        self, tape: Builder, path: str, x: Buffer, embeddings: Buffer | None, shared: Sequence[SharedBlock]
    ) -> None:
        """Write the operations of the layer to a tape, which updates the residual stream x in place.

        path: the prefix of the paths of the operators, as in `Cache.states`. embeddings: the second input of shared blocks,
        or None. Raises NotLowered if C does not support an operator.
        """
        check_plain(self)
        for unit in self.units:
            inputs = x
            if unit.side is not None and embeddings is not None:
                block, name = shared[unit.side.shared], unit.side.part.name
                check_plain(block)
                tape.path = path + name
                output = block.lower_invocation(tape, x, embeddings, getattr(self, name))
                inputs = tape.add(x, output)
                tape.release(output)
            tape.path = path + unit.operators[0].name
            if unit.norm is None:
                normed = tape.converted(inputs, tape.dtype)
            else:
                normed = tape.norm(inputs, self._norm(unit.norm))
            if inputs is not x:
                tape.release(inputs)
            partial, scale, biases = self._lower_operators(unit, tape, path, normed)
            summed = tape.sum(self.ranks, partial.out, partial.columns)
            if unit.post_norm is None:
                tape.residual(x, summed, biases, (unit.residual_scale, scale), partial.channels_per_column, partial.eps)
            elif partial.columns is not None:
                raise NotLowered("a norm after a norm with exact columns")
            else:
                whole = tape.sum_with_biases(summed, biases)
                output = tape.norm(whole, self._norm(unit.post_norm))
                tape.add(x, output, unit.residual_scale, into=True)
                tape.release(whole, output)
            tape.release(partial.out, *([partial.columns] if partial.columns else []))

    def _lower_operators(
        self, unit: Unit, tape: Builder, path: str, normed: Buffer
    ) -> tuple[Lowered, float, list[torch.Tensor]]:
        """(this rank's sum of the operators of a unit, the scale of the sum over the ranks, the biases to add)."""
        outputs = []
        for part, operator in zip(unit.operators, self._operators(unit), strict=True):
            tape.path = path + part.name
            inputs = normed if part.input_scale == 1.0 else tape.converted(normed, tape.dtype, part.input_scale)
            output = operator.lower(tape, inputs)
            if inputs is not normed:
                tape.release(inputs)
            if output.bias is not None and part.output_scale != 1.0:
                raise NotLowered("a scaled bias")
            if output.columns is None:
                tape.scale(output.out, part.output_scale)
            outputs.append(output)
        tape.release(normed)
        biases, (first, *others) = [output.bias for output in outputs if output.bias is not None], outputs
        if not others:
            return first, 1.0 if first.columns is None else unit.operators[0].output_scale, biases
        if any(output.columns is not None for output in outputs):
            raise NotLowered("several operators with norms after the sum")
        for output in others:
            tape.add(first.out, output.out, into=True)
            tape.release(output.out)
        return first, 1.0, biases

    def _unit(
        self, unit: Unit, x: torch.Tensor, call: Call, states: Mapping[str, State], shared, embeddings
    ) -> torch.Tensor:
        """x + r * post(sum_i o_i * operator_i(i_i * pre(x + side(x, e))))."""
        residual = x.to(self.sum_dtype)
        if unit.side is not None:
            assert embeddings is not None
            block: SharedBlock = shared[unit.side.shared]
            name = unit.side.part.name
            x = x + block(x, embeddings, getattr(self, name), call, states.get(name))
        out = self.ranks.recomputation.run(self._recomputed, unit, x, call, states)
        if isinstance(out, list):
            out = self._sum(unit, self._mixed(unit, out, call, states))
        return residual + (out if unit.residual_scale == 1.0 else unit.residual_scale * out)

    def _recomputed(self, unit: Unit, x: torch.Tensor, call: Call, states: Mapping[str, State]) -> Any:
        """The part of a unit that recomputation repeats: everything but `mix` of operators whose messages must not repeat.

        Returns the output of the unit, or, if it has such operators, a list of the outputs of `mix` and, for these
        operators, of `project`.
        """
        operators = self._operators(unit)
        normed = x if unit.norm is None else self._norm(unit.norm)(x)
        with as_input(normed, self.ranks) as whole:
            del normed
            projected = [
                operator.project(whole if part.input_scale == 1.0 else part.input_scale * whole)
                for part, operator in zip(unit.operators, operators, strict=True)
            ]
            del whole
        if all(operator.recomputes_mix for operator in operators):
            return self._sum(unit, self._mixed(unit, projected, call, states))
        if not self.ranks.recomputation.is_on:
            return projected
        return [
            mix_with_rollback(operator, value, call, states.get(part.name)) if operator.recomputes_mix else value
            for part, operator, value in zip(unit.operators, operators, projected, strict=True)
        ]

    def _mixed(self, unit: Unit, projected: list, call: Call, states: Mapping[str, State]) -> list[Partial]:
        """Call `mix` of the operators for which the list has the output of `project`."""
        mixed = []
        for index, (part, operator) in enumerate(zip(unit.operators, self._operators(unit), strict=True)):
            value, projected[index] = projected[index], None  # so that it is freed
            mixed.append(
                value if isinstance(value, Partial) else mix_with_rollback(operator, value, call, states.get(part.name))
            )
        return mixed

    def _sum(self, unit: Unit, mixed: list[Partial]) -> torch.Tensor:
        scales = [part.output_scale for part in unit.operators]
        out = sum_of(mixed, self.ranks, scales, keep_for_recomputation=unit.post_norm is not None)
        return out if unit.post_norm is None else self._norm(unit.post_norm)(out)

    def _operators(self, unit: Unit) -> list[Operator]:
        modules: Any = self._modules
        return [modules[part.name] for part in unit.operators]

    def _norm(self, norm: Norm) -> RMSNorm:
        module: Any = self._modules[norm.name]
        return module
