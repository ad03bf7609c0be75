"""The steps inside the loops of a rank: blocks that travel, tiles, and partial results that travel.

Every function takes the state of a rank and a step, and is a generator as `state` describes.
"""

import math
from collections.abc import Mapping

import torch

from commir.ir.monoids import MONOIDS
from commir.ir.program import Operand, Program, Result
from commir.lowering import plan_steps as kinds
from commir.lowering.operand_layouts import Piece
from commir.lowering.plan_steps import Key, message_of, register_key
from commir.lowering.rank_view import Fixed
from commir.lowering.tensor_blocks import Sizes, expand, flat, select
from commir.programs.scan_programs import pass_states as pass_block_states
from commir.programs.scan_programs import summarize

from .state import RankState, Run

Tensor = torch.Tensor


def derive_input(state: RankState, step: kinds.Derive) -> Run:
    """Compute an input from others."""
    sources = state.read(state.program.operand(step.operand).source)
    derived = state.kernels.derive(state.program, step.operand, sources)
    state.count.hold(derived)
    state.registers[step.operand, ()] = derived
    yield from ()


def send(state: RankState, step: kinds.Send) -> Run:
    """Begin to pass blocks to the rank before, and to receive the next."""
    blocks = state.read(step.operands, step.source)
    handle, targets = yield from state.begin_exchange(blocks, state.peer(step.axis, -1), state.peer(step.axis, 1))
    state.in_flight[message_of(step)] = handle, targets, []


def arrive(state: RankState, step: kinds.Arrive) -> Run:
    """Wait for blocks."""
    handle, blocks, _ = state.in_flight.pop(message_of(step))
    yield handle
    state.registers |= {(name, step.key): x for name, x in zip(step.operands, blocks, strict=True)}


def free(state: RankState, step: kinds.Free) -> Run:
    """Release blocks."""
    for name in step.operands:
        state.drop(state.registers.pop((name, register_key(step.key))))
    yield from ()


def compute(state: RankState, step: kinds.Compute) -> Run:
    """Compute a tile, and combine its results into the accumulators."""
    fixed = state.turn(step.counters)
    operands = [operand for operand in state.program.inputs if operand.in_tile]
    inputs = {operand.name: _input(state, operand, step.counters, fixed) for operand in operands}
    if (scan := state.program.scan) and (scan.carry, ()) in state.registers:
        inputs[scan.carry] = state.registers.pop((scan.carry, ()))
        state.count.drop(inputs[scan.carry])
    indices = _indices(state, fixed)
    _check_shapes(state.program, inputs, indices)
    if (into := state.kernels.tile_into) and (total := _whole(state, state.program.results[0], step.counters, fixed)):
        into(state.program, inputs, indices, total)
    else:
        computed = state.kernels.tile(state.program, inputs, indices)
        for result in state.program.results:
            _accumulate(state, result, [computed[name] for name in result.outputs], step.counters, fixed)
    yield from ()


def summarize_blocks(state: RankState, step: kinds.Summarize) -> Run:
    """Compute the summaries of this rank's blocks."""
    inputs = {operand.name: state.registers[operand.name, ()] for operand in state.program.inputs}
    summaries = summarize(state.program, inputs, _indices(state, {}))
    for name, x in zip(state.scan.summaries, summaries, strict=True):
        state.count.hold(x)
        state.registers[name, ()] = x
    yield from ()


def pass_states(state: RankState, step: kinds.PassStates) -> Run:
    """Compute the state that enters each block."""
    carry = pass_block_states(state.program, *state.read(state.scan.summaries))
    state.count.hold(carry)
    state.registers[state.scan.carry, ()] = carry
    yield from ()


def send_partial(state: RankState, step: kinds.SendPartial) -> Run:
    """Begin to send a partial result, and to receive another rank's."""
    outputs = state.outputs(step.result)
    partial = [state.registers.pop((output.name, step.source)) for output in outputs]
    leaving = [state.on_wire(output, x) for output, x in zip(outputs, partial, strict=True)]
    state.count_instead(partial, leaving)
    del partial  # so that it is freed
    to, source = state.peer(step.axis, step.distance), state.peer(step.axis, -step.distance)
    handle, arriving = yield from state.begin_exchange(leaving, to, source)
    state.in_flight[message_of(step)] = handle, arriving, leaving


def combine(state: RankState, step: kinds.Combine) -> Run:
    """Wait for another rank's partial result, and combine it into this rank's."""
    handle, arrived, sent = state.in_flight.pop(message_of(step))
    yield handle
    result = state.program.results[step.result]
    MONOIDS[result.monoid].combine(state.read(result.outputs, step.target), arrived)
    state.count.drop(*arrived, *sent)


def round_outputs(state: RankState, step: kinds.Round) -> Run:
    """Convert outputs to the dtype in which they travel."""
    for output in state.outputs(step.result):
        old = state.registers[output.name, ()]
        state.registers[output.name, ()] = new = state.on_wire(output, old)
        state.count_instead([old], [new])
    yield from ()


def _input(state: RankState, operand: Operand, counters: Key, fixed: Fixed) -> Tensor:
    """The block of an input that the tile reads."""
    register, sizes = state.registers[operand.name, state.key(operand.name, counters)], state.sizes[operand.name]
    local = _local(fixed, sizes)
    return flat(select(register, sizes, local), sizes, local) if local else register


def _check_shapes(program: Program, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if a block does not have as many elements as the tile's indices: kernels would crash."""
    for name, x in inputs.items():
        operand = program.operand(name)
        for axis, size in zip(operand.axes, x.shape, strict=False):
            expected = len(indices[axis]) // operand.divisor(axis) if axis in indices else size
            if size != expected or x.dim() != len(operand.axes):
                shape = tuple(x.shape)
                raise RuntimeError(f"a tile reads {name} of shape {shape}, with {expected} elements along {axis}")


def _indices(state: RankState, fixed: Fixed) -> dict[str, Tensor]:
    """For each loop axis, the elements of the whole tensor that the tile sees."""
    return {axis: state.plan.elements(axis, blocks) for axis, blocks in state.blocks_of_axes(fixed).items()}


def _whole(state: RankState, result: Result, counters: Key, fixed: Fixed) -> list[Tensor]:
    """The accumulators of a tile's results, if they exist and the tile computes all of their elements; otherwise []."""
    names = result.outputs
    key = state.key(names[0], counters)
    is_whole = (names[0], key) in state.registers and not _local(fixed, state.sizes[names[0]])
    return state.read(names, key) if is_whole else []


def _accumulate(state: RankState, result: Result, computed: list[Tensor], counters: Key, fixed: Fixed) -> None:
    """Combine a tile's results into the accumulators. The first results create them, contiguous."""
    names, monoid = result.outputs, MONOIDS[result.monoid]
    key = state.key(names[0], counters)
    sizes = [state.sizes[name] for name in names]
    local = _local(fixed, sizes[0])
    if (names[0], key) not in state.registers:
        new = [x.contiguous() for x in computed]
        if local:  # the accumulators have all local digits
            shapes = [[math.prod(size for _, size in dim) for dim in each] for each in sizes]
            neutral = monoid.values(len(names))
            new = [x.new_full(shape, value) for x, shape, value in zip(computed, shapes, neutral, strict=True)]
        state.count.hold(*new)
        state.registers |= {(name, key): x for name, x in zip(names, new, strict=True)}
        if not local:
            return
    blocks = state.read(result.outputs, key)
    total = [select(x, each, local) for x, each in zip(blocks, sizes, strict=True)]
    monoid.combine(total, [expand(x, each, local) for x, each in zip(computed, sizes, strict=True)])


def _local(fixed: Fixed, sizes: Sizes) -> dict[Piece, int]:
    pieces = {piece for dim in sizes for piece, _ in dim}
    return {piece: index for piece, index in fixed.items() if piece in pieces}
