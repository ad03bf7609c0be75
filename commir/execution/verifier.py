"""`verify`: prove and test a plan before it runs.

- Rounding: each result is rounded once at its end, after the last step that combines partial results of it. (On their way,
  partial results are rounded to the program's dtype too, unless the output has `has_wide_partials`.)
- Coverage, except of scans: with one element per innermost digit, a tile reads the right block of every input, and every
  output element at home combines each point of the loops that it is reduced over exactly once.
- Numbers: in float64, with small sizes and random inputs, the outputs equal those of the unscheduled program. Programs with
  a causal mask are tested with and without it, because a mask hides errors in what it leaves out.

The last two take the plan's own steps at other sizes, because steps depend on digits and not on sizes. They compute in
float64, where rounding changes nothing.
"""

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from commir.ir.program import SCANNED, WHOLE, Axis, Operand, Program, Result
from commir.lowering.operand_layouts import block_sizes
from commir.lowering.plan import Plan, check_plan
from commir.lowering.plan_steps import AllReduce, Combine, Compute, ReduceScatter, Round, SendPartial, Step
from commir.lowering.plan_text import one_line
from commir.programs.scan_programs import with_lasting_states
from commir.programs.tiles import derive, tile_of

from .interpreter import StepFailed, run_ranks
from .state import Kernels

Tensor = torch.Tensor
TOLERANCE = 1e-13  # relative to the largest element, and at least absolute
REDUCING = SendPartial | Combine | ReduceScatter | AllReduce
LARGEST_INNER = 64  # innermost digits are tried up to this size


class VerificationError(ValueError):
    """A plan does not compute its program.

    The message names the schedule and the first error found: a wrong element of an output; a wrong element that a tile
    reads, with the rank, the step and the tile's place in the loops; a step that a rank cannot take; or messages that do not
    match.
    """


Refuted = VerificationError  # an alias


def verify(plan: Plan, seed: int = 0) -> None:
    """Check a plan, and return if it is right.

    Runs in one process, on small tensors; the time grows with the number of ranks and steps, not with the plan's sizes.

    Args:
        plan: the plan.
        seed: of the random inputs.

    Raises:
        VerificationError: the plan is wrong.
    """
    check_plan(plan)
    try:
        _check_rounding(plan)
        _check_blocks(plan)
        if plan.program.scan is None:  # of a scan, the numbers alone tell whether the order is right
            _check_coverage(plan)
        for options in [{"causal": True}, {"causal": False}] if "causal" in dict(plan.program.options) else [{}]:
            _check_numbers(plan.with_options(**options), seed)
    except (VerificationError, MemoryError, torch.OutOfMemoryError):
        raise
    except StepFailed as error:
        if isinstance(error.__cause__, VerificationError):  # by a tile
            raise VerificationError(f"{plan.schedule}: {error.place}: {error.__cause__}") from error
        raise VerificationError(f"{plan.schedule}: the steps do not fit together: {error}") from error
    except Exception as error:  # steps that no lowering made may raise anything
        raise VerificationError(f"{plan.schedule}: the steps do not fit together: {one_line(error)}") from error


def unscheduled(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a program on one rank, as a single tile in plain operations, which every plan of it must compute."""
    known = dict(inputs)
    for operand in program.inputs:
        if operand.source:
            known[operand.name] = derive(program, operand.name, [known[name] for name in operand.source])
    if program.scan is not None:
        program = program.resized(**{program.scan.blocks: 1})
    indices = {axis.name: torch.arange(axis.size) for axis in program.axes if axis.kind != WHOLE}
    return tile_of(program, "reference")(program, known, indices)


def smallest(plan: Plan, whole: int, inner: int) -> Plan:
    """The plan at the smallest sizes that its digits divide, if possible with `inner` elements per innermost digit.

    A scanned axis has twice as many, so that each of two blocks of a rank has several.
    """
    blocks = None if plan.program.scan is None else plan.program.scan.blocks
    wholes = [axis for axis in plan.program.axes if axis.kind == WHOLE and axis.name != blocks]
    sizes = {axis.name: min(whole, axis.size) for axis in wholes}
    for axis in dict.fromkeys(digit.axis for digit in plan.schedule.digits):
        is_scanned = plan.program.axis(axis).kind == SCANNED
        sizes[axis] = _smallest_size(plan, axis, 2 * inner if is_scanned else inner)
    return plan.at(**sizes)


def _smallest_size(plan: Plan, axis: str, inner: int) -> int:
    """The smallest size of an axis with at least `inner` elements per innermost digit, or else its own size."""
    *outer, last = plan.digits.sizes[axis]
    for size in (*range(inner, LARGEST_INNER), *range(1, inner)):
        with suppress(ValueError):  # the size does not divide
            return plan.at(**{axis: math.prod(outer) * size}).program.axis(axis).size
    return math.prod(outer) * last


def _check_rounding(plan: Plan) -> None:
    """Each result must have one `Round`, after all steps that combine partial results of it."""
    results = plan.program.results
    for step in plan.steps:
        if isinstance(step, REDUCING | Round) and step.result not in range(len(results)):
            raise VerificationError(f"{plan.schedule}: {step} names a result that {plan.program.name} does not have")
    for number, result in enumerate(results):
        rounds = [index for index, step in enumerate(plan.steps) if step == Round(number)]
        last = max((index for index, step in enumerate(plan.steps) if _combines(step, number)), default=-1)
        if len(rounds) != 1 or rounds[0] < last:
            raise VerificationError(
                f"{plan.schedule}: {', '.join(result.outputs)} must be rounded exactly once, after the last step that "
                f"combines partial results, which is step {last}; it is rounded at {rounds}"
            )


def _combines(step: Step, result: int) -> bool:
    return isinstance(step, Compute) or (isinstance(step, REDUCING) and step.result == result)


def _check_blocks(plan: Plan) -> None:
    """A scan's states must pass among as many blocks as the schedule divides its axis into."""
    scan, expected = plan.program.scan, math.prod(block_sizes(plan.schedule))
    if scan is not None and plan.program.axis(scan.blocks).size != expected:
        size = plan.program.axis(scan.blocks).size
        raise VerificationError(
            f"{plan.schedule}: axis {scan.blocks} has size {size}, but {scan.axis} has {expected} blocks"
        )


def _check_numbers(plan: Plan, seed: int) -> None:
    small = smallest(plan, whole=4, inner=2)
    inputs, expected = _inputs_and_outputs(small, seed)
    outputs = small.unshard(run_ranks(small, small.shard_all(inputs)))
    for name, x in outputs.items():
        limit = TOLERANCE * _scale(expected[name])
        is_nan = x.isnan() & expected[name].isnan()
        wrong = ~((x - expected[name]).abs() <= limit) & ~(x == expected[name]) & ~is_nan
        if wrong.any():
            where = tuple(int(index) for index in wrong.nonzero()[0])
            mask = "".join(f" ({option} = {value})" for option, value in small.program.options if option == "causal")
            raise VerificationError(
                f"{plan.schedule}: {name}{list(where)} is {float(x[where]):.6g} and should be "
                f"{float(expected[name][where]):.6g}, at {dict((a.name, a.size) for a in small.program.axes)}{mask}"
            )


def _inputs_and_outputs(plan: Plan, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random inputs and their outputs. Inputs are normal, or positive if the outputs were NaN, as logarithms are.

    The states of a scan do not grow, because then only the fastest-growing heads would be compared; and they last, so that
    the contribution of the first block is seen in the last one.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {operand.name: plan.program.shape(operand) for operand in plan.inputs()}
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    if plan.program.scan is not None:
        inputs = with_lasting_states(plan.program, inputs)
    outputs = unscheduled(plan.program, inputs)
    if any(x.isnan().any() for x in outputs.values()):
        inputs = {name: x.abs() + 0.5 for name, x in inputs.items()}
        outputs = unscheduled(plan.program, inputs)
    return inputs, outputs


def _scale(x: Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def _check_coverage(plan: Plan) -> None:
    small = smallest(plan, whole=1, inner=1)
    program, points = _counting_program(small.program)
    counting = replace(small, schedule=replace(small.schedule, program=program))
    shapes = {operand.name: program.shape(operand) for operand in program.inputs}
    names = {x: torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) for x, shape in shapes.items()}
    inputs = {operand.name: names[operand.name] for operand in counting.inputs()}
    kernels = Kernels(_CountingTile(names, points), lambda _, operand, sources: sources[0].squeeze(-1))
    counted = counting.unshard(run_ranks(counting, counting.shard_all(inputs), kernels=kernels))
    for result in program.results:
        for name in result.outputs:
            if (wrong := (counted[name] != 1).nonzero()).numel():
                *element, point = (int(index) for index in wrong[0])
                times = int(counted[name][tuple(wrong[0])])
                at = ", ".join(f"{a} {i}" for a, i in points.coordinates(program.result_of(name), point).items())
                raise VerificationError(
                    f"{plan.schedule}: {name}{element} combines the block at {at or 'its place'} {times} times, not once"
                )


class _Points:
    """The points of the loops over which each result is reduced, numbered."""

    def __init__(self, program: Program) -> None:
        self._axes = {r.outputs: {a: program.axis(a).size for a in program.reduced_axes(r)} for r in program.results}

    def count(self, result: Result) -> int:
        return math.prod(self._axes[result.outputs].values())

    def coordinates(self, result: Result, point: int) -> dict[str, int]:
        sizes = self._axes[result.outputs]
        return dict(zip(sizes, list(itertools.product(*map(range, sizes.values())))[point], strict=True))

    def mask(self, result: Result, indices: Mapping[str, Tensor]) -> Tensor:
        """(count,): 1 for the points of a tile with these indices, 0 for others."""
        sizes = self._axes[result.outputs]
        if not sizes:
            return torch.ones(1, dtype=torch.float64)
        mask = torch.zeros(list(sizes.values()), dtype=torch.float64)
        mask[torch.meshgrid(*(indices[axis] for axis in sizes), indexing="ij")] = 1
        return mask.reshape(-1)


class _CountingTile:
    """A tile that checks its input blocks, and contributes 1 for each point of its loops."""

    def __init__(self, names: Mapping[str, Tensor], points: _Points) -> None:
        self._names, self._points = names, points

    def __call__(
        self, program: Program, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        counts = {}
        for name, x in inputs.items():
            operand, expected = program.operand(name), self._names[name]
            for dim, axis in enumerate(operand.axes):
                if axis in indices:
                    expected = expected.index_select(dim, _elements(operand, axis, indices[axis]))
            if x.shape != expected.shape or not torch.equal(x, expected):
                sizes = {axis: program.axis(axis).size for axis in indices}
                what = self._difference(name, x, expected)
                raise VerificationError(f"the tile at {_place_in_loops(indices)} reads {what}, at {sizes}")
        for result in program.results:
            mask = self._points.mask(result, indices)
            for name in result.outputs:
                operand = program.operand(name)
                axes = operand.axes[:-1]
                shape = [len(_elements(operand, axis, indices[axis])) if axis in indices else 1 for axis in axes]
                counts[name] = mask.expand(*shape, len(mask)).clone()
        return counts

    def _difference(self, name: str, x: Tensor, expected: Tensor) -> str:
        """Describe how a tile's block of an input differs from the right one, in the first element."""
        if x.shape != expected.shape:
            return f"{name} of shape {tuple(x.shape)} instead of {tuple(expected.shape)}"
        first = tuple(int(index) for index in (x != expected).nonzero()[0])
        return " instead of ".join(self._element(name, float(each[first])) for each in (x, expected))

    def _element(self, name: str, number: float) -> str:
        """The element of an operand that has this number, as name[index]."""
        places = (self._names[name] == number).nonzero()
        return f"{name}{places[0].tolist()}" if len(places) else f"no element of {name}"


def _place_in_loops(indices: Mapping[str, Tensor]) -> str:
    """The indices of a tile in words: heads 0 to 3, q 2, kv [0, 5]."""
    words = []
    for axis, each in indices.items():
        first, last = int(each[0]), int(each[-1])
        is_range = last > first and each.tolist() == list(range(first, last + 1))
        words.append(f"{axis} {first} to {last}" if is_range else f"{axis} {each.tolist() if len(each) > 1 else first}")
    return ", ".join(words)


def _elements(operand: Operand, axis: str, indices: Tensor) -> Tensor:
    """The elements along an operand's dimension that serve these indices of an axis."""
    return indices[:: operand.divisor(axis)] // operand.divisor(axis)


def _counting_program(program: Program) -> tuple[Program, _Points]:
    """Extend each output by a dimension that counts, by sums, how often each point was combined into it."""
    points, prefix = _Points(program), "points"
    while any(axis.name.startswith(prefix) for axis in program.axes):
        prefix += "_"
    extra = tuple(Axis(f"{prefix}{n}", points.count(result), WHOLE) for n, result in enumerate(program.results))
    counting = {name: axis.name for axis, result in zip(extra, program.results, strict=True) for name in result.outputs}
    outputs = tuple(replace(operand, axes=(*operand.axes, counting[operand.name])) for operand in program.outputs)
    results = tuple(replace(result, monoid="sum") for result in program.results)
    return replace(program, axes=(*program.axes, *extra), outputs=outputs, results=results), points
