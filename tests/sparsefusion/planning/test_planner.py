"""What is sent whole, sparsely, together; oracles: every way to cut, the paper's equations by hand, a step played out."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefusion.fabric.cost_model import Fabric
from sparsefusion.fabric.curve import Curve
from sparsefusion.fusion.cost_measurement import SampledFabric
from sparsefusion.planning.compression import CompressionSettings as Settings
from sparsefusion.planning.compression import sends_less
from sparsefusion.planning.fusion_cuts import find_opt_fusion, finish_time
from sparsefusion.planning.plan import Buffer, Plan, Unit
from sparsefusion.planning.planner import calibrated_costs, compensated_density, count_excluded, make_plans, predict
from sparsefusion.planning.timeline import LARGEST_CORRECTION, Costs, Load, Tensor, Timeline, step_seconds

MODES = ("layerwise", "bucket", "selective", "interleaved", "offload")


def costs(alpha=1e-4, bytes_per_s=25e6, select=1e-9, ranks=2):
    """Links and selection whose costs are straight lines."""
    points = [(size, alpha + size / bytes_per_s) for size in (1 << 10, 1 << 15, 1 << 18, 1 << 22)]
    curves = [Curve.fit(name, ranks, [(n, s, s) for n, s in points]) for name in ("all_reduce", "all_gather")]
    return Costs(Fabric(tuple(curves), {}), ranks, lambda n: select * n, lambda n: 1e-9 * n, lambda n: 1e-10 * n)


def timeline(sizes, atoms, backward=1e-3):
    """Gradients of these sizes, ready one after the other, handed over in so many atoms."""
    names = [f"w{i}" for i in range(len(sizes))]
    tensors = tuple(
        Tensor(name, n, 2 if n >= 2048 else 1, 0.01 + backward * (i + 1))
        for i, (name, n) in enumerate(zip(names, sizes, strict=True))
    )
    each = -(-len(names) // atoms)
    return Timeline(tensors, tuple(tuple(names[i : i + each]) for i in range(0, len(names), each)), 4, 4, 1.0)


def plan_of(mode, *given, early=False):
    """One mode's plan."""
    return make_plans((mode,), *given, early)[mode]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 7), st.booleans())
def test_no_way_to_cut_is_better(data, count, fixed):
    """Also where a group's computing costs something of its own, so that more cuts take longer."""
    times = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    backward, sending, latency = data.draw(times), data.draw(times), data.draw(st.integers(0, 30))

    def compute(i, j):
        return sum(backward[i:j]) + 7 * fixed

    def send(i, j):
        return latency + sum(sending[i:j])

    ways = [(*cut, count) for size in range(count) for cut in combinations(range(1, count), size)]
    best = min(finish_time(ends, compute, send) for ends in ways)
    assert finish_time(find_opt_fusion(count, compute, send), compute, send) == best


def test_many_gradients_are_cut_in_good_places():
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
    """gradcomm.md A.3: 3 ms + 3 x 0.85 ms against 4.5 ms of the buffer before."""
    sizes = [10_000, 20_000, 1_000_000]
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 4.5e-3) == 2
    assert count_excluded(sizes[::-1], 3e-3, [0.85e-3] * 3, 4.5e-3) == 2  # whatever the order
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 6e-3) == 0
    assert count_excluded(sizes, 3e-3, [0.85e-3] * 3, 1e-3) == 3  # which the planner's guards then refuse


def test_density_is_compensated_by_bytes():
    """(P-1) 8 rho' n_s = (P-1) 8 rho N - 2 (P-1)/P 4 n_d."""
    for ranks in (2, 4):
        density = compensated_density(0.01, 4000, 996_000, 1 / ranks)
        assert (ranks - 1) * 8 * density * 996_000 == pytest.approx(
            (ranks - 1) * 8 * 0.01 * 1e6 - 2 * (ranks - 1) / ranks * 4 * 4000
        )
    assert compensated_density(0.01, 50_000, 950_000, 1 / 2) == 0.005  # not below half
    assert compensated_density(0.01, 4000, 996_000, 1 / 2, "paper") == pytest.approx(6000 / 996_000)
    assert compensated_density(0.01, 50_000, 950_000, 1 / 2, "paper") == 0.001


def test_guard():
    """Sparse only if density (value + index bytes) ranks < 2 dense bytes: 1/P, 1/(2P) against 16 bits, 1 for 2 with ZeRO."""
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
    )  # fp32, of which 16 bits are sent
    assert not sends_less(Settings(0.01), 1, 4, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([1, 64, 256, 3000, 65_536, 262_144, 4_000_000]), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_every_gradient_is_in_a_plan_once(sizes, atoms):
    given, price = timeline(sizes, atoms), costs()
    for mode in MODES:
        plan = plan_of(mode, Settings(0.01), given, price)
        names = [name for buffer in plan.buffers for name in buffer.names]
        assert names == [tensor.name for tensor in given.tensors]
        units = [unit for buffer in plan.buffers for unit in buffer.units]
        assert all(0 <= unit.k <= unit.numel for unit in units)
        dense, sparse, total = plan.sent_elements
        assert total == sum(sizes) and dense <= total
        if mode in ("layerwise", "bucket"):
            assert dense == 0 and sparse <= max(0.01 * total, len(units)) + len(units)
        assert Plan.from_json(plan.to_json()) == plan
        assert predict(plan, Settings(0.01), given, price) >= given.tensors[-1].ready


def test_small_gradients_go_whole_where_selecting_is_dear():
    given = timeline([2_000_000, 5000, 1_000_000, 5000, 300], 2)

    def whole(select):
        plan = plan_of("selective", Settings(0.01), given, costs(select=select))
        return {name for buffer in plan.buffers for unit in buffer.units if not unit.k for name in unit.names}

    assert whole(1e-12) == {"w4"}  # one dimension
    assert whole(1e-6) == {"w1", "w3", "w4"}  # the large ones never


def test_a_step_played_out():
    """Two buffers: 10 and 20 s of backward, 1 and 2 s selecting, 5 s sums, 3 s gathers, 1 s writing each."""
    loads = [Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)]
    # selected at 11, sent until 19; selected at 23, sent until 31; written at 32 (the first at 24, while that was sent)
    assert step_seconds(loads, interleaved=False) == 32
    # the sum leaves at 10, ends at 15, the gather at 18; at 21, ends at 26, the gather at 29
    assert step_seconds(loads, interleaved=True) == 30


def test_a_framework_that_waits_played_out():
    """The second buffer's 20 s of backward begin when the first is written, at 20: ready at 30, sent from 32 until 40."""
    loads = [Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)]
    assert step_seconds(loads, interleaved=False, waits_for_atoms=True) == 41
    # the first is sent from 10 until 18, and written at 19; the second is ready at 29, sent until 37, written at 38
    assert step_seconds(loads, interleaved=True, waits_for_atoms=True) == 38


def test_what_each_sparse_message_takes_of_the_thread():
    """Messages take as much longer as there are sparse ones; where they take much, fewer are sent."""
    given, cheap = timeline([100_000, 10] * 8, 8), costs(alpha=1e-6)
    dear = replace(cheap, per_message=0.003)
    for mode in MODES:
        plan = plan_of(mode, Settings(0.01), given, cheap)
        took = predict(plan, Settings(0.01), given, dear) - predict(plan, Settings(0.01), given, cheap)
        sparse = sum(any(unit.k for unit in buffer.units) for buffer in plan.buffers)
        assert sparse > 1 and took == pytest.approx(0.003 * sparse, rel=0.2)
        assert len(plan_of(mode, Settings(0.01), given, dear).buffers) < len(plan.buffers)
    for mode in ("dense", "fp16"):
        plan = plan_of(mode, Settings(0.01), given, dear)
        assert predict(plan, Settings(0.01), given, dear) == predict(plan, Settings(0.01), given, cheap)


def test_a_framework_that_waits_sends_each_atom():
    given, price = timeline([100_000] * 6, 3), costs(alpha=1.0)
    assert len(plan_of("layerwise", Settings(0.01), given, price).buffers) == 1
    waiting = replace(given, waits_for_atoms=True)
    assert len(plan_of("layerwise", Settings(0.01), waiting, price).buffers) == 3
    for mode in ("layerwise", "dense"):
        late, soon = (
            predict(plan_of(mode, Settings(0.01), each, price), Settings(0.01), each, price)
            for each in (waiting, given)
        )
        assert late > soon


def test_what_has_no_places_is_an_all_reduce():
    """Random places are known everywhere, so on many ranks a message costs far less than all of theirs."""
    points = [(1 << i, 1.0 + 1e-3 * (1 << i), 1.0 + 1e-3 * (1 << i)) for i in range(30)]
    dear = [(n, 100 + s, 100 + s) for n, s, _ in points]
    curves = (Curve.fit("all_reduce", 4, points), Curve.fit("all_gather", 4, dear))
    price = replace(costs(ranks=4), fabric=Fabric(curves, {}))
    given = timeline([100_000] * 4, 4, backward=10.0)
    plans = [plan_of("layerwise", Settings(0.01, sparsifier=name), given, price) for name in ("randomk", "dgc")]
    assert [len(plan.buffers) for plan in plans] == [4, 1]


def test_a_framework_that_scatters_sums_is_predicted_so():
    points = [(1 << i, 2.0, 2.0) for i in range(30)]
    halves = [(n, s / 2, s / 2) for n, s, _ in points]
    curves = [Curve.fit(name, 2, points) for name in ("all_reduce", "all_gather")]
    price = replace(costs(), fabric=Fabric((*curves, Curve.fit("reduce_scatter", 2, halves)), {}))
    given = timeline([100_000], 1)
    took = [
        predict(
            Plan("dense", "dgc", 0.01, "fp32", 2),
            Settings(0.01),
            given,
            replace(price, dense_operation=whole),
        )
        for whole in ("all_reduce", "reduce_scatter")
    ]
    assert took[0] - took[1] == pytest.approx(1.0)


def test_what_leaves_early():
    """A sum of 4 s that leaves at 6 is done before the rest is there at 10."""
    assert step_seconds([Load(10, 1, 5, 3, 1), Load(20, 2, 5, 3, 1)], interleaved=True) == 30
    assert step_seconds([Load(10, 1, 1, 3, 1, early=6, early_reduce=4), Load(20, 2, 5, 3, 1)], interleaved=True) == 30
    assert step_seconds([Load(10, 1, 5, 3, 1), Load(20, 2, 1, 3, 1, early=15, early_reduce=4)], interleaved=True) == 27
    given = timeline([2000, 300, 40_000_000, 300], 1, backward=0.5)
    plan = plan_of("interleaved", Settings(0.01), given, costs(bytes_per_s=1e6, select=1e-12), early=True)
    assert [unit.early for unit in plan.buffers[0].units] == [True, True, False, False]
    assert not any(unit.early for unit in plan_of("interleaved", Settings(0.01), given, costs()).buffers[0].units)


@pytest.mark.parametrize("sizes", [[2000] * 9, [300, 40_000, 300, 500_000, 300, 300, 7000, 300], [1500] * 200])
@pytest.mark.parametrize("atoms", [1, 3])
def test_leaving_early_is_predicted_to_take_no_longer(sizes, atoms):
    given, price = timeline(sizes, atoms), costs(bytes_per_s=1e6)
    late, early = (plan_of("interleaved", Settings(0.01), given, price, early=early) for early in (False, True))
    assert predict(early, Settings(0.01), given, price) <= predict(late, Settings(0.01), given, price)
    assert any(unit.early for buffer in early.buffers for unit in buffer.units)
    assert late.sent_elements == early.sent_elements


def test_sampled_messages_lie_on_lines_between_what_was_measured():
    sampled = SampledFabric(
        {"all_reduce": [(100, 5.0), (200, 6.0), (400, 9.0)], "all_gather": [(100, 5.0), (200, 4.0)]}
    )
    sizes = [0, 50, 100, 150, 200, 300, 400]
    assert [sampled.time("all_reduce", n, 2) for n in sizes] == [*np.interp(sizes, [100, 200, 400], [5, 6, 9])]
    assert sampled.time("all_reduce", 800, 2) == 15 and sampled.time("all_gather", 300, 2) == 4


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


def test_prediction_follows_the_links():
    given = timeline([1_000_000] * 4, 2)
    slow, fast = costs(bytes_per_s=1e6), costs(bytes_per_s=1e12, alpha=0)
    dense = Plan("dense", "dgc", 0.01, "fp32", 2)
    layerwise = plan_of("layerwise", Settings(0.01), given, slow)
    assert predict(dense, Settings(0.01), given, slow) > 16 > 1 > predict(layerwise, Settings(0.01), given, slow)
    assert predict(dense, Settings(0.01), given, fast) < predict(layerwise, Settings(0.01), given, fast)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 2.5, 9.0])
def test_a_watched_step_says_how_much_slower_messages_are(factor, waits):
    """Where sending hides behind backward, too; oracle: links that are so much slower."""
    links = costs(bytes_per_s=25e6)
    given = replace(timeline([200_000] * 6, 3, backward=0.02), waits_for_atoms=waits)
    dense = Plan("dense", "dgc", 0.01, "fp32", 2)
    watched = replace(given, step=predict(dense, Settings(0.01), given, replace(links, factor=factor)))
    found = calibrated_costs(links, watched)
    assert found.factor == pytest.approx(min(factor, LARGEST_CORRECTION), rel=2e-3)
    if factor <= LARGEST_CORRECTION:
        assert predict(dense, Settings(0.01), watched, found) == pytest.approx(watched.step, rel=1e-3)
    computing = replace(given, step=1.05 * given.tensors[-1].ready)  # is nearly all of it
    assert calibrated_costs(links, computing) == links


def test_offloading_leaves_the_last_gradient_here():
    plan = plan_of("offload", Settings(0.01), timeline([100_000] * 6, 2), costs(select=1e-9))
    for buffer in plan.buffers:
        assert [unit.offload for unit in buffer.units] == [True] * (len(buffer.units) - 1) + [False]


def test_plans_are_hashed_and_changes_are_noticed():
    plan = Plan("layerwise", "dgc", 0.01, "fp32", 2, (Buffer((Unit(("w",), 100, 1),)),))
    assert plan.hash == replace(plan, predicted={"dense": 1.0}).hash != plan.for_ranks(3).hash
    made = json.loads(plan.to_json())
    made["buffers"][0]["units"][0]["k"] = 2
    for text in (json.dumps(made), "{}", "[", plan.to_json().replace('"version": 1', '"version": 9')):
        with pytest.raises(ValueError, match="plan of sparsefusion"):
            Plan.from_json(text)
    with pytest.raises(ValueError, match="mode='auto' is none of a plan's: dense, fp16"):
        Plan("auto", "dgc", 0.01, "fp32", 2)


def test_a_part_of_a_buffer():
    buffer = Buffer((Unit(("a", "b"), 300, 30), Unit(("c",), 50)))
    part = buffer.restricted_to({"b": 100, "c": 50})
    assert part.units == (Unit(("b",), 100, 10), Unit(("c",), 50))
