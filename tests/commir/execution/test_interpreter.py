"""Every placement of every program, on simulated meshes. Oracle: float64 attention and its autograd, torch's products."""

import pytest

from commir import Placement, Schedule, interpret, place
from commir.execution.interpreter import Stuck, run_ranks
from commir.execution.state import Count, Kernels
from commir.programs.tiles import tile_of
from loop_programs import HEADS, assert_close, attention_cases, cases, mesh_of, plans, random_inputs

MESHES = [(4,), (2, 2), (2, 3), (2, 2, 2)]
LARGE = [(12,), (3, 4), (4, 3), (2, 2, 3), (3, 2, 2)]
NAMES = ["attention", "backward", "decoding", "gather", "scatter", "sum"]


def check_all_placements(case, sizes):
    """Outputs are exact, and every rank sends and holds exactly the bytes that the plan says."""
    for plan in plans(case.program, mesh_of(*sizes)):
        counts = []
        assert_close(interpret(plan, case.inputs, counts), case.expected)
        sent, peaks, held = ({getattr(count, name) for count in counts} for name in ("sent", "peak", "held"))
        assert sent == {plan.bytes_per_rank}, plan.schedule
        assert peaks == {plan.memory}, plan.schedule
        assert len(held) == 1, plan.schedule


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("sizes", MESHES[:3])
def test_placements_are_exact(sizes, number):
    ranks = mesh_of(*sizes).ranks
    check_all_placements(cases(ranks)[number], sizes)


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("sizes", MESHES + LARGE)
def test_placements_are_exact_on_up_to_twelve_ranks(sizes, number, causal):
    ranks = mesh_of(*sizes).ranks
    check_all_placements(cases(ranks, causal)[number], sizes)


@pytest.mark.parametrize("number", range(3), ids=NAMES[:3])
@pytest.mark.parametrize("sizes, heads", [((3,), (9, 3)), ((4,), (8, 1)), ((3, 2), (6, 2))])
def test_placements_of_few_key_value_heads_are_exact(sizes, heads, number):
    check_all_placements(attention_cases(mesh_of(*sizes).ranks, *heads)[number], sizes)


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number", range(3), ids=NAMES[:3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", [(3,), (3, 3), (3, 4), *MESHES])
def test_placements_of_few_key_value_heads_are_exact_on_up_to_twelve_ranks(sizes, heads, number, causal):
    check_all_placements(attention_cases(mesh_of(*sizes).ranks, *heads, causal)[number], sizes)


def test_one_rank_sends_nothing():
    case = cases(2)[0]
    (plan, *_) = plans(case.program, mesh_of(1))
    counts = list[Count]()
    assert_close(interpret(plan, case.inputs, counts), case.expected)
    assert counts[0].sent == plan.bytes_per_rank == 0


def test_wrong_inputs_are_named():
    case = cases(2)[0]
    (plan, *_) = plans(case.program, mesh_of(2))
    with pytest.raises(ValueError, match="attention takes q, k, v, not q"):
        interpret(plan, {"q": case.inputs["q"]})
    short = {name: x[:, :-1] for name, x in random_inputs(case.program).items()}
    with pytest.raises(ValueError, match=r"q has shape \(2, 7, 4, 4\): expected \(2, 8, 4, 4\)"):
        interpret(plan, short)


def test_inputs_that_require_gradients():
    case = cases(2)[0]
    inputs = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    for plan in plans(case.program, mesh_of(2)):
        outputs = interpret(plan, inputs)
        assert_close(outputs, case.expected)
        assert not any(x.requires_grad for x in outputs.values())


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_a_block_that_is_written_into_while_it_is_sent(world, changed):
    """By a tile, of a ring whose keys are on their way; real ranks would send whatever is there at the time."""
    plan = place(Schedule(cases(world)[0].program, mesh_of(world)), x=Placement("q", True)).lower()
    tile = tile_of(plan.program)

    def writing(program, inputs, indices):
        outputs = tile(program, inputs, indices)
        inputs["k"].mul_(2 if changed else 1)
        return outputs

    blocks = plan.shard_all(cases(world)[0].inputs)
    if changed:
        with pytest.raises(Stuck, match=r"rank 0 changes a block of shape \(2, .*\) while it is on its way to rank"):
            run_ranks(plan, blocks, kernels=Kernels(writing))
    else:
        assert_close(plan.unshard(run_ranks(plan, blocks, kernels=Kernels(writing))), cases(world)[0].expected)
