"""The steps of a schedule, by the rules for each operand and mesh axis.

| before | needed | message |
|---|---|---|
| a digit on the axis | the same | none; if the loop over it is shifted, a ring |
| a digit on the axis | local | all-gather |
| a digit on the axis | another digit | all-to-all |
| whole | a digit on the axis | none: a slice |
| partial results | whole | all-reduce |
| summaries of blocks | entering states | all-gather of summaries, or an all-to-all to heads and one back (`scan_messages`) |
| partial results | a digit on the axis | reduce-scatter; if the loop over it is shifted, they travel during the loop |
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile

from commir.ir.program import Result
from commir.scheduling.loop_nest import IllegalSchedule, LoopNest

from .operand_layouts import Digits, Layout, conversions, digits_of, digits_of_chunk
from .plan_steps import AllReduce, Derive, Free, Gather, ReduceScatter, Round, Step, Swap
from .scan_messages import scan_steps
from .unrolled_loops import loops_of, travelling, unrolled


def steps_of_schedule(nest: LoopNest) -> Iterator[Step]:
    """The steps of a schedule, or of one of its chunks.

    Raises IllegalSchedule if a mesh axis has no digit, or the cuts of an axis do not fit.
    """
    _check_parallel(nest)
    digits_of(nest)  # also raises IllegalSchedule for cuts that a chunk does not have
    yield from steps_of(digits_of_chunk(nest))


def steps_of(digits: Digits) -> Iterator[Step]:
    """All steps of a plan: bring inputs to where they are needed, run the loops, bring outputs home."""
    program, loops = digits.nest.program, loops_of(digits)
    yield from _fetch_inputs(digits)
    yield from scan_steps(digits)
    yield from unrolled(digits, loops)
    for operand in program.inputs:
        yield Free((operand.name,), (0,) * len(travelling(digits, loops, operand)))
    homeward = []
    for number, result in enumerate(program.results):
        steps, layout = _reductions(digits, number, result)
        yield from steps
        yield Round(number)
        for name in result.outputs:
            output = program.operand(name)
            homeward.append([step for step, _ in conversions(digits, output, layout, digits.home(output))])
    yield from merged(homeward)


def _fetch_inputs(digits: Digits) -> Iterator[Step]:
    """Bring inputs to where the loops need them. Inputs are derived before their sources are gathered."""
    program = digits.nest.program
    scattered: dict[str, Layout] = {}
    early, late = [], []
    for operand in program.inputs:
        have = scattered[operand.source[0]] if operand.source else digits.home(operand)
        if other := next((name for name in operand.source if scattered[name] != have), None):
            raise IllegalSchedule(
                f"{operand.name} is derived from {operand.source[0]} and {other}, which are kept differently"
            )
        chain = list(conversions(digits, operand, have, digits.needed(operand)))
        moves = list(takewhile(lambda each: not isinstance(each[0], Gather), chain))
        scattered[operand.name] = moves[-1][1] if moves else have
        early.append([step for step, _ in moves])
        late.append([step for step, _ in chain[len(moves) :]] if operand.in_tile else [])
    yield from merged(early)
    yield from (Derive(operand.name) for operand in program.inputs if operand.source)
    yield from merged(late)


def _reductions(digits: Digits, number: int, result: Result) -> tuple[list[Step], Layout]:
    """The steps that combine the partial results of a result after the loops, and the layout of its outputs then.

    The innermost mesh axis, whose links are the fastest, reduces first, while the partial results are largest.
    """
    nest, program = digits.nest, digits.nest.program
    outputs = [program.operand(name) for name in result.outputs]
    layout, home, steps = digits.needed(outputs[0]), digits.home(outputs[0]), list[Step]()
    for mesh_axis in reversed(nest.mesh.names):
        digit = nest.digit_on(mesh_axis)
        if digit is None or digit.size == 1 or digit.axis in outputs[0].axes or mesh_axis in layout:
            continue
        wanted = home.get(mesh_axis)
        if wanted is None or wanted in layout.values():
            steps.append(AllReduce(mesh_axis, number))
            continue
        moves = tuple((output.name, digits.place(output, wanted, layout)) for output in outputs)
        steps.append(ReduceScatter(mesh_axis, number, moves))
        layout = {**layout, mesh_axis: wanted}
    return steps, layout


def merged(chains: Iterable[list[Step]]) -> Iterator[Step]:
    """Join the steps of several operands: those of the same kind along the same mesh axis become one step."""
    chains = [list(chain) for chain in chains]
    while any(chains):
        first = next(chain[0] for chain in chains if chain)
        same = [chain.pop(0) for chain in chains if chain and _is_same_message(chain[0], first)]
        if isinstance(first, Swap):
            yield replace(first, operands=sum((step.operands for step in same if isinstance(step, Swap)), ()))
        else:
            yield replace(first, moves=sum((step.moves for step in same), ()))  # type: ignore[union-attr, arg-type]


def _is_same_message(one: Step, other: Step) -> bool:
    if isinstance(one, Swap) and isinstance(other, Swap):
        return one.axes == other.axes
    return type(one) is type(other) and one.axis == other.axis  # type: ignore[union-attr]


def _check_parallel(nest: LoopNest) -> None:
    for mesh_axis in nest.mesh.axes:
        if mesh_axis.size > 1 and nest.digit_on(mesh_axis.name) is None:
            rule = f"no digit is parallelized on mesh axis {mesh_axis.name}"
            raise IllegalSchedule(f"{rule}, so its ranks would repeat the same work")
