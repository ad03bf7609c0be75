"""`search`: the best plans of a program on a mesh (paper, section 6). It is exhaustive and deterministic, and runs
nothing.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

from commir.execution.verifier import verify
from commir.ir.mesh import Mesh
from commir.ir.program import Program
from commir.lowering.operand_layouts import check_homes
from commir.lowering.plan import Plan
from commir.scheduling.known_schedules import known_as
from commir.scheduling.loop_nest import IllegalSchedule, LoopNest

from .candidates import MOST_CHUNKS, Candidate, candidates
from .cost import CostModel

TOP = 8  # plans that are returned
NEGLIGIBLE = 2e-8  # relative tolerance: times that differ by less may be equal after rounding
# The reasons for which a plan comes before another that is as fast, in the order in which they are compared.
TIES = (
    "sends fewer bytes",
    "divides the mesh into fewer axes",
    "is a known schedule",
    "sends fewer messages",
    "holds less memory",
    "comes first in the order of their texts",
)


def search(
    program: Program, mesh: Mesh, fabric: Any = None, memory: int | None = None, top: int = TOP,
    point_seconds: float = 0.0, call_seconds: float = 0.0, overlap: float = 1.0, verified: int = 0,
) -> list[Plan]:  # fmt: skip
    """Find the `top` fastest plans by predicted time, the best first.

    Every candidate is considered: each way to divide the levels of the mesh into at most three parts (four if it has several
    levels or the program more than three loops; one part per level of a deeper mesh), and each placement of the parts. Every
    plan begins and ends with the operands in their home layout, so the cost of any other layout is counted. Equally fast
    plans are sorted by bytes sent, number of mesh axes, known schedules before others, messages, memory, and text. The same
    arguments give the same plans on every rank and in every process.

    All ranks are predicted to compute equally long. Under a causal mask in contiguous order they do not: the last of P ranks
    that share the queries computes 2 - 1/P times the mean. In zigzag order, the default, they do.

    Args:
        program: the program.
        mesh: the ranks, with the speeds of its levels.
        fabric: a `commfabric.Fabric` with the speed of mesh axes for which `mesh` has none. If neither gives one, all mesh
            axes are assumed equally fast.
        memory: the most bytes that a rank may hold (`Plan.memory`). Candidates that hold more are also tried in chunks
            (`LoopNest.chunk`). The limit covers these plans only: `differentiable` also runs the plan of the backward pass,
            which may hold more than twice as much.
        top: the number of plans.
        point_seconds, call_seconds: the predicted time of a tile is call_seconds + point_seconds * points of the tile (the
            product of all its axes, head_dim included; half of it under a causal mask; see `Program.points`). `measure_tile`
            measures both. With 0, only messages are counted.
        overlap: the fraction of min(tile time, time of concurrent messages) that is hidden: 1 all, 0 none, negative if the
            two slow each other down. `measure_overlap` measures it.
        verified: how many of the best plans `verify` checks before they are returned, which takes longer than the search.

    Raises:
        ValueError: the ranks do not divide the axis along which an operand is kept, no placement divides the program's
            sizes, no plan fits into memory, top is below 1, a time is negative, or overlap is above 1.
        VerificationError: a verified plan is wrong.
    """
    if top < 1:
        raise ValueError(f"top={top}: expected at least 1")
    check_homes_divide(program, mesh)
    if fabric is not None:
        mesh = mesh.with_speeds({axis.level: fabric for axis in mesh.axes}).with_speeds(mesh.speeds)
    model = CostModel(program, mesh, point_seconds, call_seconds, overlap)
    if memory is not None and memory < model.kept:
        raise ValueError(
            f"memory={memory}: every plan of {program.name} on {mesh!r} holds at least {model.kept} bytes, its inputs and "
            "outputs at home, and more for its tiles"
        )
    chosen = list(candidates(program, mesh))
    best = _exact(model, chosen, memory, top + 1)  # one more, with which the best is compared
    if not best:
        raise ValueError(_refusal(model, sorted(chosen, key=model.cost), memory))
    for plan in best[: min(top, verified)]:
        verify(plan)
    return [replace(plan, reason=_reason(best, number)) for number, plan in enumerate(best[:top])]


def pareto(
    program: Program, mesh: Mesh, point_seconds: float = 0.0, call_seconds: float = 0.0, overlap: float = 1.0
) -> list[Plan]:
    """The Pareto front of predicted time and memory, the fastest first.

    Plans in chunks are among them. Each holds less memory than all faster ones. Arguments and errors as in `search`.
    """
    check_homes_divide(program, mesh)
    model = CostModel(program, mesh, point_seconds, call_seconds, overlap)
    bounds: list[tuple[float, float, Candidate]] = []  # lower bounds of seconds and memory
    for candidate in candidates(program, mesh):
        held = model.held(candidate)
        bounds.append((model.cost(candidate).seconds, model.memory(held), candidate))
        for each in candidate.in_chunks(program):
            memory = model.memory_in_chunks(held, each.chunked, each.chunks)
            bounds.append((model.seconds_in_chunks(each), memory, each))
    plans: list[Plan] = []
    for seconds, memory, candidate in sorted(bounds, key=lambda each: each[:2]):
        if not any(seconds > plan.seconds * (1 + NEGLIGIBLE) and memory >= plan.memory for plan in plans):
            plans += _lowered(model, [candidate])
    if not plans:
        raise ValueError(_does_not_divide(program, mesh))
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda each: (rounded(each.seconds), each.memory, *_order(each))):
        if not front or plan.memory < front[-1].memory:
            front.append(plan)
    return [replace(plan, reason="no other plan is as fast and holds as little") for plan in front]


def _exact(model: CostModel, chosen: Sequence[Candidate], memory: int | None, top: int) -> list[Plan]:
    """The best plans of some candidates by exact time. They are tried in the order of a lower bound of it."""
    least = [model.cost(candidate).seconds for candidate in chosen]
    best: list[tuple[tuple[Any, ...], Plan]] = []
    for number in sorted(range(len(chosen)), key=least.__getitem__):
        slowest = best[top - 1][1].seconds * (1 + NEGLIGIBLE) if len(best) >= top else math.inf
        if least[number] > slowest:
            break
        if fitting := _fitting(model, chosen[number], memory, slowest):
            best += [(_order(plan), plan) for plan in fitting]
            best = sorted(best, key=lambda each: each[0])[:top]
    return [plan for _, plan in best]


def _fitting(model: CostModel, candidate: Candidate, memory: int | None, slowest: float) -> list[Plan]:
    """The plan of a candidate if it fits into the memory, otherwise, for each axis that can be chunked, the plan with the
    fewest chunks that fits.

    Numbers of chunks that take longer than `slowest` are left out, and so are all larger numbers, which take longer still.
    """
    if memory is None:
        return _lowered(model, [candidate])
    held, fitting = model.held(candidate), list[Plan]()
    if model.memory(held) <= memory:
        if whole := [plan for plan in _lowered(model, [candidate]) if plan.memory <= memory]:
            return whole
    for axis, chunked in groupby(candidate.in_chunks(model.program), lambda each: each.chunked):
        tried = [each for each in chunked if model.memory_in_chunks(held, axis, each.chunks) <= memory]
        tried = list(takewhile(lambda each: model.seconds_in_chunks(each) <= slowest, tried))
        # The most chunks hold the least memory: if they do not fit, fewer chunks need not be lowered.
        most = next((plan for each in reversed(tried) for plan in _lowered(model, [each])), None)
        if most is not None and most.memory <= memory:
            fitting.append(next(x for each in tried for x in _lowered(model, [each]) if x.memory <= memory))
    return fitting


def _lowered(model: CostModel, chosen: Iterable[Candidate]) -> list[Plan]:
    """The plans of candidates. Candidates that turn out to be illegal are left out."""
    plans = []
    for candidate in chosen:
        with suppress(IllegalSchedule):
            plan = candidate.schedule(model.program, model.mesh).lower()
            plans.append(replace(plan, tile_seconds=model.tile_seconds(candidate), overlap=model.overlap))
    return plans


def _order(plan: Plan) -> tuple[Any, ...]:
    """The key by which plans are sorted; TIES describes each element after the first."""
    parts, is_unknown = len(plan.mesh.axes), not known_as(plan.schedule)
    return rounded(plan.seconds), plan.bytes_per_rank, parts, is_unknown, plan.messages, plan.memory, str(plan.schedule)


def rounded(seconds: float) -> float:
    """A time without differences of rounding, so that equal plans compare equal."""
    return float(f"{seconds:.9g}")


def _refusal(model: CostModel, chosen: Iterable[Candidate], memory: int | None) -> str:
    """The words that say why none of these candidates has a plan.

    Candidates are lowered in the order of their lower bound of memory, until no bound is below the least memory found.
    """
    program, mesh = model.program, model.mesh
    bounds: list[tuple[float, int, list[Candidate]]] = []
    for candidate in chosen:
        held = model.held(candidate)
        bounds.append((model.memory(held), len(bounds), [candidate]))
        for axis, chunked in groupby(candidate.in_chunks(program), lambda each: each.chunked):
            most_first = list(chunked)[::-1]
            bounds.append((model.memory_in_chunks(held, axis, most_first[0].chunks), len(bounds), most_first))
    least: Plan | None = None
    for bound, _, most_first in sorted(bounds, key=lambda each: each[:2]):
        if least is not None and bound >= least.memory:
            break
        plan = next((plan for each in most_first for plan in _lowered(model, [each])), None)
        if plan is not None and (least is None or plan.memory < least.memory):
            least = plan
    if least is None:
        return _does_not_divide(program, mesh)
    return (
        f"memory={memory}: no plan of {program.name} on {mesh!r}, in at most {MOST_CHUNKS} chunks, holds less than "
        f"{least.memory} bytes ({least.schedule})"
    )


def check_homes_divide(program: Program, mesh: Mesh) -> None:
    """Raise ValueError if the home layout of an operand does not divide over the mesh; then there is no plan at all."""
    try:
        check_homes(LoopNest(program, mesh))
    except IllegalSchedule as error:
        raise ValueError(f"no plan of {program.name} on {mesh!r}: {error}") from None


def _does_not_divide(program: Program, mesh: Mesh) -> str:
    sizes = ", ".join(f"{axis.name} {axis.size}" for axis in program.axes)
    return f"no placement of {program.name} divides its sizes ({sizes}) over {mesh!r}"


def _reason(plans: list[Plan], number: int) -> str:
    if number:
        more = longer(plans[number].seconds, plans[0].seconds)
        return f"number {number + 1} of the search; by prediction it takes {more} the best"
    if len(plans) == 1:
        is_chunked = plans[0].schedule.chunked is not None
        return "the only placement that fits" + ", in the fewest chunks that do" * is_chunked
    best, other = plans[:2]
    first, *ties = (a != b for a, b in zip(_order(best), _order(other), strict=True))
    if first:
        return f"fastest by prediction; the next takes {longer(other.seconds, best.seconds)} this: {other.schedule}"
    return f"as fast by prediction as the next, but {TIES[ties.index(True)]}; the next is {other.schedule}"


def longer(seconds: float, best: float) -> str:
    """Say how much longer a time is than the best one, which may be 0. As a percentage below 2 times, else as a factor."""
    if rounded(seconds) == rounded(best):
        return "as long as"
    if not best:
        return f"{seconds:.3g} s longer than"
    times = seconds / best
    if times < 2:
        return f"{100 * (times - 1):.3g} % longer than"
    return f"{times:.3g} times as long as" if times < 100 else f"{times:,.0f} times as long as"
