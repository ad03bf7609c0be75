"""Which schedules have the name of a known one. Oracle: the schedules that the library makes by name, and their bytes."""

import itertools
from dataclasses import replace

import pytest

from commir import (
    In,
    Mesh,
    Out,
    Placement,
    Schedule,
    best_grid,
    grid,
    known,
    known_schedules,
    operator,
    place,
    programs,
)
from commir.execution.gradient import backward_plan
from commir.lowering.plan_steps import Send, SendPartial
from commir.programs.attention_programs import SAVED
from commir.scheduling.known_schedules import ATTENTION, DECODING, known_as
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import in_chunks
from commir.searching.grids import leaving_lse

SPEEDS = {"a": (1e-5, 1e9)}
# For each number of parts of a schedule, meshes; the axes of some are parts of one level.
MESHES = {
    1: [Mesh(a=4), Mesh(a=8), Mesh(a=2, speeds=SPEEDS)],
    2: [Mesh(a=2, b=2), Mesh(a=2, b=4, speeds=SPEEDS), Mesh(a=4).split("a", x=2, y=2), Mesh(a=4, b=2)],
    3: [Mesh(a=2, b=2, c=2), Mesh(a=8).split("a", x=2, y=2, z=2), Mesh(a=2, b=3, c=2)],
}
PROGRAMS = {
    "forward": programs.attention(1, 48, seq=96, head_dim=8),
    "few key/value heads": programs.attention(2, 24, 8, 96, 8, causal=False),
    "in contiguous order": programs.attention(2, 24, 24, 96, 8, order="contiguous"),
    "backward": programs.attention(2, 24, 24, 96, 8, backward=True),
    "more keys than queries": programs.attention(2, 24, 24, 96, 8, causal=False).resized(kv=192),
    "decoding": programs.decode_attention(2, 24, 8, 96, 8),
    "decoding of several queries": programs.decode_attention(2, 24, 24, 96, 8, queries=24),
    "first product": programs.all_gather_matmul(96, 96, 96),
    "second product": programs.matmul_reduce_scatter(96, 96, 96),
}
ALL_KNOWN = [(which, name) for which, program in PROGRAMS.items() for name in known_schedules(program)]
FORWARD = programs.attention(1, 8, 8, 64, 8)
TRAINED = [name for name in ATTENTION if name not in DECODING]


def first_line(plan):
    """Of its explanation: the placements of a plan, and its name."""
    return plan.explain().splitlines()[0]


def refusal(program, parts):
    """Why a decoding program has no such placement: its queries are whole on every rank, and there may be only one."""
    if program.name != "decode_attention":
        return ""
    if Placement("kv", True) in parts:
        return "kv on . cannot be streamed"
    return "does not divide q" if program.axis("q").size == 1 and "q" in [each.axis for each in parts] else ""


@pytest.mark.parametrize("which, name", ALL_KNOWN)
def test_what_the_library_makes_by_name_has_the_name(which, name):
    """Also in chunks, and with another kernel."""
    program, parts = PROGRAMS[which], known_schedules(PROGRAMS[which])[name]
    for mesh in MESHES[len(parts)]:
        if refused := refusal(program, parts):
            with pytest.raises(IllegalSchedule, match=refused):
                known(Schedule(program, mesh), name)
            continue
        schedule = known(Schedule(program, mesh), name)
        assert known_as(schedule) == name
        if program.kernels[1:]:
            assert known_as(schedule.patch("reference")) == name
        for axis in [each.name for each in program.axes if all(each.name in out.axes for out in program.outputs)]:
            if schedule.digits_of(axis) and schedule.digits_of(axis)[-1].size % 2 == 0:
                assert known_as(in_chunks(schedule, axis, 2)) == f"{name}, in chunks"


@pytest.mark.parametrize("which, name", [each for each in ALL_KNOWN if "product" not in each[0]])
def test_where_lse_may_be_kept(which, name):
    """As in the library's program, or where it is computed: along heads on the mesh axes that divide heads."""
    program, parts = PROGRAMS[which], known_schedules(PROGRAMS[which])[name]
    own = program.operand("lse").home
    for mesh in MESHES[len(parts)]:
        if refusal(program, parts):
            continue
        schedule = known(Schedule(program, mesh), name)
        at_home = (own,) * len(parts)
        computed = tuple("heads" if part.axis == "heads" else own for part in parts)
        right = (computed,) if name == "Mnemosyne" else (at_home, computed)
        for homes in itertools.product((None, "batch", "heads", "q"), repeat=len(parts)):
            kept = schedule
            for m, axis in zip(mesh.names, homes, strict=True):
                kept = kept.shard("lse", axis, m) if axis else kept.replicate("lse", m)
            assert known_as(kept) == (name if homes in right else ""), homes


def test_homes_along_heads_on_some_of_the_axes_that_divide_them():
    """lse along heads on one of two such axes, or in a backward pass only some of the operands: then there is no name."""
    forward = place(Schedule(FORWARD, Mesh(a=2, b=2)), a="heads", b="heads")
    moved = {axes: forward for axes in ("", "a", "b", "ab")}
    for axes in moved:
        for m in axes:
            moved[axes] = moved[axes].shard("lse", "heads", m)
    assert [known_as(each) for each in moved.values()] == ["Ulysses", "", "", "Ulysses"]
    backward = place(Schedule(PROGRAMS["backward"], Mesh(a=4)), a="heads")
    for operands, name in ((SAVED, "Ulysses"), (["lse"], "Ulysses"), *(([each], "") for each in SAVED if each != "lse"),
                           ([each for each in SAVED if each != "lse"], "")):  # fmt: skip
        kept = backward
        for each in operands:
            kept = kept.shard(each, "heads", "a")
        assert known_as(kept) == name, operands


def test_a_ring_with_lse_elsewhere_sends_more():
    ring = known(Schedule(programs.attention(32, 32, 1, 256, 8, dtype="bfloat16"), Mesh(gpu=8)), "ring")
    kept = ring, ring.shard("lse", "batch", "gpu"), ring.replicate("lse", "gpu")
    plans = [each.lower() for each in kept]
    assert [plan.bytes_per_rank for plan in plans] == [229376, 344064, 1146880]
    assert ["(ring)" in plan.explain() for plan in plans] == [True, False, False]


def test_homes_on_a_mesh_axis_of_one_rank_are_no_others():
    schedule = place(Schedule(FORWARD, Mesh(gpu=4, one=1)), gpu="heads", one="q")
    assert known_as(schedule) == "Ulysses"
    for operand in ("q", "k", "out", "lse"):
        moved = schedule.replicate(operand, "one")
        assert known_as(moved) == "Ulysses" and moved.lower().bytes_per_rank == schedule.lower().bytes_per_rank
        assert known_as(schedule.replicate(operand, "gpu")) == ""


def test_parts_may_be_divided_over_several_axes():
    schedule = Schedule(FORWARD, Mesh(a=2, b=2, c=2))
    q, ring, kv = Placement("q"), Placement("q", True), Placement("kv")
    for name, parts in {
        "all-gather": (q, q, q),
        "double ring": (ring, ring, ring),
        "Ulysses": ("heads", "heads", "heads"),
        "USP": (ring, "heads", "heads"),
        "LoongTrain": (ring, ring, "heads"),
        "": (Placement("kv", True), Placement("kv", True), Placement("kv", True)),
        "Attention2D": (kv, q, kv),
        "3-D": (q, kv, "heads"),
    }.items():
        assert known_as(place(schedule, **dict(zip("abc", parts, strict=True)))) == name


@pytest.mark.parametrize(
    "heads, kv_heads, world, name",
    [(8, 8, 4, "Ulysses"), (8, 2, 4, "USP"), (8, 2, 8, "USP"), (4, 4, 16, "3-D, overlapped")],
)
def test_lse_may_be_left_where_it_is_computed(heads, kv_heads, world, name):
    plan, _ = best_grid(programs.attention(1, heads, kv_heads, 256, 16), Mesh(rank=world))
    left = leaving_lse(plan)
    assert first_line(plan).endswith(f"heads on {plan.mesh.names[-1]} ({name})")
    assert first_line(left).endswith(f"; lse kept along heads on {plan.mesh.names[-1]} ({name})")
    assert left.bytes_per_rank < plan.bytes_per_rank


@pytest.mark.parametrize("name", TRAINED)
def test_a_backward_plan_has_the_name_of_its_forward_plan(name):
    """It keeps what the forward plan has left along heads there; moving only a part of that is another schedule."""
    for mesh in MESHES[len(ATTENTION[name])]:
        schedule = known(Schedule(PROGRAMS["forward"], mesh), name)
        plan = backward_plan(schedule.lower())
        assert first_line(plan).endswith(f" ({name})") and known_as(plan.schedule) == name
        chunks = in_chunks(schedule, "heads", 2)
        assert known_as(backward_plan(chunks.lower()).schedule) == f"{name}, in chunks"
        alone = known(Schedule(plan.program, mesh), name).shard("q", "heads", mesh.names[-1])
        assert known_as(alone) == ""
        forward = known(Schedule(PROGRAMS["forward"], mesh), name)
        for operand in ("q", "k", "v", "out"):
            forward = forward.shard(operand, "heads", mesh.names[-1])
        assert known_as(forward) == ""
        assert known_as(forward.shard("lse", "heads", mesh.names[-1])) == ""


def with_other_digits():
    """{what differs: (schedule, the known schedule of the same placements)}."""
    one, two = Schedule(FORWARD, Mesh(gpu=4)), Schedule(FORWARD, Mesh(node=2, gpu=2))
    product = Schedule(programs.all_gather_matmul(64, 64, 64), Mesh(gpu=4))
    ring, flat, ulysses = known(one, "ring"), known(one, "all-gather"), known(one, "Ulysses")
    inner, reversed_q = one.tile("q", 16), two.tile("q", 2).tile("q.i", 2)
    reversed_heads, reversed_kv = (two.tile(axis, 2).tile(f"{axis}.i", 2) for axis in ("heads", "kv"))
    usp = reversed_q.tile("heads", 2).parallelize("q.i.o", "node").parallelize("heads.o", "gpu")
    usp = usp.tile("kv", 2).tile("kv.i", 2)
    return {
        "ring of small blocks": (inner.tile("kv", 4).parallelize("q.i", "gpu").shift("kv.o", "gpu"), ring),
        "ring of small keys": (one.tile("q", 4).tile("kv", 16).parallelize("q.o", "gpu").shift("kv.i", "gpu"), ring),
        "small blocks": (inner.parallelize("q.i", "gpu"), flat),
        "every second head": (one.tile("heads", 2).parallelize("heads.i", "gpu"), ulysses),
        "blocks of q in another order": (
            reversed_q.parallelize("q.o", "gpu").parallelize("q.i.o", "node"),
            place(two, node="q", gpu="q"),
        ),
        "heads in another order": (
            reversed_heads.parallelize("heads.o", "gpu").parallelize("heads.i.o", "node"),
            place(two, node="heads", gpu="heads"),
        ),
        "blocks of kv in another order": (
            reversed_kv.tile("q", 2).parallelize("kv.o", "gpu").parallelize("q.o", "node"),
            place(two, node="q", gpu="kv"),
        ),
        "ring inside of blocks": (usp.shift("kv.i.o", "node"), known(two, "USP")),
        "small columns": (product.tile("cols", 16).parallelize("cols.i", "gpu"), place(product, gpu="cols")),
    }


@pytest.mark.parametrize("which", with_other_digits())
def test_schedules_with_other_digits_have_no_name(which):
    """Their mesh axes have the loops of a known schedule, and their ranks other blocks; none sends fewer bytes."""
    schedule, same = with_other_digits()[which]
    assert str(schedule) == str(same) and known_as(same)
    plan = schedule.lower()
    assert known_as(schedule) == "" and first_line(plan) == str(schedule)
    assert plan.bytes_per_rank >= same.lower().bytes_per_rank


def test_a_ring_of_small_blocks_sends_more():
    schedule, ring = with_other_digits()["ring of small blocks"]
    plan, true = schedule.lower(), ring.lower()
    assert (plan.bytes_per_rank, plan.messages) == (31104, 9) and (true.bytes_per_rank, true.messages) == (24576, 3)
    assert "(ring)" in true.explain() and "(ring)" not in plan.explain()


def test_more_loops_or_an_axis_without_a_loop_have_no_name():
    schedule = Schedule(FORWARD, Mesh(gpu=4))
    ring = known(schedule, "ring")
    assert known_as(ring.tile("heads", 2).reorder("kv.gpu", "heads.o")) == ""
    idle = Schedule(FORWARD, Mesh(gpu=4, idle=2)).tile("q", 4).parallelize("q.o", "gpu")
    assert known_as(idle) == ""


def test_programs_whose_homes_are_others():
    """Keys and values are along the sequence; queries, outputs and lse are all along the sequence, or all whole."""
    decoding = PROGRAMS["decoding of several queries"]
    out, lse = decoding.outputs
    scattered = replace(decoding, outputs=(replace(out, home="q"), lse))
    assert known_schedules(scattered) == {} and known_as(place(Schedule(scattered, Mesh(a=4)), a="q")) == ""
    moved = replace(decoding, outputs=(out, replace(lse, home="heads")))
    assert known_schedules(moved) == {} and known_as(place(Schedule(moved, Mesh(a=4)), a="kv")) == ""
    q, *keys = FORWARD.inputs
    whole = replace(FORWARD, inputs=(q, *(replace(each, home=None) for each in keys)))
    assert known_schedules(whole) == {} and known_as(place(Schedule(whole, Mesh(a=4)), a="q")) == ""


def test_an_operator_with_the_loops_of_attention_has_no_known_schedules():
    @operator
    def nearest(q=64, kv=64):
        x = In[q]
        y = In[kv]
        best = Out[q]
        for q, kv in grid("sr"):
            best[q] = max(best[q], x[q] * y[kv])

    program = nearest()
    assert [each.home for each in program.operands] == ["q", "kv", "q"]
    ring = place(Schedule(program, Mesh(a=4)), a=Placement("q", True))
    assert known_schedules(program) == {} and known_as(ring) == ""
    assert first_line(ring.lower()) == str(ring)


def test_mnemosyne_sends_what_tree_decoding_of_its_heads_does():
    """Keys and values stay where they are; queries are cut, and partial results combine among the ranks of `a` alone."""
    sizes = dict(batch=2, heads=24, kv_heads=8, seq=96, head_dim=8)
    plan = known(Schedule(programs.decode_attention(**sizes), Mesh(a=2, b=4)), "Mnemosyne").lower()
    of_some_heads = programs.decode_attention(**sizes | dict(heads=6, kv_heads=2))
    alone = known(Schedule(of_some_heads, Mesh(a=2)), "tree").lower()
    assert plan.bytes_per_rank == alone.bytes_per_rank and plan.memory < 2 * alone.memory
    moved = place(Schedule(plan.program, Mesh(a=2, b=4)), a="kv", b="heads")
    assert known_as(moved) == "" and moved.lower().bytes_per_rank > 20 * plan.bytes_per_rank


def test_token_ring_sends_both_ways():
    """Queries to the rank before, and partial results to the ranks behind."""
    plan = known(Schedule(FORWARD, Mesh(a=4)), "TokenRing").lower()
    assert {step.operands for step in plan.steps if isinstance(step, Send)} == {("q",)}
    assert {step.distance for step in plan.steps if isinstance(step, SendPartial)} == {1, 2, 3}
    ring = known(Schedule(programs.attention(1, 8, 1, 64, 8), Mesh(a=4)), "ring").lower()
    assert plan.bytes_per_rank > ring.bytes_per_rank
