"""The search and its closed-form costs. Oracle: the lowered plans of all candidates; known schedules by name."""

import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest
from chosen import by_default

from benchmarks.support.plans import all_plans
from commfabric.fabric.curve import Curve
from commir import Axis, Mesh, Operand, Program, Result, Schedule, pareto, programs, search, verify
from commir.execution.verifier import VerificationError
from commir.lowering.operand_layouts import digits_of, digits_of_chunk
from commir.lowering.timeline import EQUAL_SPEED
from commir.scheduling.known_schedules import known, known_as, known_schedules
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import Placement, in_chunks, place, placements_of
from commir.searching import search as searching
from commir.searching.candidates import Candidate, candidates
from commir.searching.cost import CostModel
from commir.searching.search import _order
from loop_programs import cases, mesh_of
from sparsefusion import Fabric

MESHES = [Mesh(g=4), Mesh(g=6), Mesh(n=2, g=2), Mesh(n=2, g=4), Mesh(n=1, g=4), Mesh(g=4).split("g", a=2, b=2)]
FEWEST = by_default([MESHES[0], MESHES[2]], MESHES)
FEWER = by_default([mesh for mesh in MESHES if mesh.ranks < 8], MESHES)


def all_programs(ranks, dtype):
    return [each.program for each in cases(ranks)] + [
        programs.attention(1, ranks, ranks, 4 * ranks, 8, dtype=dtype),
        programs.attention(2, ranks, ranks, 4 * ranks, 8, causal=False, backward=True, dtype=dtype),
        programs.all_gather_matmul(ranks, ranks, ranks, dtype),
        programs.decode_attention(2, ranks, ranks, 2 * ranks, 8, dtype=dtype),
    ]


@pytest.mark.parametrize(
    "dtype, step",
    [("bfloat16", 3), *(pytest.param(each, 1, marks=pytest.mark.full) for each in ("float32", "bfloat16"))],
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_closed_forms_are_those_of_the_plans(mesh, dtype, step):
    """Bytes and messages exactly; time and memory are lower bounds, also of plans in chunks."""
    for program in all_programs(mesh.ranks, dtype):
        model = CostModel(program, mesh)
        for number, candidate in enumerate(islice(candidates(program, mesh), 0, None, step)):
            cost, plan = model.cost(candidate), candidate.schedule(program, mesh).lower()
            held = model.held(candidate)
            assert (cost.sent, cost.messages) == (plan.bytes_per_rank, plan.messages), (program.name, str(candidate))
            assert max(model.kept, model.memory(held)) <= plan.memory, (program.name, str(candidate))
            assert cost.seconds <= plan.seconds * (1 + 1e-9), (program.name, str(candidate))
            if len(mesh.levels) == 1:  # whose link is busy all the time
                assert cost.seconds == pytest.approx(cost.sent / EQUAL_SPEED[1]), (program.name, str(candidate))
            for each in list(candidate.in_chunks(program))[number % 7 :: 7]:
                with suppress(IllegalSchedule):
                    plan = each.schedule(program, mesh).lower()
                    assert model.memory_in_chunks(held, each.chunked, each.chunks) <= plan.memory, str(each)
                    assert cost.seconds <= model.seconds_in_chunks(each) * (1 + 1e-9), str(each)
                    assert model.seconds_in_chunks(each) <= plan.seconds * (1 + 1e-9), str(each)


@pytest.mark.parametrize("overlap", [1.0, 0.5, -1.0])
@pytest.mark.parametrize("mesh", FEWER, ids=str)
def test_the_best_plan_is_the_best_of_all(mesh, overlap):
    """With a latency and a time of tiles, so that few messages pay, and overlapping does with overlap=1."""
    mesh = mesh.with_speeds({axis.level: (1e-4, 1e8 / (1 + number)) for number, axis in enumerate(mesh.axes)})
    program = programs.attention(1, mesh.ranks, mesh.ranks, 64 * mesh.ranks, 16)
    best = search(program, mesh, top=3, point_seconds=1e-10, call_seconds=1e-5, overlap=overlap)
    model = CostModel(program, mesh, 1e-10, 1e-5, overlap)
    times = []
    for candidate in candidates(program, mesh):
        plan = candidate.schedule(program, mesh).lower()
        times.append(type(plan)(plan.schedule, plan.steps, model.tile_seconds(candidate), overlap).seconds)
    assert [plan.seconds for plan in best] == pytest.approx(sorted(times)[:3], rel=1e-9)
    for plan in best:
        verify(plan)


def test_the_bound_of_a_ring_is_its_time():
    """To begin a message takes a rank its latency, beside the time of its tiles."""
    program, mesh = programs.attention(1, 4, 4, 64, 8), Mesh(g=4, speeds={"g": (1e-4, 1e12)})
    (ring,) = (each for each in candidates(program, mesh) if str(each) == "g (4): q, streamed")
    plan = ring.schedule(program, mesh).lower().with_tile(0.0, 1e-3)
    assert CostModel(program, mesh, 0.0, 1e-3).cost(ring).seconds == pytest.approx(plan.seconds)
    assert plan.seconds == pytest.approx(4e-3 + 3e-4)


def with_a_jump(ranks, size):
    """A fabric on which all messages of more than `size` bytes take about the same time, much longer than shorter ones."""
    points = [(size * factor, 1e-5 * (1 + factor)) for factor in (0.125, 0.25, 0.5, 0.99)]
    points += [(size * factor, 1e-2 * (1 + factor / 1e6)) for factor in (1.01, 2, 4, 8, 16, 1024)]
    return Fabric((Curve.fit("p2p", ranks, points),))


@pytest.mark.parametrize("mesh", [Mesh(g=4), Mesh(g=6)], ids=str)
def test_the_bound_of_time_on_a_fabric_with_a_jump(mesh):
    """k and v travel together, in messages that take hardly longer than those of one of them."""
    program = programs.attention(1, mesh.ranks, mesh.ranks, 64 * mesh.ranks, 16)
    mesh = mesh.with_speeds({"g": with_a_jump(mesh.ranks, program.nbytes(program.operand("k")) / mesh.ranks / 2)})
    model, plans = CostModel(program, mesh), all_plans(program, mesh)
    for candidate, plan in zip(candidates(program, mesh), plans, strict=True):
        assert model.cost(candidate).seconds <= plan.seconds * (1 + 1e-9), str(candidate)
    assert search(program, mesh, top=1)[0].seconds == pytest.approx(min(plan.seconds for plan in plans))


@pytest.mark.parametrize(
    "heads, kv_heads, gpus, name, chunks",
    [
        (4, 4, 4, "Ulysses", 3.0),
        (4, 2, 4, "USP", 2.5),
        (4, 4, 8, "USP", 5.0),
        (8, 1, 8, "ring", 1.75),
        (4, 4, 16, "3-D", 7.0),
        (1, 1, 16, "Attention2D", 12.0),
    ],
)
def test_fewest_bytes(heads, kv_heads, gpus, name, chunks):
    """In chunks, which are a rank's queries. `chunks` leaves out lse, which is an 8th of a chunk for 8 numbers per head."""
    program = programs.attention(1, heads, kv_heads, 8 * gpus, 8)
    best = search(program, Mesh(gpu=gpus))[0]
    chunk = 8 * heads * 8 * 4
    statistics = best.bytes_per_rank / chunk - chunks
    assert -1e-9 <= statistics <= 1 / 2
    assert name == known_as(best.schedule).removesuffix(", overlapped")


# For each number of parts of a schedule, a mesh.
PARTS = {1: Mesh(gpu=4), 2: Mesh(node=2, gpu=2), 3: Mesh(cols=2, rows=2, heads=2)}
PROGRAMS = [
    programs.attention(1, 8, 8, 64, 8),
    programs.decode_attention(1, 8, 8, 64, 8),
    programs.all_gather_matmul(64, 64, 64),
    programs.matmul_reduce_scatter(64, 64, 64),
]
KNOWN = [(program, name) for program in PROGRAMS for name in known_schedules(program)]


@pytest.mark.parametrize("program, name", KNOWN, ids=lambda each: getattr(each, "name", each))
def test_known_schedules_are_candidates(program, name):
    """By name, in every order of the mesh axes that a name may be recognized in; a search considers the same schedule."""
    parts = known_schedules(program)[name]
    mesh = PARTS[len(parts)]
    moves_queries = "q" in [each.axis for each in parts] or "overlapped" in name or name == "TokenRing"
    if program.name == "decode_attention" and moves_queries:
        with pytest.raises(IllegalSchedule):  # there is one query
            known(Schedule(program, mesh), name)
        return
    made = known(Schedule(program, mesh), name)
    assert known_as(made) == name and list(placements_of(made).values()) == list(parts)
    schedules = [candidate.schedule(program, mesh) for candidate in candidates(program, mesh)]
    found = [known_as(each) for each in schedules if placements_of(each) == placements_of(made)]
    assert found == ["" if name == "Mnemosyne" else name]  # a search does not move what Mnemosyne keeps along heads


def test_the_mesh_axes_of_a_known_schedule():
    """They are called by their names again, but for heads that are not on the innermost axis."""
    schedule = Schedule(programs.attention(1, 8, 8, 64, 8), Mesh(node=2, gpu=2))
    made = known(schedule, "Attention2D", "gpu", "node")
    assert placements_of(made) == {"node": Placement("q"), "gpu": Placement("kv")} and known_as(made) == "Attention2D"
    assert known_as(known(schedule, "USP", "node", "gpu")) == "USP"
    other = known(schedule, "USP", "gpu", "node")
    assert placements_of(other) == {"node": Placement("heads"), "gpu": Placement("q", True)} and known_as(other) == ""
    parts = Schedule(programs.attention(1, 8, 8, 64, 8), Mesh(node=2, gpu=2, core=2))
    assert known_as(place(parts, node=Placement("q", True), gpu=Placement("q", True), core="heads")) == "LoongTrain"
    assert known_as(place(parts, node=Placement("q", True), gpu="heads", core=Placement("q", True))) == ""
    assert known_as(place(parts, node="kv", gpu="heads", core="q")) == ""


def test_schedules_that_are_not_known():
    program, mesh = programs.attention(1, 8, 8, 64, 8), Mesh(gpu=4)
    with pytest.raises(IllegalSchedule, match="attention has no known schedule 'tree': expected ring, double ring, "):
        known(Schedule(program, mesh), "tree")
    with pytest.raises(IllegalSchedule, match="weighted_sum has no known schedule 'ring': expected none"):
        known(Schedule(programs.weighted_sum(8, 8), mesh), "ring")
    with pytest.raises(IllegalSchedule, match=r"USP needs 2 mesh axes \(q, streamed; heads\), not 1 \(gpu\)$"):
        known(Schedule(program, mesh), "USP")
    with pytest.raises(IllegalSchedule, match=r"ring needs 1 mesh axes \(q, streamed\), not 2 \(a, b\)$"):
        known(Schedule(program, Mesh(a=2, b=2)), "ring")
    with pytest.raises(IllegalSchedule, match="place: the mesh has no axis 'node': expected gpu"):
        known(Schedule(program, mesh), "ring", "node")


def test_a_tree_has_its_queries_whole():
    """Ordinary attention with blocks of kv gathers its queries, and scatters its outputs."""
    nest = place(Schedule(programs.attention(1, 8, 8, 64, 8), Mesh(gpu=4)), gpu="kv")
    assert known_as(nest) == ""


def test_a_product_whose_operands_are_kept_elsewhere():
    """Its own operator, of the same name and tile, in whose ring blocks of `inner` travel, is no AsyncTP."""
    product = programs.all_gather_matmul(8, 8, 8)
    a, b = product.inputs
    other = replace(product, inputs=(replace(a, home="inner"), b))
    ring = place(Schedule(other, Mesh(gpu=4)), gpu=Placement("cols", True))
    moved = Schedule(product, Mesh(gpu=4)).shard("a", "inner", "gpu")
    assert known_as(ring) == known_as(place(moved, gpu=Placement("cols", True))) == "" and known_schedules(other) == {}
    assert known_as(place(Schedule(product, Mesh(gpu=4)), gpu=Placement("cols", True))) == "AsyncTP"
    whole = place(Schedule(product, Mesh(gpu=4)).replicate("a", "gpu"), gpu="cols")
    assert whole.lower().bytes_per_rank == 0 and known_as(whole) == ""


def test_attention_whose_operands_are_kept_elsewhere():
    """Along heads, as in tensor parallelism, or nowhere: nothing is sent, so it is neither Ulysses nor an all-gather."""
    attention = programs.attention(1, 4, 4, 64, 8)
    by_heads = Schedule(attention, Mesh(gpu=4))
    for operand in attention.operands:
        by_heads = by_heads.shard(operand.name, "heads", "gpu")
    whole = Schedule(attention, Mesh(gpu=4)).replicate("k", "gpu").replicate("v", "gpu")
    for schedule in (place(by_heads, gpu="heads"), place(whole, gpu="q")):
        assert schedule.lower().bytes_per_rank == 0 and known_as(schedule) == ""


def test_decoding_finds_the_tree():
    best = search(programs.decode_attention(1, 1, 1, 64, 8), Mesh(gpu=4))[0]
    assert known_as(best.schedule) == "tree"


def test_slow_levels_get_fewer_bytes():
    """Between slow nodes, the heads are not exchanged if the fast links inside can do it."""
    program = programs.attention(1, 8, 8, 4096, 64)
    mesh = Mesh(node=2, gpu=4, speeds={"node": (1e-4, 1e8), "gpu": (1e-5, 1e10)})
    best, flat = search(program, mesh)[0], search(program, Mesh(node=2, gpu=4))[0]
    assert best.seconds < flat.on_mesh(flat.mesh.with_speeds(mesh.speeds)).seconds
    assert best.seconds <= place(Schedule(program, mesh), node="heads", gpu="heads").lower().seconds


def test_a_memory_budget():
    """Plans that hold more are tried in chunks, with the fewest that fit."""
    program, mesh = programs.attention(1, 4, 4, 512, 8, dtype="bfloat16"), Mesh(gpu=8)
    fastest = search(program, mesh)[0]
    least_whole = min(plan.memory for plan in all_plans(program, mesh))
    least = min(plan.memory for plan in all_plans(program, mesh, with_chunks=True))
    assert least < least_whole < fastest.memory
    found = search(program, mesh, memory=fastest.memory - 1)
    assert found and all(plan.memory < fastest.memory for plan in found)
    found = search(program, mesh, memory=least_whole - 1)
    assert found and all(plan.memory < least_whole and plan.schedule.chunked for plan in found)
    assert search(program, mesh, memory=least)[0].memory == least
    with pytest.raises(ValueError, match=f"memory={least - 1}: no plan of attention .* holds less than {least} bytes"):
        search(program, mesh, memory=least - 1)


def test_a_memory_budget_that_no_candidate_needs_to_be_tried_for(monkeypatch):
    """Less than the operands at home need, which every plan holds; with as much, candidates are considered once."""
    program, mesh, calls = programs.attention(1, 4, 4, 512, 8), Mesh(gpu=8), []
    kept = sum(math.prod(program.shape(each)) * program.itemsize(each) // 8 for each in program.operands)
    monkeypatch.setattr(searching, "candidates", lambda *arguments: calls.append(1) or candidates(*arguments))
    with pytest.raises(ValueError, match=f"every plan of attention on .* holds at least {kept} bytes, its inputs and"):
        search(program, mesh, memory=kept - 1)
    assert not calls
    with pytest.raises(ValueError, match="no plan of attention .* holds less than"):
        search(program, mesh, memory=kept)
    assert len(calls) == 1


@pytest.mark.parametrize("mesh", FEWEST, ids=str)
def test_a_memory_budget_finds_the_fastest_that_fits(mesh):
    """Of every whole plan, and of every plan in chunks whose whole plan does not fit."""
    program, times = programs.attention(2, 2 * mesh.ranks, mesh.ranks, 16 * mesh.ranks, 16), dict(point_seconds=1e-10)
    every = sorted(all_plans(program, mesh, **times, with_chunks=True), key=lambda plan: plan.memory)
    for budget in {plan.memory for plan in every[:: 1 + len(every) // 5]}:
        best = search(program, mesh, memory=budget, **times)[0]
        assert best.memory <= budget
        assert best.seconds == pytest.approx(min(plan.seconds for plan in every if plan.memory <= budget))


@pytest.mark.parametrize("mesh", FEWEST, ids=str)
def test_the_pareto_front(mesh):
    """No plan is as fast and holds as little as one of the front, except itself or an equal one."""
    program = programs.attention(1, mesh.ranks, mesh.ranks, 64 * mesh.ranks, 16)
    times = dict(point_seconds=1e-10, call_seconds=1e-6)
    front = pareto(program, mesh, **times)
    every = [(plan.seconds, plan.memory) for plan in all_plans(program, mesh, **times, with_chunks=True)]
    assert front[0].seconds == pytest.approx(min(seconds for seconds, _ in every))
    assert front[-1].memory == min(memory for _, memory in every)
    for plan in front:
        assert not any(s < plan.seconds * (1 - 1e-8) and m <= plan.memory for s, m in every)
        assert not any(s <= plan.seconds * (1 - 1e-8) and m < plan.memory for s, m in every)
    for seconds, memory in every:
        assert any(plan.seconds <= seconds * (1 + 1e-8) and plan.memory <= memory for plan in front)


def test_plans_that_send_nothing():
    """The best of several takes no time, which the reasons of the others are compared with."""
    best, *others = search(programs.attention(4, 2, 2, 64, 8), Mesh(g=1).split("g", a=1))
    assert best.seconds == best.bytes_per_rank == 0
    local = Operand("x", ("rows", "cols"), "rows")
    program = programs.weighted_sum(8, 8)
    program = replace(program, inputs=(replace(local, name="a"), Operand("b", ("cols",))))
    best, *others = search(program, Mesh(g=2))
    assert best.seconds == 0 and others and "s longer than the best" in others[0].reason


def test_parts_have_names_of_their_own():
    found = search(programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4, gpu0=2))
    assert all(len(set(plan.mesh.names)) == len(plan.mesh.names) for plan in found)


def test_an_axis_of_one_rank_adds_no_candidates():
    program = programs.attention(1, 4, 4, 64, 8)
    counts = [len(list(candidates(program, mesh))) for mesh in (Mesh(gpu=4), Mesh(node=1, gpu=4), Mesh(gpu=4, tp=1))]
    assert counts[0] == counts[1] == counts[2]


def test_as_many_parts_as_loops():
    program = programs.attention(2, 2, 2, 64, 8)
    placed = [{part.placement.axis for part in each.parts} for each in candidates(program, Mesh(gpu=16))]
    assert {"batch", "heads", "q", "kv"} in placed


def test_the_candidates_of_many_loops():
    """Every one of six loops can be placed, and the mesh has four parts at most."""
    sizes = dict.fromkeys("abcdef", 64)
    x, y = Operand("x", tuple(sizes), "a"), Operand("y", ("a", "b", "c"), "a")
    axes = tuple(Axis(name, size, "s" if name in y.axes else "r") for name, size in sizes.items())
    program = Program("sums", axes, (x,), (y,), (Result("sum", ("y",)),), "x[a, b, c, d, e, f]")
    found = [each.parts for each in candidates(program, Mesh(gpu=16))]
    assert {len(parts) for parts in found} == {1, 2, 3, 4}
    assert {part.placement.axis for parts in found for part in parts} == set(sizes)
    assert len(list(islice(candidates(program, Mesh(gpu=64)), 100_001))) <= 100_000


def test_a_fabric_gives_the_speed_of_all_levels():
    """Also of parts of a level that was split before."""
    curves = tuple(Curve.fit("p2p", ranks, [(1e3, 1e-5), (1e6, 1e-3)]) for ranks in (2, 4))
    mesh, program = Mesh(node=2, gpu=4).split("gpu", a=2, b=2), programs.attention(1, 8, 8, 1024, 8)
    best, *_ = search(program, mesh, fabric=Fabric(curves))
    assert set(best.mesh.speeds) == {"node", "gpu"}
    assert best.seconds > best.bytes_per_rank / 1e9


@pytest.mark.parametrize(
    "program, gpus, rule",
    [
        (
            programs.attention(1, 2, 2, 30, 8, causal=False),
            4,
            "q: axis q of 30 does not divide over 4 ranks: 30 % 4 = 2",
        ),
        (
            programs.attention(1, 4, 2, 60, 8),
            4,
            "q: axis q of 60 does not divide over 4 ranks (zigzag order: two blocks for each rank): 60 % 8 = 4",
        ),
        (programs.weighted_sum(8, 1), 8, "b: axis cols of 1 does not divide over 8 ranks: 1 % 8 = 1"),
        (
            programs.all_gather_matmul(1, 8, 1, "bfloat16"),
            4,
            "a: axis rows of 1 does not divide over 4 ranks: 1 % 4 = 1",
        ),
    ],
)
@pytest.mark.parametrize("find", [search, pareto])
def test_homes_that_do_not_divide(find, program, gpus, rule):
    """Every operand is kept along an axis by all ranks, in every plan."""
    with pytest.raises(ValueError, match=re.escape(f"no plan of {program.name} on Mesh(g={gpus}): {rule}")):
        find(program, Mesh(g=gpus))


def test_sizes_that_do_not_divide():
    program = programs.weighted_sum(6, 6)
    inputs, outputs = (tuple(replace(each, home=None) for each in some) for some in (program.inputs, program.outputs))
    program = replace(program, inputs=inputs, outputs=outputs)
    with pytest.raises(
        ValueError, match=r"no placement of weighted_sum divides its sizes \(rows 6, cols 6\) over Mesh"
    ):
        search(program, Mesh(gpu=5))


def test_one_rank_and_one_element():
    (plan, *_) = search(programs.weighted_sum(1, 1), Mesh(gpu=1))
    assert plan.bytes_per_rank == 0


def test_other_speeds():
    """They replace those that are known, of levels that the mesh has."""
    mesh = Mesh({"node": (1e-4, 1e8), "gpu": (1e-6, 1e10)}, node=2, gpu=4).split("gpu", a=2, b=2)
    assert mesh.with_speeds({"gpu": (1.0, 1.0)}).speeds == {"node": (1e-4, 1e8), "gpu": (1.0, 1.0)}
    with pytest.raises(ValueError, match="speed of unknown mesh axis 'a': expected node, gpu"):
        mesh.with_speeds({"a": (1.0, 1.0)})


@pytest.mark.parametrize("name", ["chunk", "inner", "q", "i", "nest"])
def test_names_of_mesh_axes_do_not_matter(name):
    """Also where schedules call their digits so."""
    program = programs.attention(1, 8, 8, 128, 8)
    fronts = [pareto(program, Mesh(**{each: 2, "y": 2})) for each in ("x", name)]
    assert any(plan.schedule.chunked for plan in fronts[0])
    one, other = ([(plan.bytes_per_rank, plan.memory, plan.schedule.chunks) for plan in each] for each in fronts)
    assert one == other


def test_wrong_arguments():
    program, mesh = programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4)
    for options, message in (
        (dict(top=0), "top=0: expected at least 1"),
        (dict(overlap=1.5), "overlap=1.5: expected times of at least 0 and an overlap of at most 1"),
        (dict(fabric=3), "speed of mesh axis gpu is 3: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            search(program, mesh, **options)


SCRIPT = """
from commir import Mesh, programs, search
plans = search(programs.attention(1, 8, 2, 128, 16), Mesh(node=2, gpu=4, speeds={"node": (1e-4, 1e8)}))
hashes = " ".join(plan.hash for plan in plans)
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 10))])
def test_hashes_do_not_depend_on_the_process(seed):
    """A process with another seed of Python's hashes finds the same plans as this one."""
    exec(SCRIPT, here := {})
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", SCRIPT + "print(hashes)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == here["hashes"]


@pytest.mark.parametrize("sizes", [(64,), (512,), (16, 32)])
def test_many_ranks(sizes):
    program = programs.attention(1, 32, 8, 8192, 128)
    best, *others = search(program, mesh_of(*sizes))
    assert (
        others
        and best.bytes_per_rank
        < place(Schedule(program, mesh_of(*sizes)), **dict.fromkeys(mesh_of(*sizes).names, "q")).lower().bytes_per_rank
    )


def test_one_token_of_one_head():
    """A program without loops to divide has a plan on one rank."""
    (plan,) = search(programs.attention(1, 1, 1, 1, 64, dtype="float64"), Mesh(gpu=1))
    verify(plan)


def test_one_chunk_is_no_chunk():
    schedule = place(Schedule(programs.attention(1, 4, 4, 16, 8), Mesh(gpu=2)), gpu="q")
    assert in_chunks(schedule, "heads", 1) == schedule


def test_a_fabric_must_have_messages_between_pairs():
    curve = Curve.fit("all_reduce", 4, [(2**n, 1e-5 + 2**n * 1e-9) for n in range(8, 20)])
    with pytest.raises(ValueError, match="the fabric of mesh axis gpu has neither p2p nor all_gather"):
        search(programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4), fabric=Fabric((curve,)))
    with pytest.raises(ValueError, match="speed of mesh axis gpu is .* expected .* or a Fabric"):
        search(programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4), fabric=curve)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_the_best_plans_are_verified_if_asked(monkeypatch, mesh):
    """A plan that the verifier rejects is not returned."""
    program, seen = programs.attention(1, mesh.ranks, mesh.ranks, 4 * mesh.ranks, 8), []
    monkeypatch.setattr(searching, "verify", seen.append)
    found = search(program, mesh, top=3, verified=2)
    assert seen == found[:2] and len(found) == 3
    monkeypatch.undo()
    assert search(program, mesh, top=3, verified=9) == found

    def reject(plan):
        raise VerificationError(f"{plan.schedule}: wrong")

    monkeypatch.setattr(searching, "verify", reject)
    with pytest.raises(VerificationError, match="attention on"):
        search(program, mesh, verified=1)


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
        for plan, chunked in every:
            firsts = (next((each for each in plans if each.memory <= budget), None) for plans in chunked.values())
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
