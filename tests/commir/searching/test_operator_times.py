"""Measured times of operators in the search of a graph. Oracle: all options by enumeration; torch's products."""

import json

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.layers import best_3d_parallel
from commir import GraphNode, GraphRunner, Mesh, measure_operators, programs, search_graph, verify
from commir.searching.layers import transformer_layer
from commir.searching.operator_options import options_of, tile_name

AXES = {"rows": "rows", "cols": "inner"}
SIZES = 16, 32, 8  # rows, inner and columns of the first product
SLOW = Mesh(gpu=4, speeds={"gpu": (0.0, 1e6)})


def two_products(dtype="float64"):
    """The products of a tensor-parallel layer with sequence parallelism; the second feeds the first of the next layer."""
    rows, inner, outer = SIZES
    up = programs.all_gather_matmul(rows, inner, outer, dtype)
    down = programs.matmul_reduce_scatter(rows, outer, inner, dtype)
    return [GraphNode("up", up, {"a": ("down", AXES)}), GraphNode("down", down, {"a": ("up", AXES)})]


def measured(rank, operators, mesh, path):
    return measure_operators(operators, mesh, path, dist.group.WORLD)


def test_the_file_is_the_same_for_all_ranks_and_is_read_again(ranks, tmp_path):
    path = tmp_path / "times.json"
    first, *others = ranks(measured, 2, two_products(), SLOW, path)
    assert all(each == first for each in others) and json.loads(path.read_text()) == first
    assert len(first) > 6 and all(seconds > 0 for seconds in first.values())
    kept = dict.fromkeys(first, 7.0)
    path.write_text(json.dumps(kept))
    assert measure_operators(two_products(), SLOW, path) == kept
    more = measure_operators(two_products("float32"), SLOW, path)
    assert more.items() > kept.items() and all(seconds < 7 for name, seconds in more.items() if name not in kept)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="times.json is no JSON object of times of tiles"):
        measure_operators(two_products(), SLOW, path)


def times_of(operators, mesh, per_point):
    """Times in proportion to the points of a tile."""
    found = {}

    def collect(tile):
        found[tile_name(tile)] = per_point * tile.points
        return 0.0

    for each in operators:
        options_of(each, mesh, None, None, collect)
    return found


def run_layer(rank, operators, plans, whole):
    """This rank's block of the second product."""
    local = {name: plans[name].shard(each, rank) for name, each in whole.items()}
    del local["down"]["a"]
    return GraphRunner(operators, plans, dist.group.WORLD)(local)["down"]


def test_blocks_travel_while_tiles_are_computed(ranks):
    """As in AsyncTP, where tiles take as long as messages; the layer is exact on ranks."""
    operators = two_products()
    rows, inner, outer = SIZES
    half = 8 * inner * outer // 2  # so that rows alone, without messages, hold too much of the parameters
    times = times_of(operators, SLOW, 1e-6)
    best = search_graph(operators, SLOW, half, times=times)
    by_tensor = {"up": [("cols",)], "down": [("inner",)]}
    serial = search_graph(operators, SLOW, half, by_tensor, times)
    assert best.seconds < 0.9 * serial.seconds and best.is_timed
    assert {option.shifted for option in best.chosen.values()} == {("rows",)}
    assert "up: cols on gpu with rows shifted;" in best.explain() and "of messages" not in best.explain()
    plans = best.plans()
    for plan in plans.values():
        verify(plan)
    x, w, v = (torch.randn(*shape, dtype=torch.float64) for shape in ((rows, outer), (outer, inner), (inner, outer)))
    whole = {"up": {"a": x, "b": w}, "down": {"a": x @ w, "b": v}}
    blocks = ranks(run_layer, 4, operators, plans, whole)
    product = plans["down"].unshard([{"c": block} for block in blocks])["c"]
    torch.testing.assert_close(product, x @ w @ v, rtol=0, atol=1e-13 * float((x @ w @ v).abs().max().clamp(1)))


def test_times_decide_where_messages_cost_nothing():
    """An operator whose tiles are slow with one loop divided is divided along another."""
    (alone,) = [GraphNode("alone", programs.all_gather_matmul(16, 16, 16))]
    mesh = Mesh(gpu=4, speeds={"gpu": (0.0, 1e12)})
    times = times_of([alone], mesh, 1e-6)
    for loop in ("rows", "cols", "inner"):
        quarter = {name: 0.001 if f"{loop} 4" in name else 1.0 for name in times}
        assert search_graph([alone], mesh, times=quarter).chosen["alone"].axes == (loop,)
    with pytest.raises(KeyError, match="rows 4, cols 16, inner 16"):
        search_graph([alone], mesh, times={})


def test_a_whole_layer_with_times_is_no_slower_than_3_d_parallelism():
    operators = transformer_layer(1, 64, 32, 8, 4, 64, "float32", causal=False)
    mesh = Mesh(node=2, gpu=2, speeds={"node": (1e-5, 1e8), "gpu": (1e-6, 1e10)})
    times = times_of(operators, mesh, 1e-9)
    found = search_graph(operators, mesh, times=times)
    assert found.seconds <= best_3d_parallel(operators, mesh, times=times).seconds
    for plan in found.plans().values():
        verify(plan)
