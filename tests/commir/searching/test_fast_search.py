"""The shortcuts of a search change no result. Oracle: all plans, lowered."""

from contextlib import suppress

import pytest

from benchmarks.support.plans import all_plans
from commir import Axis, Mesh, Operand, Program, programs, search
from commir.ir.program import Result
from commir.lowering.operand_layouts import digits_of, digits_of_chunk
from commir.scheduling.loop_nest import IllegalSchedule
from commir.searching.candidates import Candidate, candidates
from commir.searching.search import _order


def pairs(program, mesh):
    """(candidate, plan) of all candidates."""
    return zip(candidates(program, mesh), all_plans(program, mesh), strict=True)


def chunks_of(candidate, program, mesh):
    """{axis: the plans of a candidate in 2, 3, ... chunks of it that are legal}, up to 64."""
    found = {}
    for axis in program.axes:
        for chunks in (n for n in range(2, 65) if axis.size % n == 0):
            with suppress(IllegalSchedule):
                plan = Candidate(candidate.parts, axis.name, chunks).schedule(program, mesh).lower()
                found.setdefault(axis.name, []).append(plan)
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(g=4), Mesh(g=6), Mesh(n=2, g=2)], ids=str)
def test_a_search_within_memory_finds_what_lowering_everything_does(mesh, backward):
    """Whole plans that fit and, of others, that with the fewest chunks of each axis that fits."""
    program = programs.attention(2, 2 * mesh.ranks, mesh.ranks, 16 * mesh.ranks, 16, backward=backward)
    every = [(plan, chunks_of(each, program, mesh)) for each, plan in pairs(program, mesh)]
    budgets = sorted(plan.memory for plan, _ in every)
    for budget in (budgets[0] * 4 // 5, budgets[len(budgets) // 4], budgets[-1]):
        fitting = []
        for plan, in_chunks in every:
            firsts = (next((each for each in plans if each.memory <= budget), None) for plans in in_chunks.values())
            fitting += [plan] if plan.memory <= budget else [each for each in firsts if each]
        expected = [plan.hash for plan in sorted(fitting, key=_order)[:8]]
        assert [plan.hash for plan in search(program, mesh, memory=budget)] == expected


def stored_by_outputs(ranks):
    """y[b, m, n], the sum over k of x[b, m, k] w[n, k], whose rows m are divided at home, and so are w's rows n."""
    axes = Axis("b", 16), Axis("m", ranks), Axis("n", 8 * ranks), Axis("k", 64 * ranks, "r")
    inputs = Operand("x", ("b", "m", "k"), "m"), Operand("w", ("n", "k"), "n")
    outputs = (Operand("y", ("b", "m", "n"), "m"),)
    return Program("linear", axes, inputs, outputs, (Result("sum", ("y",)),), "x[b, m, k] * w[n, k]", (), "float32")


@pytest.mark.parametrize("make", [stored_by_outputs, lambda ranks: programs.attention(2, ranks, ranks, 64, 8)])
@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.full)])
def test_more_chunks_hold_no_more(count, make):
    """Which a search within memory relies on."""
    program, mesh = make(count), Mesh(g=count)
    for candidate, _ in pairs(program, mesh):
        for plans in chunks_of(candidate, program, mesh).values():
            memory = [plan.memory for plan in plans]
            assert memory == sorted(memory, reverse=True), plans[0].schedule


def test_digits_are_found_once():
    (plan, *_) = search(programs.attention(2, 8, 8, 32, 8), Mesh(g=2), memory=40_000)
    assert plan.schedule.chunked and plan.digits is digits_of(plan.schedule)
    assert plan.of_one_chunk.digits is digits_of_chunk(plan.schedule) is digits_of(plan.of_one_chunk.schedule)
