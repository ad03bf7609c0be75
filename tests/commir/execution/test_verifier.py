"""Plans that the verifier accepts and rejects. Oracle: interpretation on independent inputs of twice the size."""

import random
from dataclasses import replace

import pytest

import commir
from benchmarks.support.plans import all_plans, corrupted, effect
from commir import In, Mesh, Out, Schedule, grid, programs, verify
from commir.execution.verifier import VerificationError, smallest
from commir.lowering.plan_steps import (
    AllReduce,
    Arrive,
    Combine,
    Compute,
    Place,
    ReduceScatter,
    Round,
    Send,
    SendPartial,
)
from commir.scheduling.placements import Placement, place
from loop_programs import HEADS, UP_TO_TWELVE, attention_cases, cases, mesh_of, plans, with_steps

MESHES = [(4,), (2, 2), (2, 3)]
LARGE = [(12,), (3, 4), (2, 2, 2), (2, 2, 3)]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", MESHES[:2])
def test_lowered_plans_pass(sizes, number):
    for plan in plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)):
        verify(plan)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", MESHES + LARGE)
def test_all_lowered_plans_on_up_to_twelve_ranks_pass(sizes, number):
    for plan in plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)):
        verify(plan)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(
    "sizes", [(2,), (2, 2), *(pytest.param(each, marks=pytest.mark.full) for each in ((6,), (2, 3)))]
)
def test_steps_do_not_depend_on_sizes(sizes, number):
    """A plan at other sizes has the steps that lowering the same schedule at those sizes gives."""
    mesh = mesh_of(*sizes)
    for plan in all_plans(cases(mesh.ranks)[number].program, mesh):
        small = smallest(plan, whole=1, inner=1)
        again = Schedule(small.program, small.mesh).apply(small.schedule.primitives()).lower()
        assert again.steps == plan.steps == small.steps


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("mesh", [*UP_TO_TWELVE, mesh_of(2, 2, 2)], ids=str)
def test_every_plan_that_a_search_can_emit_passes(mesh, number):
    """Without chunks; those are in test_chunks."""
    check_all_plans(cases(mesh.ranks)[number].program, mesh)


def check_all_plans(program, mesh, every=1):
    """Of the plans without chunks that a search can emit, each so many-th is verified."""
    found = all_plans(program, mesh)
    assert found
    for plan in found[::every]:
        verify(plan)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("sizes, heads", [((3,), (9, 3)), ((4,), (8, 1)), ((6,), (6, 2))])
def test_every_plan_of_few_key_value_heads_passes(sizes, heads, number):
    check_all_plans(attention_cases(mesh_of(*sizes).ranks, *heads)[number].program, mesh_of(*sizes))


@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mesh", UP_TO_TWELVE, ids=str)
def test_every_plan_of_few_key_value_heads_on_up_to_twelve_ranks_passes(mesh, heads, number):
    """All of them on up to six ranks, one in twelve on more."""
    check_all_plans(attention_cases(mesh.ranks, *heads)[number].program, mesh, every=1 if mesh.ranks <= 6 else 12)


def check_corruptions(chosen, count, seed=0):
    """Corrupt `count` of the plans; each corruption that has an effect is rejected.

    Returns how many raise an error when they run, and how many silently give other outputs.
    """
    generator, effects = random.Random(seed), []
    for _ in range(count):
        wrong = corrupted(generator.choice(chosen), generator)
        effects.append(effect(wrong))
        if effects[-1]:
            with pytest.raises(ValueError):
                verify(wrong)
    return effects.count("raises"), effects.count("differs")


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", MESHES)
def test_corruptions_are_rejected(sizes, number):
    assert sum(check_corruptions(plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)), 20)) > 5


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", MESHES + LARGE[:3])
def test_many_corruptions_are_rejected(sizes, number):
    chosen = plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes))
    raised, different = check_corruptions(chosen, 400, seed=1)
    assert raised > 100 and different >= 5


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("sizes", MESHES[:2])
def test_corruptions_of_plans_in_chunks_are_rejected(sizes, number, count):
    program = cases(mesh_of(*sizes).ranks)[number].program
    chosen = [plan for plan in all_plans(program, mesh_of(*sizes), with_chunks=True) if plan.schedule.chunked]
    assert sum(check_corruptions(chosen, count)) > count // 4


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", MESHES)
def test_corruptions_put_names_of_the_plan_in_place_of_others(sizes, number):
    """And each of these kinds is tried: a wrong operand, a wrong mesh axis, and what another step has in the field."""
    chosen, generator = plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)), random.Random(0)
    found, known = set(), {"unknown"}
    for _ in range(200):
        plan = generator.choice(chosen)
        wrong = corrupted(plan, generator)
        known |= {*plan.mesh.names, *(each.name for each in (*plan.program.operands, *plan.program.internal))}
        found |= names_in([vars(step) for step in wrong.steps])
    assert found <= known and ("unknown" in found) == (len(sizes) == 1)


def names_in(value):
    """The strings in the fields of steps."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {name for each in inner for name in names_in(each)}


def test_errors_name_the_first_wrong_element():
    (plan,) = [plan for plan in plans(cases(2)[5].program, mesh_of(2)) if "rows shifted" in str(plan.schedule)]
    steps = [step for step in plan.steps if type(step).__name__ != "Combine"]
    with pytest.raises(ValueError, match=r"weighted_sum on Mesh\(x=2\).*c\[0\] combines the block at cols 1 0 times"):
        verify(with_steps(plan, steps))


def ring(size):
    """A weighted sum on a ring, in which the blocks of the vector b travel."""
    program = programs.weighted_sum(2 * size, 2 * size, dtype="float64")
    return place(Schedule(program, Mesh(x=size)), x=Placement("rows", True)).lower()


def changed_step(plan, step, *others):
    """The plan with other steps in place of one."""
    number = plan.steps.index(step)
    return with_steps(plan, [*plan.steps[:number], *others, *plan.steps[number + 1 :]])


def refutation(plan):
    """The message of `verify` for a wrong plan."""
    with pytest.raises(VerificationError) as caught:
        verify(plan)
    return str(caught.value)


@pytest.mark.parametrize("size", [3, 4])
def test_errors_name_the_first_wrong_element_that_a_tile_reads(size):
    """Each rank passes its own block on twice, so that the next rank's arrives again instead of the one after it."""
    hop = Send(("b",), "x", (1,), (2,))
    plan = changed_step(ring(size), hop, replace(hop, source=(0,)))
    where = f"rank 0, steps[{plan.steps.index(Compute((2,)))}], Compute(counters=(2,))"
    wrong = f"the tile at rows 0, cols 2 reads b[1] instead of b[2], at {dict(rows=size, cols=size)}"
    assert refutation(plan) == f"{plan.schedule}: {where}: {wrong}"


@pytest.mark.parametrize("size", [3, 4])
def test_errors_name_the_step_that_cannot_be_taken(size):
    """The first that needs a block which has not arrived."""
    plan, hop = changed_step(ring(size), Arrive(("b",), (1,))), Send(("b",), "x", (1,), (2,))
    where = f"rank 0, steps[{plan.steps.index(hop)}], {hop}"
    assert refutation(plan) == f"{plan.schedule}: the steps do not fit together: {where}: KeyError: ('b', (1,))"


def rounded_plans():
    """Plans in bf16 that combine partial results by a reduce-scatter, an all-reduce, and messages during the loops."""
    product, mesh = programs.matmul_reduce_scatter(8, 8, 8, "bfloat16"), Mesh(x=4)
    decoding = programs.decode_attention(1, 4, 2, 16, 4, dtype="bfloat16")
    return [
        place(Schedule(product, mesh), x="inner").lower(),
        place(Schedule(decoding, mesh), x="kv").lower(),
        place(Schedule(product, mesh), x=Placement("inner", True)).lower(),
        place(Schedule(programs.attention(1, 4, 4, 16, 4, backward=True, dtype="bfloat16"), mesh), x="q").lower(),
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_result_is_rounded_after_its_partial_results_are_combined(number):
    """float64 does not change when it is rounded, so the numbers of these plans are right."""
    plan = rounded_plans()[number]
    verify(plan)
    for step in plan.steps:
        if isinstance(step, SendPartial | Combine | ReduceScatter | AllReduce):
            steps = [each for each in plan.steps if each != Round(step.result)]
            steps.insert(steps.index(step), Round(step.result))
            with pytest.raises(
                VerificationError, match="must be rounded exactly once, after the last step that combines"
            ):
                verify(with_steps(plan, steps))


@pytest.mark.parametrize("rounds", [(), (Round(0), Round(0))])
def test_a_result_is_rounded_once(rounds):
    plan = rounded_plans()[0]
    steps = [each for step in plan.steps for each in (rounds if isinstance(step, Round) else (step,))]
    with pytest.raises(VerificationError, match="c must be rounded exactly once"):
        verify(with_steps(plan, steps))


@pytest.mark.parametrize("result", [-1, 1])
def test_steps_name_results_that_exist(result):
    plan = rounded_plans()[0]
    steps = [replace(step, result=result) if isinstance(step, ReduceScatter) else step for step in plan.steps]
    with pytest.raises(VerificationError, match="names a result that matmul_reduce_scatter does not have"):
        verify(with_steps(plan, steps))


@commir.operator
def scaled(points0=8, points=2, k=4):
    x = In[points0, points]
    y = In[k]
    c = Out[points0, points]
    for points0, points, k in grid("ssr"):
        c[points0, points] += x[points0, points] * y[k]


def test_axes_may_have_any_name():
    for plan in plans(scaled(), mesh_of(2)):
        verify(plan)


@pytest.mark.parametrize("place_of_a", [None, Place(0, 0), Place(0, None), Place("x", 1)])
def test_steps_with_values_of_another_kind_are_refuted(place_of_a):
    plan = rounded_plans()[0]
    steps = [
        replace(step, moves=((step.moves[0][0], place_of_a),)) if isinstance(step, ReduceScatter) else step
        for step in plan.steps
    ]
    with pytest.raises(VerificationError, match="the steps do not fit together"):
        verify(with_steps(plan, steps))
