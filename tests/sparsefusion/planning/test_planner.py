"""Plans and predicted times; oracles: all ways to cut, the equations of SSFusion by hand, steps computed by hand."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from sparsefusion.fusion.cost_measurement import interpolated_times
from sparsefusion.planning.compression import CompressionSettings as Settings
from sparsefusion.planning.compression import sends_less
from sparsefusion.planning.fusion_cuts import find_opt_fusion, finish_time
from sparsefusion.planning.plan import Buffer, Plan, Unit
from sparsefusion.planning.planner import (
    LARGEST_CORRECTION,
    calibrated_costs,
    compensated_density,
    count_excluded,
    make_plans,
    predict,
)
from sparsefusion.planning.timeline import Costs, Load, Tensor, Timeline, step_seconds

MODES = ("layerwise", "bucket", "selective", "interleaved", "offload")


def times_of(ranks, *curves):
    """times(operation, nbytes): the predictions of these curves."""
    fabric = Fabric(curves)
    return lambda operation, nbytes: fabric.time(operation, nbytes, ranks)


def linear_costs(alpha=1e-4, bytes_per_s=25e6, select=1e-9, ranks=2):
    """Costs that are linear in the number of bytes or elements."""
    points = [(size, alpha + size / bytes_per_s) for size in (1 << 10, 1 << 15, 1 << 18, 1 << 22)]
    curves = [Curve.fit(name, ranks, [(n, s, s) for n, s in points]) for name in ("all_reduce", "all_gather")]
    return Costs(times_of(ranks, *curves), ranks, lambda n: select * n, lambda n: 1e-9 * n, lambda n: 1e-10 * n)


def timeline(sizes, atoms, backward=1e-3):
    """Gradients of these sizes, ready one after the other, in so many atoms."""
    names = [f"w{i}" for i in range(len(sizes))]
    tensors = tuple(
        Tensor(name, n, 2 if n >= 2048 else 1, 0.01 + backward * (i + 1))
        for i, (name, n) in enumerate(zip(names, sizes, strict=True))
    )
    each = -(-len(names) // atoms)
    return Timeline(tensors, tuple(tuple(names[i : i + each]) for i in range(0, len(names), each)), 4, 4, 1.0)


def plan_of(mode, *given, early=False):
    """The plan of one mode."""
    return make_plans((mode,), *given, early)[mode]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 7), st.booleans())
def test_fusion_cuts_are_optimal(data, count, fixed):
    """Also where every group costs a constant time. Oracle: all ways to cut."""
    times = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    backward, sending, latency = data.draw(times), data.draw(times), data.draw(st.integers(0, 30))

    def compute(i, j):
        return sum(backward[i:j]) + 7 * fixed

    def send(i, j):
        return latency + sum(sending[i:j])

    ways = [(*cut, count) for size in range(count) for cut in combinations(range(1, count), size)]
    best = min(finish_time(ends, compute, send) for ends in ways)
    assert finish_time(find_opt_fusion(count, compute, send), compute, send) == best


def test_cuts_of_many_gradients():
    times = [(7 * i) % 13 + 1 for i in range(500)]

    def compute(i, j):
        return sum(times[i:j])

    def send(i, j):
        return 20 + 0.9 * sum(times[i:j])

    ends = find_opt_fusion(500, compute, send)
    found = finish_time(ends, compute, send)
    assert ends[-1] == 500 and list(ends) == sorted(set(ends))
    assert (
        found <= finish_time((500,), compute, send) / 1.5 and found <= finish_time(range(1, 501), compute, send) / 1.5
    )


def test_equation_2():
    """SSFusion: 3 ms of backward and 3 x 0.85 ms of selection, against 4.5 ms of messages of the previous buffer."""
    sizes = [10_000, 20_000, 1_000_000]
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 4.5e-3) == 2
    assert count_excluded(sizes[::-1], 3e-3, [0.85e-3] * 3, 4.5e-3) == 2  # the order of the gradients does not matter
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 6e-3) == 0
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 1e-3) == 3  # the planner's guards then refuse that


def test_density_is_compensated_as_in_the_paper():
    """Of 1,000,000 elements, 1 % is sent in all, 4,000 or 50,000 of it dense; the density is at least 0.001."""
    assert compensated_density(0.01, 4000, 996_000) == pytest.approx(6000 / 996_000)
    assert compensated_density(0.01, 50_000, 950_000) == 0.001
    given, costs = timeline([2_000_000, 300, 5000], 1), linear_costs(select=1e-12)
    for budget, density in (("none", 0.01), ("paper", compensated_density(0.01, 300, 2_005_000))):
        plan = plan_of("selective", Settings(0.01, budget=budget), given, costs)
        assert [unit.k for unit in plan.buffers[0].units] == [int(density * 2_000_000), 0, int(density * 5000)]


def test_sends_less():
    """density (value + index bytes) ranks < 2 dense bytes: 1/P; 1/(2P) for 16-bit gradients, or reduce-scatter."""
    for ranks in (2, 3, 4, 8):
        for share, itemsize, scattered in ((1, 4, False), (1 / 2, 2, False), (1 / 2, 4, True), (4 / 3, 8, False)):
            assert sends_less(Settings(0.99 * share / ranks), ranks, itemsize, itemsize, scattered)
            assert not sends_less(Settings(1.01 * share / ranks), ranks, itemsize, itemsize, scattered)
    for scattered in (False, True):  # against fp16, which is all-reduced
        assert sends_less(Settings(0.49 / 4), 4, 4, 4, scattered, than_fp16=True)
        assert not sends_less(Settings(0.51 / 4), 4, 4, 4, scattered, than_fp16=True)
    assert sends_less(Settings(0.24 / 4), 4, 2, 2, True, than_fp16=True) and not sends_less(
        Settings(0.26 / 4), 4, 2, 2, True, than_fp16=True
    )
    assert sends_less(Settings(0.66 / 2, wire="bf16"), 2, 2, 2) and not sends_less(
        Settings(0.67 / 2, wire="bf16"), 2, 2, 2
    )
    assert sends_less(Settings(0.49 / 4), 4, 4, 2) and not sends_less(
        Settings(0.51 / 4), 4, 4, 2
    )  # fp32 gradients that the framework sends in 16 bits
    assert not sends_less(Settings(0.01), 1, 4, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([1, 64, 256, 3000, 65_536, 262_144, 4_000_000]), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_every_gradient_is_in_a_plan_once(sizes, atoms):
    given, costs = timeline(sizes, atoms), linear_costs()
    for mode in MODES:
        plan = plan_of(mode, Settings(0.01), given, costs)
        names = [name for buffer in plan.buffers for name in buffer.names]
        assert names == [tensor.name for tensor in given.tensors]
        units = [unit for buffer in plan.buffers for unit in buffer.units]
        assert all(0 <= unit.k <= unit.numel for unit in units)
        dense, sparse, total = plan.sent_elements
        assert total == sum(sizes) and dense <= total
        if mode in ("layerwise", "bucket"):
            assert dense == 0 and sparse <= max(0.01 * total, len(units)) + len(units)
        assert Plan.from_json(plan.to_json()) == plan
        assert predict(plan, Settings(0.01), given, costs) >= given.tensors[-1].ready


def test_small_gradients_are_dense_where_selection_is_slow():
    given = timeline([2_000_000, 5000, 1_000_000, 5000, 300], 2)

    def dense_names(select):
        plan = plan_of("selective", Settings(0.01), given, linear_costs(select=select))
        return {name for buffer in plan.buffers for unit in buffer.units if not unit.k for name in unit.names}

    assert dense_names(1e-12) == {"w4"}  # one dimension
    assert dense_names(1e-6) == {"w1", "w3", "w4"}  # large gradients are never dense


def test_step_seconds_by_hand():
    """Two buffers: 10 and 20 s of backward, 1 and 2 s of selection; 5 s all-reduces, 3 s all-gathers, 1 s of writing."""
    loads = [Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)]
    # selected at 11, sent until 19; selected at 23, sent until 31; written at 32 (the first at 24, while that was sent)
    assert step_seconds(loads, interleaved=False) == 32
    # first all-reduce from 10 to 15, all-gather to 18; second all-reduce from 21 to 26, all-gather to 29
    assert step_seconds(loads, interleaved=True) == 30


def test_step_seconds_of_a_framework_that_waits():
    """The second buffer's backward begins when the first one is written, at 20 s: it is sent from 32 s to 40 s."""
    loads = [Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)]
    assert step_seconds(loads, interleaved=False, waits_for_atoms=True) == 41
    # the first is sent from 10 until 18, and written at 19; the second is ready at 29, sent until 37, written at 38
    assert step_seconds(loads, interleaved=True, waits_for_atoms=True) == 38


def test_time_per_sparse_message():
    """A step takes longer by this time for each sparse message; where it is large, plans have fewer messages."""
    given, cheap = timeline([100_000, 10] * 8, 8), linear_costs(alpha=1e-6)
    slow = replace(cheap, per_message=0.003)
    for mode in MODES:
        plan = plan_of(mode, Settings(0.01), given, cheap)
        took = predict(plan, Settings(0.01), given, slow) - predict(plan, Settings(0.01), given, cheap)
        sparse = sum(any(unit.k for unit in buffer.units) for buffer in plan.buffers)
        assert sparse > 1 and took == pytest.approx(0.003 * sparse, rel=0.2)
        assert len(plan_of(mode, Settings(0.01), given, slow).buffers) < len(plan.buffers)
    for mode in ("dense", "fp16"):
        plan = plan_of(mode, Settings(0.01), given, slow)
        assert predict(plan, Settings(0.01), given, slow) == predict(plan, Settings(0.01), given, cheap)


def test_a_framework_that_waits_sends_each_atom():
    given, costs = timeline([100_000] * 6, 3), linear_costs(alpha=1.0)
    assert len(plan_of("layerwise", Settings(0.01), given, costs).buffers) == 1
    waiting = replace(given, waits_for_atoms=True)
    assert len(plan_of("layerwise", Settings(0.01), waiting, costs).buffers) == 3
    for mode in ("layerwise", "dense"):
        late, soon = (
            predict(plan_of(mode, Settings(0.01), each, costs), Settings(0.01), each, costs)
            for each in (waiting, given)
        )
        assert late > soon


def test_randomk_is_planned_as_an_all_reduce():
    """All ranks know the random indices, so many ranks need no slow all-gather, and gradients are not fused."""
    points = [(1 << i, 1.0 + 1e-3 * (1 << i), 1.0 + 1e-3 * (1 << i)) for i in range(30)]
    slow = [(n, 100 + s, 100 + s) for n, s, _ in points]
    curves = (Curve.fit("all_reduce", 4, points), Curve.fit("all_gather", 4, slow))
    costs = replace(linear_costs(ranks=4), times=times_of(4, *curves))
    given = timeline([100_000] * 4, 4, backward=10.0)
    plans = [plan_of("layerwise", Settings(0.01, sparsifier=name), given, costs) for name in ("randomk", "dgc")]
    assert [len(plan.buffers) for plan in plans] == [4, 1]


def test_a_framework_with_reduce_scatter_is_predicted_with_it():
    points = [(1 << i, 2.0, 2.0) for i in range(30)]
    halves = [(n, s / 2, s / 2) for n, s, _ in points]
    curves = [Curve.fit(name, 2, points) for name in ("all_reduce", "all_gather")]
    costs = replace(linear_costs(), times=times_of(2, *curves, Curve.fit("reduce_scatter", 2, halves)))
    given = timeline([100_000], 1)
    took = [
        predict(
            Plan("dense", "dgc", 0.01, "fp32", 2),
            Settings(0.01),
            given,
            replace(costs, dense_operation=whole),
        )
        for whole in ("all_reduce", "reduce_scatter")
    ]
    assert took[0] - took[1] == pytest.approx(1.0)


def test_early_units():
    """A 4 s all-reduce that starts at 6 s is finished before the rest is ready at 10 s."""
    assert step_seconds([Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)], interleaved=True) == 30
    assert step_seconds([Load(10, 1, 1, 3, 1, early=6, early_reduce=4), Load(20, 2, 5, 3, 1)], interleaved=True) == 30
    assert step_seconds([Load(10, 1, 5, 3, 1), Load(20, 2, 1, 3, 1, early=15, early_reduce=4)], interleaved=True) == 27
    given = timeline([2000, 300, 40_000_000, 300], 1, backward=0.5)
    plan = plan_of("interleaved", Settings(0.01), given, linear_costs(bytes_per_s=1e6, select=1e-12), early=True)
    assert [unit.early for unit in plan.buffers[0].units] == [True, True, False, False]
    assert not any(
        unit.early for unit in plan_of("interleaved", Settings(0.01), given, linear_costs()).buffers[0].units
    )


@pytest.mark.parametrize("sizes", [[2000] * 9, [300, 40_000, 300, 500_000, 300, 300, 7000, 300], [1500] * 200])
@pytest.mark.parametrize("atoms", [1, 3])
def test_early_units_do_not_make_a_step_longer(sizes, atoms):
    given, costs = timeline(sizes, atoms), linear_costs(bytes_per_s=1e6)
    late, early = (plan_of("interleaved", Settings(0.01), given, costs, early=early) for early in (False, True))
    assert predict(early, Settings(0.01), given, costs) <= predict(late, Settings(0.01), given, costs)
    assert any(unit.early for buffer in early.buffers for unit in buffer.units)
    assert late.sent_elements == early.sent_elements


def test_times_between_measured_sizes():
    times = interpolated_times(
        {"all_reduce": [(100, 5.0), (200, 6.0), (400, 9.0)], "all_gather": [(100, 5.0), (200, 4.0)]}
    )
    sizes = [0, 50, 100, 150, 200, 300, 400]
    assert [times("all_reduce", n) for n in sizes] == [*np.interp(sizes, [100, 200, 400], [5, 6, 9])]
    assert times("all_reduce", 800) == 15 and times("all_gather", 300) == 4


def test_parts_of_buffers_and_empty_parameters():
    buffer = Buffer((Unit(("empty",), 0), Unit(("a", "b"), 30, 4), Unit(("c",), 7)))
    assert buffer.restricted_to({"empty": 0, "b": 10, "c": 7}).units == (
        Unit(("empty",), 0),
        Unit(("b",), 10, 2),
        Unit(("c",), 7),
    )
    plan = Plan("bucket", "dgc", 0.1, "fp32", 2, (buffer,))
    assert plan.fits_sizes({"empty": 0, "a": 20, "b": 10, "c": 7}) and not plan.fits_sizes({"a": 20, "b": 10, "c": 7})
    assert plan.for_sizes({"empty": 0, "a": 20, "b": 25, "c": 7}).buffers[0].units[1] == Unit(("a", "b"), 45, 6)
    with pytest.raises(ValueError, match="'d' is not in both the plan and this rank's part"):
        plan.for_sizes({"empty": 0, "a": 20, "b": 10, "c": 7, "d": 1})


def test_predictions_depend_on_the_links():
    given = timeline([1_000_000] * 4, 2)
    slow, fast = linear_costs(bytes_per_s=1e6), linear_costs(bytes_per_s=1e12, alpha=0)
    dense = Plan("dense", "dgc", 0.01, "fp32", 2)
    layerwise = plan_of("layerwise", Settings(0.01), given, slow)
    assert predict(dense, Settings(0.01), given, slow) > 16 > 1 > predict(layerwise, Settings(0.01), given, slow)
    assert predict(dense, Settings(0.01), given, fast) < predict(layerwise, Settings(0.01), given, fast)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 2.5, 9.0])
def test_costs_are_calibrated_by_the_profiled_step(factor, waits):
    """Also where messages overlap with the backward pass. Oracle: links that are slower by this factor."""
    links = linear_costs(bytes_per_s=25e6)
    given = replace(timeline([200_000] * 6, 3, backward=0.02), waits_for_atoms=waits)
    dense = Plan("dense", "dgc", 0.01, "fp32", 2)
    profiled = replace(given, step=predict(dense, Settings(0.01), given, replace(links, factor=factor)))
    found = calibrated_costs(links, profiled)
    assert found.factor == pytest.approx(min(factor, LARGEST_CORRECTION), rel=2e-3)
    if factor <= LARGEST_CORRECTION:
        assert predict(dense, Settings(0.01), profiled, found) == pytest.approx(profiled.step, rel=1e-3)
    computing = replace(given, step=1.05 * given.tensors[-1].ready)  # computation is nearly all of the step
    assert calibrated_costs(links, computing) == links


def test_the_last_gradient_of_a_buffer_is_not_offloaded():
    plan = plan_of("offload", Settings(0.01), timeline([100_000] * 6, 2), linear_costs(select=1e-9))
    for buffer in plan.buffers:
        assert [unit.offload for unit in buffer.units] == [True] * (len(buffer.units) - 1) + [False]


def test_changed_plans_are_refused_by_their_hash():
    plan = Plan("layerwise", "dgc", 0.01, "fp32", 2, (Buffer((Unit(("w",), 100, 1),)),))
    assert plan.hash == replace(plan, predicted={"dense": 1.0}).hash != replace(plan, ranks=3).hash
    made = json.loads(plan.to_json())
    made["buffers"][0]["units"][0]["k"] = 2
    for text in (json.dumps(made), "{}", "[", plan.to_json().replace('"version": 1', '"version": 9')):
        with pytest.raises(ValueError, match="plan of sparsefusion"):
            Plan.from_json(text)
    with pytest.raises(ValueError, match="mode='auto' is none of a plan's: dense, fp16"):
        Plan("auto", "dgc", 0.01, "fp32", 2)


def test_a_restricted_buffer():
    buffer = Buffer((Unit(("a", "b"), 300, 30), Unit(("c",), 50)))
    part = buffer.restricted_to({"b": 100, "c": 50})
    assert part.units == (Unit(("b",), 100, 10), Unit(("c",), 50))
