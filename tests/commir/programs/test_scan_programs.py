"""Scans over a sequence that ranks share. Oracle: one rank's recurrence, token by token; the formulas of the messages."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.plans import all_plans
from commir import Mesh, Plan, Schedule, execute, interpret, programs, search, verify
from commir.execution import loop_steps
from commir.execution.state import Count
from commir.execution.verifier import VerificationError
from commir.programs.scan_programs import pass_states
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import place
from commir.searching.candidates import candidates
from commir.searching.cost import CostModel
from loop_programs import assert_close, mesh_of, one_rank_scan, plans, random_inputs


def one_rank_delta(q, k, v, g, beta):
    """y of a gated delta rule, token by token, where s <- exp(g) (1 - beta k k^T) s + beta k v^T."""
    repeat = [v.shape[2] // (t.shape[2] if t.ndim == 4 else 1) for t in (q, k)]
    q, k = (t if t.ndim == 4 else t.unsqueeze(2) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(n, 2) for t, n in zip((q, k), repeat, strict=True))
    state, outputs = torch.zeros(*v[:, 0].shape[:2], k.shape[3], v.shape[3], dtype=v.dtype), []
    for t in range(v.shape[1]):
        rate, column = beta[:, t, :, None, None], k[:, t].unsqueeze(-1)
        kept = torch.eye(k.shape[3], dtype=v.dtype) - rate * column @ column.mT
        state = g[:, t, :, None, None].exp() * kept @ state + rate * column @ v[:, t].unsqueeze(-2)
        outputs.append((state.mT @ q[:, t].unsqueeze(-1)).squeeze(-1) / k.shape[3] ** 0.5)
    return torch.stack(outputs, 1)


def selective(batch, seq, heads, dtype="float64", order="zigzag", groups=1):
    """A selective scan with small states."""
    return programs.selective_scan(batch, seq, heads, 2, 3, dtype, order, groups)


def delta(batch, seq, heads, dtype="float64", order="zigzag", groups=1):
    """A gated delta rule with small states."""
    return programs.gated_delta(batch, seq, heads, 3, 2, groups, dtype, order)


ORACLES = {"selective_scan": one_rank_scan, "gated_delta": one_rank_delta}
every_scan = pytest.mark.parametrize("make", (selective, delta))


@every_scan
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("heads, groups", [(12, 1), (5, 1), (24, 12), (6, 2)])
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2), (2, 3)])
def test_every_plan_equals_one_rank(sizes, heads, groups, order, make):
    """Also where the heads do not divide, so that summaries are gathered, and where heads share B and C, or q and k."""
    mesh = mesh_of(*sizes)
    program = make(2, 6 * mesh.ranks, heads, "float64", order, groups)
    inputs = random_inputs(program)
    expected = {"y": ORACLES[program.name](**inputs)}
    found = plans(program, mesh)
    assert any("seq on x" in str(plan.schedule) for plan in found)
    for plan in found:
        counts = []
        assert_close(interpret(plan, inputs, counts), expected)
        assert {(count.sent, count.peak) for count in counts} == {(plan.bytes_per_rank, plan.memory)}
        verify(plan)
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("dim, heads", [(1, 24), (4, 12)])
@pytest.mark.parametrize("gpus", [2, 3, 4, 6])
def test_bytes_do_not_depend_on_the_length(gpus, dim, heads):
    """With s numbers of a state and d step sizes: 2 (P-1) (s + d) gathered, (P-1)/P (4 s + 2 d) sliced."""
    sent = set()
    for seq in (4 * gpus, 40 * gpus):
        program = programs.selective_scan(2, seq, heads, dim, 8)
        sent.add(place(Schedule(program, Mesh(x=gpus)), x="seq").lower().bytes_per_rank)
    s, d = 2 * heads * dim * 8, 2 * heads
    expected = 2 * (gpus - 1) * (s + d) if gpus == 2 else (gpus - 1) * (4 * s + 2 * d) // gpus
    assert sent == {4 * expected}
    few = programs.selective_scan(2, 4 * gpus, gpus + 1, dim, 8)
    s, d = 2 * (gpus + 1) * dim * 8, 2 * (gpus + 1)
    gathered = place(Schedule(few, Mesh(x=gpus)), x="seq").lower()
    assert gathered.bytes_per_rank == 4 * 2 * (gpus - 1) * (s + d)


@pytest.mark.parametrize("order, blocks", [("zigzag", 2), ("contiguous", 1)])
@pytest.mark.parametrize("gpus", [2, 3, 4, 6])
def test_bytes_of_matrices(gpus, order, blocks):
    """With s numbers of a state and m of a matrix: (P-1) (s + m) gathered, (P-1)/P (2 s + m) sliced, for each block."""
    for heads, is_sliced in ((12, True), (gpus + 1, False)):
        s, m = 2 * heads * 3 * 5, 2 * heads * 3 * 3
        expected = (gpus - 1) * (2 * s + m) // gpus if is_sliced else (gpus - 1) * (s + m)
        for seq in (4 * gpus, 40 * gpus):
            program = programs.gated_delta(2, seq, heads, 3, 5, order=order)
            assert place(Schedule(program, Mesh(x=gpus)), x="seq").lower().bytes_per_rank == 4 * blocks * expected


@every_scan
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_the_interpreter_does(ranks, world, make):
    program = make(1, 6 * world, 8)
    inputs = random_inputs(program)
    found = plans(program, mesh_of(*([2, 2] if world == 4 else [2])))

    def run(rank):
        results = []
        for plan in found:
            count = Count()
            outputs = execute(plan, plan.shard(inputs, rank), dist.group.WORLD, count)
            results.append((outputs, count.sent == plan.bytes_per_rank))
        return results

    results = ranks(run, world)
    for number, plan in enumerate(found):
        assert all(each[number][1] for each in results)
        assert_close(plan.unshard([each[number][0] for each in results]), interpret(plan, inputs), 0)


@every_scan
@pytest.mark.parametrize("mesh", [Mesh(g=2), Mesh(g=4), Mesh(g=6), Mesh(n=2, g=4)], ids=str)
def test_closed_forms_are_those_of_the_plans(mesh, make):
    for heads in (48, 5):
        program = make(4, 2 * mesh.ranks, heads, "bfloat16")
        model = CostModel(program, mesh)
        for candidate in candidates(program, mesh):
            cost, plan = model.cost(candidate), candidate.schedule(program, mesh).lower()
            assert (cost.sent, cost.messages) == (plan.bytes_per_rank, plan.messages), str(candidate)
            assert model.memory(model.held(candidate)) <= plan.memory and cost.seconds <= plan.seconds * (1 + 1e-9)


@every_scan
@pytest.mark.parametrize("mesh", [Mesh(g=4), Mesh(n=2, g=3)], ids=str)
def test_the_time_of_tiles(mesh, make):
    """Where ranks share the sequence, they compute the recurrence twice: for the summaries, and for the outputs."""
    program = make(4, 4 * mesh.ranks, 12, "float32")
    times = dict(point_seconds=1e-7, call_seconds=1e-3)
    tile = 1e-3 + 1e-7 * 4 * 4 * mesh.ranks * 12 * 2 * 3 / mesh.ranks
    model, timed = CostModel(program, mesh, **times), all_plans(program, mesh, **times)
    for candidate, plan, untimed in zip(candidates(program, mesh), timed, all_plans(program, mesh), strict=True):
        tiles = 1 + any(part.placement.axis == "seq" for part in candidate.parts)
        assert plan.seconds == pytest.approx(untimed.seconds + tiles * tile), str(candidate)
        assert untimed.with_tile(**times).seconds == pytest.approx(plan.seconds), str(candidate)
        assert tiles * tile * (1 - 1e-9) <= model.cost(candidate).seconds <= plan.seconds * (1 + 1e-9), str(candidate)


@pytest.mark.parametrize("make", (programs.selective_scan, programs.gated_delta))
def test_long_sequences_pass_states_and_short_ones_exchange_heads(make):
    def best(seq):
        return search(make(1, seq, 64, 4, 16), Mesh(gpu=4))[0]

    assert "seq on gpu" in str(best(1 << 16).schedule)
    assert "heads on gpu" in str(best(16).schedule)


def test_a_scan_is_not_shifted():
    program = programs.selective_scan(1, 16, 4)
    schedule = Schedule(program, Mesh(x=2)).tile("seq", 2).tile("heads", 2).parallelize("heads.o", "x")
    with pytest.raises(IllegalSchedule, match="seq is scanned, and a scan has only one order"):
        schedule.shift("seq.o", "x")


@pytest.mark.parametrize("gpus", [2, 3])
def test_zigzag_order_is_that_of_an_operand_at_home(gpus):
    """Without one, elements are in the order of the sequence, and states would pass in another."""
    schedule = Schedule(programs.selective_scan(1, 12 * gpus, 4), Mesh(g=gpus))
    for name in ("x", "dt", "B", "C", "y"):
        schedule = schedule.replicate(name, "g")
    with pytest.raises(
        IllegalSchedule, match="seq is in zigzag order, so at least one operand must be sharded along it at home on g"
    ):
        schedule.tile("seq", gpus).parallelize("seq.o", "g").lower()


@every_scan
@pytest.mark.parametrize("gpus, heads", [(4, 3), (16, 16), (16, 3), (48, 3)])
@pytest.mark.parametrize("wrong", ("one head", "last block"))
def test_errors_of_single_states_are_found_on_many_ranks(monkeypatch, wrong, gpus, heads, make):
    """Each head is compared in numbers of its own size, and what the first block contributes reaches the last one."""
    plan = place(Schedule(make(1, 4 * gpus, heads), Mesh(gpu=gpus)), gpu="seq").lower()

    def pass_wrong_states(program, states, *decays, head):
        entering, head = pass_states(program, states, *decays), head % states.shape[2]
        if wrong == "one head":
            entering[:, :, head] *= 1 + 1e-9
        else:  # in zigzag order it is the second one of rank 0
            states = torch.cat([torch.zeros_like(states[:, :1]), states[:, 1:]], 1)
            entering[:, 1, head] = pass_states(program, states, *decays)[:, 1, head]
        return entering

    verify(plan)
    for head in range(heads if heads < gpus else 1):  # in slices, a rank passes the states of one head
        monkeypatch.setattr(loop_steps, "pass_block_states", partial(pass_wrong_states, head=head))
        with pytest.raises(VerificationError, match="y"):
            verify(plan)


@pytest.mark.parametrize("gpus, heads", [(2, 2), (4, 3), (16, 16)])
def test_a_transposed_matrix_is_found(monkeypatch, gpus, heads):
    """Blocks of one token would not tell, because their matrices are symmetric."""
    plan = place(Schedule(programs.gated_delta(1, 4 * gpus, heads), Mesh(gpu=gpus)), gpu="seq").lower()
    verify(plan)
    monkeypatch.setattr(
        loop_steps, "pass_block_states", lambda program, states, maps: pass_states(program, states, maps.mT)
    )
    with pytest.raises(VerificationError, match="y"):
        verify(plan)
