"""All steps of a plan on one rank, as one generator."""

from collections.abc import Callable
from typing import Any

from commir.lowering import steps as kinds
from commir.lowering.steps import Step

from . import collectives, loop_steps
from .chunks import Chunks
from .state import RankState, Run

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
    """Take all steps; the generator returns {output: this rank's block at home}. See `state` for what it yields."""
    if state.plan.schedule.chunked is not None:
        return (yield from _take_chunks(state))
    for number, step in enumerate(state.plan.steps):
        state.taking[:] = [(number, step)]
        if state.saved is not None:
            _save_inputs(state, state.saved, step)
        yield from _TAKE[type(step)](state, step)
        if state.saved is not None and isinstance(step, kinds.Round):
            state.saved |= {each.name: state.registers[each.name, ()] for each in state.outputs(step.result)}
    state.taking.clear()
    return {output.name: state.stored(output, state.registers[output.name, ()]) for output in state.program.outputs}


def _take_chunks(state: RankState) -> Run:
    """Take all steps for one chunk after the other, from copies of its inputs, into its part of the outputs."""
    outputs, chunks = state.new_outputs(), Chunks(state)
    kept, saved = state.count.held, list[dict[str, Any]]()
    for number in range(state.plan.schedule.chunks):
        inputs = {each.name: chunks.take(each, state.read([each.name])[0], number) for each in state.plan.inputs()}
        chunk = RankState(
            state.plan.of_chunk(number), state.rank, inputs, state.count, state.kernels, chunks.copied(inputs)
        )
        chunk.saved, chunk.taking = None if state.saved is None else {}, state.taking
        for name, x in (yield from take_steps(chunk)).items():
            chunks.put(state.program.operand(name), outputs[name], x, number)
        saved += [] if chunk.saved is None else [chunk.saved]
        state.count.held = kept
    if state.saved is not None:
        state.saved |= chunks.joined(saved)
    return outputs


def _save_inputs(state: RankState, saved: dict[str, Any], step: Step) -> None:
    """Save the inputs before the first step that gathers or computes."""
    if not saved and isinstance(step, kinds.Gather | kinds.Derive | kinds.Send | kinds.Compute):
        saved |= {name: x for (name, key), x in state.registers.items() if not key}
