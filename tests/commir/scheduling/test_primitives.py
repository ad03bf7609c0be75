"""The primitives: what they do, their legality rules, and schedules made by hand. Oracle: the program on one rank."""

import contextlib
import random

import pytest
import torch
from chosen import by_default

from commir import Mesh, Plan, Schedule, interpret, programs, verify
from commir.execution.state import Count
from commir.execution.verifier import unscheduled
from commir.scheduling.known_schedules import known_as
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import Placement, in_chunks, is_placed, place
from loop_programs import assert_close, random_inputs

MESH = Mesh(x=2, y=3)


def sums(rows=12, cols=12):
    return Schedule(programs.weighted_sum(rows, cols, dtype="float64"), MESH)


def attention(mesh=None, heads=4, kv_heads=2):
    return Schedule(programs.attention(2, heads, kv_heads, 24, 4, dtype="float64"), mesh or Mesh(x=2))


def test_tiles_and_joins():
    """`join` undoes `tile`; the order of independent primitives does not matter."""
    schedule = sums()
    tiled = schedule.tile("rows", 4).tile("rows.i", 3, "a", "b")
    assert [(digit.name, digit.size) for digit in tiled.digits_of("rows")] == [("rows.o", 4), ("a", 3), ("b", 1)]
    assert tiled.join("a", "b", "rows.i").join("rows.o", "rows.i") == schedule
    one = schedule.tile("rows", 2).tile("cols", 3).parallelize("rows.o", "x").parallelize("cols.o", "y")
    other = schedule.tile("cols", 3).parallelize("cols.o", "y").tile("rows", 2).parallelize("rows.o", "x")
    assert one == other and hash(one) == hash(other)
    assert sums().apply(one.primitives()) == one
    odd = schedule.tile("rows", 2, "rows#1", "b").tile("b", 2, "c", "d")  # a name like those that `primitives` makes up
    assert sums().apply(odd.primitives()) == odd


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda s: s.tile("rows", 5), r"tile\(rows, 5\): 5 does not divide rows, which has size 12"),
        (lambda s: s.tile("rows", 0), r"^tile\(rows, 0\): 0 does not divide rows, which has size 12$"),
        (lambda s: s.tile("rows", 2, "cols", "b"), r"tile\(rows, 2\): the name cols is taken"),
        (lambda s: s.tile("rows", 2).tile("rows.i", 2).join("rows.o", "rows.i.o", "cols"), "the name cols is taken"),
        (
            lambda s: s.tile("rows", 2, "v", "r").tile("r", 2, "s", "rows").join("v", "s", "rows"),
            r"^join\(v, s\): the name rows is taken$",
        ),
        (lambda s: s.tile("rows", 2, "rows", "r").tile("r", 3, "rows", "s"), r"^tile\(r, 3\): the name rows is taken$"),
        (lambda s: s.tile("rows", 2, "v", "r").tile("r", 2, "s", "rows").join("v", "s"), "the name rows is taken"),
        (lambda s: s.tile("depth", 2), r"weighted_sum has no digit 'depth': expected rows, cols"),
        (
            lambda s: s.tile("rows", 2).tile("cols", 2).join("rows.o", "cols.o"),
            r"join\(rows\.o, cols\.o\): rows\.o is a digit of rows and cols\.o of cols; a digit counts blocks of one axis\.",
        ),
        (
            lambda s: s.tile("rows", 2).tile("rows.i", 2, "a", "b").join("rows.o", "b"),
            r"join\(rows\.o, b\): b is not the next digit of axis rows after rows\.o",
        ),
        (
            lambda s: s.tile("rows", 2).parallelize("rows.o", "x").tile("rows.o", 2),
            r"rows\.o is parallelized on x already",
        ),
        (lambda s: s.parallelize("rows", "x"), r"rows has size 12, mesh axis x 2: tile it by 2 first"),
        (
            lambda s: s.tile("rows", 4).parallelize("rows.i", "x"),
            r"rows\.i has size 3, mesh axis x 2: 2 does not divide 3",
        ),
        (
            lambda s: s.tile("rows", 2).tile("cols", 2).parallelize("rows.o", "x").parallelize("cols.o", "x"),
            r"mesh axis x has the digit rows\.o already",
        ),
        (lambda s: s.tile("cols", 2).shift("cols.o", "x"), r"no digit is parallelized on x; parallelize one first"),
        (
            lambda s: s.tile("rows", 2).tile("cols", 3).parallelize("rows.o", "x").shift("cols.o", "x"),
            r"cols\.o has size 3, mesh axis x 2; they must be equal",
        ),
        (
            lambda s: s.tile("rows", 2).tile("rows.i", 2).parallelize("rows.o", "x").shift("rows.i.o", "x"),
            r"no operand is indexed by rows and not by rows; nothing would travel",
        ),
        (
            lambda s: (
                s.tile("rows", 2).tile("cols", 2).parallelize("rows.o", "x").shift("cols.o", "x").reorder("rows.i")
            ),
            r"reorder\(rows\.i\): cols\.o is shifted, so it is a loop and must be named",
        ),
        (
            lambda s: s.tile("rows", 2).parallelize("rows.o", "x").reorder("rows.o"),
            r"rows\.o is parallelized, so it cannot be a loop",
        ),
        (lambda s: s.reorder("rows", "rows"), r"rows is named twice"),
        (
            lambda s: s.tile("rows", 2).tile("cols", 3).reorder("cols.o").parallelize("rows.o", "x"),
            r"reorder\(cols\.o\) must come after all tile, join, parallelize and shift",
        ),
        (lambda s: s.tile("cols", 2, "c1", "c2").tile("rows", 2, "cols", "b"), r"the name cols is taken"),
        (lambda s: s.shard("a", "depth", "x"), r"a is not indexed by depth"),
        (lambda s: s.shard("a", "cols", "z"), r"the mesh has no axis 'z': expected x, y"),
        (lambda s: s.patch("magic"), r"patch\(magic\): weighted_sum has no kernel 'magic': expected library"),
        (
            lambda s: s.patch("reference"),
            r"patch\(reference\): weighted_sum has no kernel 'reference': expected library",
        ),
        (lambda s: s.tile("rows", 2).parallelize("rows.o", "x").lower(), r"no digit is parallelized on mesh axis y"),
    ],
)
def test_rules(transform, message):
    with pytest.raises(ValueError, match=message):
        transform(sums())


def test_rules_of_attention():
    with pytest.raises(
        IllegalSchedule, match=r"shard\(q, dim, x\): dim is whole in every tile, so it cannot be sharded"
    ):
        attention().shard("q", "dim", "x")
    loop_over_heads = attention().tile("q", 2).parallelize("q.o", "x").reorder("heads")
    with pytest.raises(IllegalSchedule, match=r"k: 2 heads do not divide over 4 blocks: 2 % 4 = 2"):
        loop_over_heads.lower()


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda s: s.tile("heads", 2).parallelize("heads.o", "x").tile("seq", 2).reorder("seq.o"), "seq.o is a loop"),
        (
            lambda s: s.tile("seq", 2).parallelize("seq.o", "x").reorder("heads"),
            "heads is a loop, but selective_scan scans",
        ),
        (
            lambda s: s.tile("seq", 12).parallelize("seq.i", "x"),
            "seq is scanned, so tile it in the order of the mesh, by x",
        ),
        (
            lambda s: s.tile("seq", 2).tile("seq.i", 2).parallelize("seq.i.o", "x"),
            "seq is scanned, so tile it in the order of the mesh, by x",
        ),
        (
            lambda s: s.tile("seq", 2).tile("seq.o", 2).reorder("seq.i", "seq.o.o"),
            "digits of a scanned axis keep their order",
        ),
    ],
)
def test_rules_of_scans(transform, message):
    program = programs.selective_scan(2, 24, 4, 2, 3, "float64", "contiguous")
    with pytest.raises(IllegalSchedule, match=message):
        transform(Schedule(program, Mesh(x=2))).lower()


def test_kernels():
    """Only attention has two: with the plain one, its plan is another, and as exact."""
    library = place(attention(), x=Placement("q", True))
    plain = library.patch("reference")
    assert plain.primitives() == [*library.primitives(), ("patch", "reference")] and plain.patch("library") == library
    inputs = random_inputs(library.program)
    assert_close(interpret(plain.lower(), inputs), interpret(library.lower(), inputs))
    assert plain.lower().hash != library.lower().hash
    assert sums().patch("library") == sums()
    with pytest.raises(
        IllegalSchedule, match=r"patch\(magic\): attention has no kernel 'magic': expected library or reference"
    ):
        library.patch("magic")
    scan = programs.selective_scan(2, 24, 4)
    with pytest.raises(
        IllegalSchedule, match=r"patch\(reference\): selective_scan has no kernel 'reference': expected library"
    ):
        Schedule(scan, MESH).patch("reference")


def by_hand(schedule, generator):
    """A random legal schedule: tiled at random, with digits parallelized, shifted and run as loops."""
    for mesh_axis in schedule.mesh.axes:
        choices = [digit for digit in schedule.digits if digit.size % mesh_axis.size == 0]
        digit = generator.choice([each for each in choices if each.name not in dict(schedule.parallel)])
        schedule = schedule.tile(digit.name, mesh_axis.size).parallelize(f"{digit.name}.o", mesh_axis.name)
    free = [digit for digit in schedule.digits if digit.name not in dict(schedule.parallel) and digit.size > 1]
    for digit in generator.sample(free, min(2, len(free))):
        factors = [n for n in range(2, digit.size + 1) if digit.size % n == 0]
        schedule = schedule.tile(digit.name, generator.choice(factors))
        if generator.random() < 0.5:
            mesh_axis = generator.choice(schedule.mesh.names)
            try:
                schedule = schedule.shift(f"{digit.name}.o", mesh_axis)
            except IllegalSchedule:
                continue
    loops = [digit.name for digit in schedule.digits if digit.name not in dict(schedule.parallel) and digit.size > 1]
    shifted = [name for name, _ in schedule.shifts]
    loops = shifted + generator.sample(
        [name for name in loops if name not in shifted], min(1, len(loops) - len(shifted))
    )
    generator.shuffle(loops)
    return schedule.reorder(*loops)


@pytest.mark.parametrize("seed", by_default(range(4), range(8)))
@pytest.mark.parametrize("mesh", [Mesh(x=2), Mesh(x=3, y=2), Mesh(x=1, y=2)], ids=str)
def test_schedules_by_hand_are_exact(mesh, seed):
    """Schedules that can be lowered are exact, pass `verify`, and send and hold the predicted bytes."""
    generator = random.Random(seed)
    for program in (
        programs.attention(2, 6, 6, 24, 4, dtype="float64"),
        programs.matmul_reduce_scatter(12, 12, 12, dtype="float64"),
        programs.weighted_sum(12, 24, dtype="float64"),
    ):
        inputs = random_inputs(program)
        expected, lowered = unscheduled(program, inputs), 0
        for _ in range(100):
            if lowered == 5:
                break
            try:
                plan = by_hand(Schedule(program, mesh), generator).lower()
            except IllegalSchedule:
                continue
            lowered += 1
            counts: list[Count] = []
            assert_close(interpret(plan, inputs, counts), expected)
            assert {each.held for each in counts} == {0}
            verify(plan)
            assert max(count.peak for count in counts) <= plan.memory
            assert max(count.sent for count in counts) <= plan.bytes_per_rank
        assert lowered == 5, program.name


def renamed(schedule, generator):
    """A schedule after random legal tiles and joins, whose names are few, so that many are taken."""
    for _ in range(6):
        first, second = generator.choice(schedule.digits), generator.choice(schedule.digits)
        outer, inner = (generator.choice(["rows", "cols", "a", "b", "rows#1", None]) for _ in range(2))
        with contextlib.suppress(IllegalSchedule):
            if generator.random() < 0.3:
                schedule = schedule.join(first.name, second.name, outer)
            else:
                schedule = schedule.tile(first.name, generator.choice([1, 2, 3]), outer, inner)
    return schedule


@pytest.mark.parametrize("seed", range(4))
def test_digits_of_one_schedule_have_different_names(seed):
    """So that its primitives give it again, and its plan can be read from its text."""
    generator, lowered, mesh = random.Random(seed), 0, Mesh(x=2)
    for _ in range(200):
        schedule = renamed(Schedule(programs.weighted_sum(12, 12), mesh), generator)
        names = [digit.name for digit in schedule.digits]
        assert len(set(names)) == len(names)
        assert Schedule(schedule.program, mesh).apply(schedule.primitives()) == schedule
        with contextlib.suppress(IllegalSchedule):
            halves = [digit.name for digit in schedule.digits if digit.size == 2]
            plan = schedule.parallelize(generator.choice(halves or names), "x").lower()
            assert Plan.from_json(plan.to_json()).hash == plan.hash
            lowered += 1
    assert lowered > 20


def test_outputs_do_not_share_memory_with_inputs():
    x = torch.ones(12, 12, dtype=torch.float64)
    given = {"a": x, "b": x[0].clone()}
    interpret(place(Schedule(sums().program, Mesh(x=1)), x="rows").lower(), given)["c"].zero_()
    assert x.eq(1).all()


def test_an_operand_that_every_rank_has_whole_need_not_divide():
    schedule = (
        Schedule(programs.weighted_sum(8, 6, dtype="float64"), Mesh(x=4)).tile("rows", 4).parallelize("rows.o", "x")
    )
    with pytest.raises(IllegalSchedule, match=r"b: axis cols of 6 does not divide over 4 ranks: 6 % 4 = 2"):
        schedule.lower()
    plan, inputs = schedule.replicate("b", "x").lower(), random_inputs(schedule.program)
    verify(plan)
    assert_close(interpret(plan, inputs), {"c": inputs["a"] @ inputs["b"]})


def test_sources_of_an_operand_are_kept_in_the_same_way():
    program = programs.attention(1, 4, 2, 24, 4, backward=True)
    schedule = place(Schedule(program, Mesh(x=2)), x="kv").replicate("out", "x")
    with pytest.raises(IllegalSchedule, match="delta is derived from dout and out, which are kept differently"):
        schedule.lower()
    verify(schedule.replicate("dout", "x").lower())


def test_what_is_placed():
    """Digits with other names are the same placement; digits at other places are not."""
    schedule = Schedule(programs.attention(1, 4, 2, 48, 8), Mesh(gpu=2))
    ring = schedule.tile("q", 2).tile("kv", 2).parallelize("q.o", "gpu").shift("kv.o", "gpu")
    assert is_placed(ring) and is_placed(place(schedule, gpu=Placement("q", True)))
    assert known_as(ring) == "ring"
    inner = schedule.tile("q", 4).tile("q.i", 2).parallelize("q.i.o", "gpu")
    assert not is_placed(inner) and not is_placed(ring.shard("lse", "heads", "gpu"))
    chunks = ring.tile("heads", 2).chunk("heads.o")
    assert is_placed(chunks) and is_placed(in_chunks(ring, "heads", 2))
    assert not is_placed(ring.tile("q.i", 2).tile("q.i.i", 2).chunk("q.i.i.o"))
    assert not is_placed(chunks.reorder("kv.o", "heads.i"))


@pytest.mark.parametrize(
    "placements, message",
    [
        (dict(x="q", node="kv"), "place: the mesh has no axis 'node': expected x"),
        (dict(x="query"), "place: attention has no loop 'query': expected batch, heads, q, kv"),
        (dict(x=Placement("dim")), "place: attention has no loop 'dim'"),
        (dict(y="q"), "place: the mesh has no axis 'y': expected x"),
        ({}, "mesh axis x has no placement"),
    ],
)
def test_placements_of_what_does_not_exist(placements, message):
    with pytest.raises(IllegalSchedule, match=message):
        place(attention(), **placements)
