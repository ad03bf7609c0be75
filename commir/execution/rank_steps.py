"""All steps of a plan on one rank, as one generator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from commir.ir.program import Operand
from commir.lowering import plan_steps as kinds
from commir.lowering.operand_layouts import Piece
from commir.lowering.plan_steps import Step
from commir.lowering.tensor_blocks import expand, flat, local_sizes, select

from . import collectives, loop_steps
from .state import RankState, Run

Tensor = torch.Tensor

_TAKE: dict[type, Callable[[RankState, Any], Run]] = {
    kinds.AllToAll: collectives.all_to_all,
    kinds.Gather: collectives.gather,
    kinds.Slice: collectives.slice_own,
    kinds.Swap: collectives.swap,
    kinds.ReduceScatter: collectives.reduce_scatter,
    kinds.AllReduce: collectives.all_reduce,
    kinds.Derive: loop_steps.derive_input,
    kinds.Send: loop_steps.send,
    kinds.Arrive: loop_steps.arrive,
    kinds.Free: loop_steps.free,
    kinds.Compute: loop_steps.compute,
    kinds.SendPartial: loop_steps.send_partial,
    kinds.Combine: loop_steps.combine,
    kinds.Round: loop_steps.round_outputs,
    kinds.Summarize: loop_steps.summarize_blocks,
    kinds.PassStates: loop_steps.pass_states,
}


def take_steps(state: RankState) -> Run:
    """Take all steps; the generator returns {output: this rank's block at home}. `state` describes the values it yields."""
    if state.plan.schedule.chunked is not None:
        return (yield from _take_chunks(state))
    for number, step in enumerate(state.plan.steps):
        state.current_step[:] = [(number, step)]
        if state.saved is not None:
            _save_inputs(state, state.saved, step)
        yield from _TAKE[type(step)](state, step)
        if state.saved is not None and isinstance(step, kinds.Round):
            state.saved |= {operand.name: state.registers[operand.name, ()] for operand in state.outputs(step.result)}
    state.current_step.clear()
    return {output.name: state.stored(output, state.registers[output.name, ()]) for output in state.program.outputs}


def _take_chunks(state: RankState) -> Run:
    """Take all steps for one chunk after the other: from copies of its inputs, into its part of the outputs."""
    outputs, chunks = state.new_outputs(), _Chunks(state)
    kept, saved = state.count.held, list[dict[str, Any]]()
    for number in range(state.plan.schedule.chunks):
        inputs = {
            operand.name: chunks.copy_chunk(operand, state.read([operand.name])[0], number)
            for operand in state.plan.inputs()
        }
        chunk = RankState(
            state.plan.of_chunk(number), state.rank, inputs, state.count, state.kernels, chunks.copied_operands(inputs)
        )
        chunk.saved, chunk.current_step = None if state.saved is None else {}, state.current_step
        for name, x in (yield from take_steps(chunk)).items():
            chunks.write_chunk(state.program.operand(name), outputs[name], x, number)
        saved += [] if chunk.saved is None else [chunk.saved]
        state.count.held = kept
    if state.saved is not None:
        state.saved |= chunks.join_chunks(saved)
    return outputs


def _save_inputs(state: RankState, saved: dict[str, Any], step: Step) -> None:
    """Save the inputs before the first step that gathers or computes."""
    if not saved and isinstance(step, kinds.Gather | kinds.Derive | kinds.Send | kinds.Compute):
        saved |= {name: x for (name, key), x in state.registers.items() if not key}


class _Chunks:
    """The places of a plan's chunks in the tensors of a rank."""

    def __init__(self, state: RankState) -> None:
        self._plan, self._digits = state.plan, state.digits
        self._axis, self._number = self._digits.piece(str(state.plan.schedule.chunked))

    def copy_chunk(self, operand: Operand, x: Tensor, number: int) -> Tensor:
        """Copy a chunk of an operand that is at home. An operand without chunks is returned itself."""
        if self._axis not in operand.axes:
            return x
        sizes = local_sizes(self._digits, operand, self._digits.home(operand))
        return flat(select(x, sizes, self._fixed(number)), sizes, self._fixed(number)).clone()

    def write_chunk(self, operand: Operand, whole: Tensor, x: Tensor, number: int) -> None:
        sizes = local_sizes(self._digits, operand, self._digits.home(operand))
        select(whole, sizes, self._fixed(number)).copy_(expand(x, sizes, self._fixed(number)))

    def copied_operands(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._axis in self._plan.program.operand(name).axes}

    def join_chunks(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """{operand: all its chunks}, where a rank holds whole chunks because ranks divide the axis outside of them."""
        operands = {name: self._plan.program.operand(name) for name in parts[0]}
        return {
            name: torch.cat([part[name] for part in parts], operand.axes.index(self._axis))
            if self._axis in operand.axes
            else parts[0][name]
            for name, operand in operands.items()
        }

    def _fixed(self, number: int) -> dict[Piece, int]:
        return {(self._axis, self._number): number}
