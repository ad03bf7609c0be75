"""All steps of a plan on one rank, as one generator."""

from collections.abc import Callable
from typing import Any

import torch

from commir.lowering import plan_steps as kinds
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
    digits, (axis, digit) = state.digits, state.digits.piece(str(state.plan.schedule.chunked))
    sizes = {x.name: local_sizes(digits, x, digits.home(x)) for x in (*state.plan.inputs(), *state.program.outputs)}
    copied = [x.name for x in state.plan.inputs() if axis in x.axes]
    outputs, saved = state.new_outputs(), list[dict[str, Tensor]]()
    kept = state.count.held
    for number in range(state.plan.schedule.chunks):
        fixed, inputs = {(axis, digit): number}, {x.name: state.registers[x.name, ()] for x in state.plan.inputs()}
        for name in copied:
            inputs[name] = flat(select(inputs[name], sizes[name], fixed), sizes[name], fixed).clone()
        chunk = RankState(state.plan.of_chunk(number), state.rank, inputs, state.count, state.kernels, copied)
        chunk.saved, chunk.current_step = None if state.saved is None else {}, state.current_step
        for name, x in (yield from take_steps(chunk)).items():
            select(outputs[name], sizes[name], fixed).copy_(expand(x, sizes[name], fixed))
        saved += [] if chunk.saved is None else [chunk.saved]
        state.count.held = kept
    if state.saved is not None:  # ranks divide the axis outside of chunks, so that they hold whole chunks
        for name, x in saved[0].items():
            if axis in (axes := state.program.operand(name).axes):
                x = torch.cat([each[name] for each in saved], axes.index(axis))
            state.saved[name] = x
    return outputs


def _save_inputs(state: RankState, saved: dict[str, Any], step: Step) -> None:
    """Save the inputs before the first step that gathers or computes."""
    if not saved and isinstance(step, kinds.Gather | kinds.Derive | kinds.Send | kinds.Compute):
        saved |= {name: x for (name, key), x in state.registers.items() if not key}
