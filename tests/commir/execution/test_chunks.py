"""Plans that take their steps for one chunk after the other. Oracles: those of whole plans; the plan without chunks."""

import pytest
import torch
import torch.distributed as dist

from attention_problems import Problem
from benchmarks.support.plans import all_plans
from commir import Mesh, Plan, Schedule, differentiable, execute, interpret, programs, search, verify
from commir.execution.gradient import backward_plan
from commir.execution.state import Count
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import Placement, in_chunks, place
from loop_programs import UP_TO_TWELVE, assert_close, cases, mesh_of

RING_KV, RING_Q = Placement("q", True), Placement("kv", True)
LAYOUTS = [  # world, mesh, placement, the axis with chunks
    (2, dict(x=2), dict(x="heads"), "heads"),
    (2, dict(x=2), dict(x=RING_KV), "q"),
    (2, dict(x=2), dict(x=RING_Q), "batch"),
    (4, dict(x=2, y=2), dict(x=RING_Q, y=RING_KV), "heads"),
    (4, dict(x=2, y=2), dict(x=RING_KV, y="heads"), "heads"),
    (4, dict(x=2, y=2), dict(x="kv", y="q"), "q"),
    (4, dict(x=4), dict(x="heads"), "batch"),
]


def plan_of(mesh, placement, axis, seq, chunks=2, dtype="float64"):
    program = programs.attention(4, 8, 8, seq, 8, dtype=dtype)
    return in_chunks(place(Schedule(program, Mesh(**mesh)), **placement), axis, chunks).lower()


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3,)])
def test_all_searched_plans_in_chunks(sizes, number):
    """Each is verified, computes what the oracle does, and sends and holds what is predicted."""
    case = cases(mesh_of(*sizes).ranks)[number]
    chosen = [plan for plan in all_plans(case.program, mesh_of(*sizes), with_chunks=True) if plan.schedule.chunked]
    assert chosen
    for plan in chosen[:: 1 + len(chosen) // 6]:
        verify(plan)
        counts = []
        assert_close(interpret(plan, case.inputs, counts), case.expected)
        assert {(count.sent, count.peak) for count in counts} == {(plan.bytes_per_rank, plan.memory)}
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("mesh", [*UP_TO_TWELVE, mesh_of(2, 2, 2)], ids=str)
def test_all_plans_in_chunks_on_up_to_twelve_ranks_pass(mesh, number):
    """Each takes the steps of a plan without chunks, and test_verifier.py verifies all of those.

    What chunks add is how the tensors of a rank are cut. One plan of each way to cut them is verified.
    """
    whole, cuts = set(), {}
    for plan in all_plans(cases(mesh.ranks)[number].program, mesh, with_chunks=True):
        if plan.schedule.chunked:
            assert plan.steps in whole
            cuts.setdefault(cut_of(plan), plan)
        else:
            whole.add(plan.steps)
    assert cuts or mesh.ranks == 1
    for plan in cuts.values():
        verify(plan)


def cut_of(plan):
    """The digits of the axis with chunks, which of them numbers the chunks, and where each operand is at home."""
    axis, piece = plan.digits.piece(plan.schedule.chunked)
    homes = [str(plan.digits.home(operand)) for operand in (*plan.inputs(), *plan.program.outputs)]
    return axis, piece, tuple(plan.digits.sizes[axis]), tuple(homes)


@pytest.mark.parametrize("world, mesh, placement, axis", LAYOUTS)
def test_ranks_compute_what_the_whole_plan_does(ranks, world, mesh, placement, axis):
    problem = Problem.of(8 * world, 8, 8, causal=True, batch=4, head_dim=8)
    plan = plan_of(mesh, placement, axis, 8 * world)
    inputs = dict(zip("qkv", problem.inputs, strict=False))

    def run(rank):
        count = Count()
        return execute(plan, plan.shard(inputs, rank), dist.group.WORLD, count), (count.sent, count.peak)

    results = ranks(run, world)
    assert {counted for _, counted in results} == {(plan.bytes_per_rank, plan.memory)}
    found = plan.unshard([outputs for outputs, _ in results])
    assert_close(found, dict(zip(("out", "lse"), problem.answers[:2], strict=True)))


@pytest.mark.parametrize("world, mesh, placement, axis", LAYOUTS)
def test_gradients(ranks, world, mesh, placement, axis):
    """The gradients of keys have no chunks of queries."""
    problem = Problem.of(8 * world, 8, 8, causal=True, batch=4, head_dim=8)
    plan = plan_of(mesh, placement, axis, 8 * world)
    inputs = dict(zip("qkv", problem.inputs, strict=False))
    if axis == "q":
        with pytest.raises(ValueError, match="chunks of q have no backward plan, as some gradients are sums over q"):
            backward_plan(plan)
        return
    verify(backward_plan(plan))

    def run(rank):
        local, count = plan.shard(inputs, rank), Count()
        dout = plan.shard({**inputs, "q": problem.inputs[3]}, rank)["q"]
        leaves = [local[name].requires_grad_() for name in "qkv"]
        out = differentiable(plan, dist.group.WORLD, count)(*leaves)
        return dict(zip("qkv", torch.autograd.grad(out, leaves, dout), strict=True)), count.sent

    results = ranks(run, world)
    assert {sent for _, sent in results} == {plan.bytes_per_rank + backward_plan(plan).bytes_per_rank}
    found = plan.unshard([gradients for gradients, _ in results])
    assert_close(found, dict(zip("qkv", problem.answers[2:], strict=True)), 1e-12)


@pytest.mark.parametrize("placement, axis", [("heads", "heads"), (RING_KV, "heads"), (RING_KV, "q")])
def test_chunks_hold_less(placement, axis):
    """As many bytes are sent; a ring whose queries have chunks sends keys and values once for each."""
    whole = place(Schedule(programs.attention(1, 32, 32, 1024, 16, dtype="bfloat16"), Mesh(x=2)), x=placement)
    plans = [whole.lower(), *(in_chunks(whole, axis, number).lower() for number in (4, 16))]
    assert plans[0].memory > plans[1].memory > plans[2].memory
    factors = [1, 4, 16] if axis == "q" else [1, 1, 1]
    assert [plan.bytes_per_rank for plan in plans] == [factor * plans[0].bytes_per_rank for factor in factors]
    assert plans[2].messages == 16 * plans[0].messages
    assert "in 16 chunks" in plans[2].explain()


def test_what_cannot_have_chunks():
    schedule = Schedule(programs.attention(2, 4, 2, 48, 8), Mesh(x=2))
    ring = place(schedule, x=RING_KV)
    with pytest.raises(IllegalSchedule, match=r"chunk\(heads\): heads is the innermost digit of heads; tile it"):
        ring.chunk("heads")
    with pytest.raises(
        IllegalSchedule, match=r"chunk\(kv\.o\): out is not indexed by kv, so chunks would have to be combined"
    ):
        schedule.tile("kv", 2).chunk("kv.o")
    with pytest.raises(IllegalSchedule, match="attention has no loop 'dim' that could have chunks"):
        in_chunks(ring, "dim", 2)
    with pytest.raises(
        IllegalSchedule, match=r"chunk\(batch\.o\): heads\.chunk is chunked already, and a schedule has chunks of one"
    ):
        in_chunks(ring, "heads", 2).tile("batch", 2).chunk("batch.o")
    with pytest.raises(IllegalSchedule, match=r"q\.x is parallelized on x already; chunk another digit"):
        ring.chunk("q.x")
    with pytest.raises(IllegalSchedule, match=r"heads\.chunk is chunked already; tile it before that"):
        in_chunks(ring, "heads", 2).tile("heads.chunk", 2)
    with pytest.raises(
        IllegalSchedule, match=r"reorder\(.*\): heads\.chunk is chunked, so it cannot be a loop of a rank"
    ):
        in_chunks(ring, "heads", 2).reorder("kv.x", "heads.chunk")
    moved = place(Schedule(programs.matmul_reduce_scatter(24, 12, 24), Mesh(x=2, y=2)), x="cols", y="inner")
    with pytest.raises(IllegalSchedule, match=r"chunk\(rows\.chunk\): c is split over ranks along this digit at home"):
        in_chunks(moved.replicate("c", "x"), "rows", 2).lower()
    with pytest.raises(IllegalSchedule, match=r"k: 2 heads do not divide over 4 blocks: 2 % 4 = 2"):
        in_chunks(ring, "heads", 4).lower()
    with pytest.raises(IllegalSchedule, match=r"chunk\(q\.o\): q is split over ranks along this digit at home"):
        place(schedule, x="heads").tile("q", 2, "q.o", "q.i").chunk("q.o").lower()
    with pytest.raises(
        IllegalSchedule, match=r"chunk\(batch\.chunk\): selective_scan has a scan, which cannot be divided"
    ):
        in_chunks(place(Schedule(programs.selective_scan(2, 48, 4), Mesh(x=2)), x="seq"), "batch", 2).lower()


def test_gradients_of_other_schedules_are_refused():
    """Of blocks that `place` would put elsewhere; their plans are right."""
    schedule = Schedule(programs.attention(1, 8, 8, 48, 8), Mesh(x=2))
    tiled = schedule.tile("heads", 2, "h.c", "h.r").tile("h.r", 2, "h.x", "h.i").parallelize("h.x", "x")
    for plan in (tiled.lower(), tiled.chunk("h.c").lower()):
        verify(plan)
        with pytest.raises(ValueError, match="only schedules that `place` and `in_chunks` make have a backward plan"):
            backward_plan(plan)


def test_queries_that_travel_have_chunks_too():
    """Keys and values stay where they are, so nothing is sent again."""
    program = programs.attention(1, 1, 1, 1024, 16, dtype="bfloat16")
    whole = place(Schedule(program, Mesh(g=2)), g=RING_Q)
    plan = in_chunks(whole, "q", 16).lower()
    verify(plan)
    assert plan.bytes_per_rank == whole.lower().bytes_per_rank
    assert search(program, Mesh(g=2), memory=plan.memory)[0].bytes_per_rank <= plan.bytes_per_rank
