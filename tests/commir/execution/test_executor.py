"""Plans on real ranks. Oracle: the interpreter; attention2d, whose results and closed-form bytes are the same."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import attention2d
from commfabric.collectives.counted import Counter
from commir import Mesh, Schedule, differentiable, execute, interpret, known, programs, verify
from commir.execution.attention_grids import grid_of
from commir.execution.gradient import backward_plan
from commir.execution.state import Count
from commir.ir.program import Axis, Operand, Program, Result
from commir.scheduling.placements import Placement, place
from loop_programs import assert_close, cases, mesh_of, plans, random_inputs
from shared import references_kept


def float_inputs(program):
    return {name: x.float() for name, x in random_inputs(program).items()}


def run_plans(rank, chosen, inputs):
    """[(outputs, bytes sent, bytes on the wire, peak memory)] of each plan, on this rank."""
    found = []
    for plan in chosen:
        count, counter = Count(), Counter()
        outputs = execute(plan, plan.shard(inputs, rank), dist.group.WORLD, count, counter)
        found.append((outputs, count.sent, counter.sent, count.peak))
    return found


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_the_interpreter_does(ranks, world, number):
    case = cases(world)[number]
    chosen = plans(case.program, mesh_of(*([2, 2] if world == 4 else [2])))
    chosen = chosen[:: max(1, len(chosen) // 12)]
    results = ranks(run_plans, world, chosen, case.inputs)
    for index, plan in enumerate(chosen):
        whole = plan.unshard([result[index][0] for result in results])
        simulated = interpret(plan, case.inputs)
        assert all(torch.equal(whole[name], simulated[name]) for name in whole), plan.schedule
        assert_close(whole, case.expected)
        for _, sent, on_wire, peak in (result[index] for result in results):
            assert (sent, on_wire, peak) == (plan.bytes_per_rank, plan.bytes_per_rank, plan.memory), plan.schedule


@pytest.mark.parametrize("name, sizes", [("TokenRing", [4]), ("Mnemosyne", [2, 2]), ("LoongTrain", [2, 2, 2])])
def test_schedules_of_other_papers(ranks, name, sizes):
    """By their names: verified, and exact on ranks, which send the plan's bytes; forward, backward or decoding."""
    world = 2 ** len(sizes) if len(sizes) > 1 else 4
    for case in cases(world)[2:3] if name == "Mnemosyne" else cases(world)[:2]:
        plan = known(Schedule(case.program, mesh_of(*sizes)), name).lower()
        verify(plan)
        results = ranks(run_plans, world, [plan], case.inputs)
        assert_close(plan.unshard([result[0][0] for result in results]), case.expected)
        assert {result[0][1:] for result in results} == {(plan.bytes_per_rank, plan.bytes_per_rank, plan.memory)}


@pytest.mark.parametrize("world", [2])
def test_a_count_of_several_runs(ranks, world):
    """Bytes that are sent add up; of what is held, the most in any run counts, also in a backward pass."""
    plan = place(Schedule(programs.attention(1, 4, 4, 8 * world, 8), Mesh(x=world)), x=Placement("q", True)).lower()
    inputs = float_inputs(plan.program)

    def run(rank):
        local, count = plan.shard(inputs, rank), Count()
        for _ in range(3):
            execute(plan, local, dist.group.WORLD, count)
        several = count.sent, count.held, count.peak
        leaves = [local[name].requires_grad_() for name in "qkv"]
        differentiable(plan, dist.group.WORLD, count := Count())(*leaves).sum().backward()
        return several, (count.held, count.peak)

    for several, both_ways in ranks(run, world):
        assert several == (3 * plan.bytes_per_rank, 0, plan.memory)
        assert both_ways == (0, max(plan.memory, backward_plan(plan).memory))


GRIDS = [  # world, rows, cols, ulysses, overlap
    (2, 2, 1, 1, True),
    (4, 2, 2, 1, False),
    (4, 2, 2, 1, True),
    (4, 4, 1, 1, True),
    (4, 4, 1, 1, False),
    (4, 1, 4, 1, True),
    (4, 1, 2, 2, False),
    (4, 2, 1, 2, True),
]


def against_attention2d(rank, rows, cols, ulysses, overlap, dtype):
    """The same grid as a plan and by attention2d: (largest difference, bytes of the plan, bytes of the formula)."""
    program = programs.attention(1, 4, 2, 48, 8, dtype=str(dtype).split(".")[1])
    mesh = Mesh(cols=cols, rows=rows, heads=ulysses)
    chosen = dict(cols=Placement("kv", overlap and cols > 1), rows=Placement("q", overlap and rows > 1), heads="heads")
    plan = place(Schedule(program, mesh), **chosen).shard("lse", "heads", "heads").lower()
    inputs = {name: x.to(dtype) for name, x in random_inputs(program).items()}
    schedule = attention2d.Attention2D(dist.group.WORLD, rows, cols, ulysses, overlap=overlap)
    local, count = plan.shard(inputs, rank), Count()
    outputs = execute(plan, local, dist.group.WORLD, count)
    expected = schedule(local["q"], local["k"], local["v"], causal=True)
    formula = schedule.volume(1, 48, 4, 2, 8, dtype.itemsize).forward
    return (outputs["out"] - expected).abs().max().item(), count.sent, plan.bytes_per_rank, formula


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world, rows, cols, ulysses, overlap", GRIDS)
def test_grids_have_the_results_and_bytes_of_attention2d(ranks, world, rows, cols, ulysses, overlap, dtype):
    """lse stays divided by heads, as attention2d leaves it: nobody has asked for it.

    Both merge the same parts in the same order. torch's exp rounds differently where strides keep it from being vectorized.
    """
    for difference, *nbytes in ranks(against_attention2d, world, rows, cols, ulysses, overlap, dtype):
        assert difference <= 4 * torch.finfo(dtype).eps
        assert len(set(nbytes)) == 1, nbytes


def call(rank, make):
    """Let `make` call plans of an operator with its inputs."""
    ranks = dist.get_world_size()
    case = cases(ranks)[0]
    make(rank, plans(case.program, mesh_of(ranks)), case.inputs)


def differing(rank, make):
    """The message of the error that `make` raises on this rank."""
    try:
        call(rank, make)
    except (AttributeError, ValueError) as error:
        return str(error)


def another_plan(rank, chosen, inputs):
    plan = chosen[rank == dist.get_world_size() - 1]
    execute(plan, plan.shard(inputs, rank), dist.group.WORLD)


def a_wrong_shape(rank, chosen, inputs):
    local = chosen[0].shard(inputs, rank)
    execute(chosen[0], {name: x[:, : 4 - (rank == 1)] for name, x in local.items()}, dist.group.WORLD)


def no_tensor(rank, chosen, inputs):
    execute(chosen[0], {**chosen[0].shard(inputs, rank), **({"q": None} if rank == 1 else {})}, dist.group.WORLD)


def a_larger_mesh(rank, chosen, inputs):
    execute(plans(cases(4)[0].program, mesh_of(4))[0], inputs, dist.group.WORLD)


def a_gradient_on_one_rank(rank, chosen, inputs):
    """Of a plan that attention2d computes, whose other ranks would wait in the backward pass."""
    plan = next(plan for plan in chosen if grid_of(plan.schedule) is not None)
    local = {name: x.requires_grad_(name == "v") for name, x in plan.shard(inputs, rank).items()}
    with torch.set_grad_enabled(rank == 1):
        execute(plan, local, dist.group.WORLD)


def no_data(rank, chosen, inputs):
    local = chosen[0].shard(inputs, rank)
    execute(chosen[0], {name: x.to("meta") if rank == 1 else x for name, x in local.items()}, dist.group.WORLD)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    "make, message",
    [
        (a_gradient_on_one_rank, "rank 1 got v.requires_grad=True, rank 0 got v.requires_grad=False"),
        (another_plan, ", rank 0 got plan="),
        (no_data, "rank 1 got k='torch.float64 on meta', rank 0 got k='torch.float64 on cpu'"),
        (a_wrong_shape, ", this rank's block (rank 1)"),
        (no_tensor, "'NoneType' object has no attribute 'dtype' (rank 1)"),
        (a_larger_mesh, "ranks, and the mesh of the plan has 4"),
    ],
)
def test_errors_are_raised_on_every_rank(ranks, world, make, message):
    for error in ranks(differing, world, make):
        assert message in error and len(error) < 500


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("make", [another_plan, a_wrong_shape])
def test_errors_do_not_keep_the_group(ranks, world, make):
    assert ranks(lambda rank: references_kept(lambda: call(rank, make)), world) == [0] * world


@pytest.mark.parametrize("world", [2])
def test_autocast_changes_nothing(ranks, world):
    """Neither the results, nor their dtype, nor what is sent: of a product, and of attention by attention2d."""
    product = programs.all_gather_matmul(4 * world, 4 * world, 8, "float32")
    attention = programs.attention(1, 4, 4, 4 * world, 8)
    chosen = [
        place(Schedule(product, Mesh(x=world)), x="cols").lower(),
        place(Schedule(attention, Mesh(x=world)), x="q").lower(),
    ]
    inputs = [float_inputs(plan.program) for plan in chosen]

    def run(rank):
        results = []
        for is_on in (False, True):
            counter = Counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                outputs = [
                    execute(plan, plan.shard(given, rank), dist.group.WORLD, counter=counter)
                    for plan, given in zip(chosen, inputs, strict=True)
                ]
                whole = [interpret(plan, given) for plan, given in zip(chosen, inputs, strict=True)]
            results.append((outputs + whole, counter.sent))
        return results

    for (usual, sent), (under_autocast, sent_then) in ranks(run, world):
        assert sent == sent_then
        for a, b in zip(usual, under_autocast, strict=True):
            assert all(torch.equal(a[name], b[name]) and b[name].dtype == torch.float32 for name in a)


@pytest.mark.parametrize("world", [3])
def test_some_ranks_of_several(ranks, world):
    """Members of a smaller group compute, and the others are told that they are no members."""
    plan = place(Schedule(programs.weighted_sum(6, 8), Mesh(x=2)), x="cols").lower()
    inputs = float_inputs(plan.program)

    def run(rank):
        group = dist.new_group([0, 1])
        if rank < 2:
            return execute(plan, plan.shard(inputs, rank), group)
        with pytest.raises(ValueError, match="is not a process group of this rank"):
            execute(plan, plan.shard(inputs, 0), group)

    found = ranks(run, world)
    expected = interpret(plan, inputs)
    assert torch.equal(plan.unshard(found[:2])["c"], expected["c"]) and found[2] is None


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("placement", ["q", "heads", Placement("q", True)], ids=str)
def test_other_lengths_of_queries_and_keys(ranks, world, placement):
    """attention2d has one length for both, so the plan's steps are taken; there is no backward program."""
    program = programs.attention(1, 4, 4, 8 * world, 8, causal=False, dtype="float64").resized(kv=16 * world)
    plan = place(Schedule(program, Mesh(x=world)), x=placement).lower()
    inputs = random_inputs(program)
    whole = plan.unshard(ranks(lambda rank: execute(plan, plan.shard(inputs, rank), dist.group.WORLD), world))
    assert grid_of(plan.schedule) is None
    assert_close(whole, interpret(plan, inputs))
    with pytest.raises(ValueError, match="has no backward program"):
        differentiable(plan)


@pytest.mark.parametrize("make, first", [
    (programs.selective_scan, "x"), (programs.selective_scan, "dt"), (programs.selective_scan, "A"),
    (programs.gated_delta, "q"), (programs.gated_delta, "g"),
])  # fmt: skip
def test_outputs_have_the_dtype_of_the_narrow_inputs(make, first):
    """Whichever input is first; some are kept in at least fp32. Every rank holds and sends what is predicted."""
    program = make(2, 8, 4, dtype="bfloat16")
    program = replace(program, inputs=tuple(sorted(program.inputs, key=lambda each: each.name != first)))
    wide = "dt", "A", "g", "beta"
    inputs = {name: x if name in wide else x.bfloat16() for name, x in float_inputs(program).items()}
    for placement in ("heads", "seq"):
        plan, counts = place(Schedule(program, Mesh(x=2)), x=placement).lower(), []
        assert interpret(plan, inputs, counts)["y"].dtype == torch.bfloat16
        assert {(count.sent, count.peak) for count in counts} == {(plan.bytes_per_rank, plan.memory)}


def test_statistics_are_wide():
    plan = place(Schedule(programs.selective_scan(1, 8, 4, dtype="bfloat16"), Mesh(x=2)), x="heads").lower()
    inputs = {name: x.bfloat16() for name, x in random_inputs(plan.program).items()}
    with pytest.raises(ValueError, match="dt has dtype torch.bfloat16: expected torch.float32, as x is torch.bfloat16"):
        interpret(plan, inputs)


@pytest.mark.parametrize("dtypes, message", [
    (dict(x="float32", y="float64"), "y has dtype torch.float64: expected torch.float32, as x is torch.float32"),
    (dict(x="float16", y="float16"), "x has dtype torch.float16: expected torch.float32, as x is torch.float16"),
])  # fmt: skip
def test_dtypes_where_all_inputs_are_wide(dtypes, message):
    """None of them is narrower than the results, whose dtype they therefore give."""
    x, y, c = Operand("x", ("i",), "i", is_wide=True), Operand("y", ("i",), is_wide=True), Operand("c", ("i",), "i")
    program = Program("product", (Axis("i", 4),), (x, y), (c,), (Result("sum", ("c",)),), "x[i] * y[i]")
    plan = place(Schedule(program, Mesh(g=2)), g="i").lower()
    with pytest.raises(ValueError, match=message):
        interpret(plan, {name: torch.ones(4, dtype=getattr(torch, dtype)) for name, dtype in dtypes.items()})
    assert interpret(plan, {name: torch.ones(4).double() for name in "xy"})["c"].dtype == torch.float64
