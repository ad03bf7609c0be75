"""Layouts of whole graphs. Oracle: enumeration of all combinations; the messages of lowered conversions."""

import random
from itertools import product

import numpy as np
import pytest

from commir import Mesh, Schedule, programs
from commir.lowering.layouts import Digits, conversions
from commir.scheduling.placements import place
from commir.searching.graph import Operator, minimize, reshard_seconds, search_graph
from commir.searching.layers import best_3d_parallel, transformer_layer, zamba_layer

MESHES = [Mesh(gpu=4), Mesh(node=2, gpu=4, speeds={"node": (1e-5, 1e9), "gpu": (1e-6, 1e11)}), Mesh(gpu=8)]


def total(own, pairs, picks):
    return sum(costs[a] for costs, a in zip(own, picks, strict=True)) + sum(
        costs[picks[i], picks[j]] for (i, j), costs in pairs.items()
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_least_sum_of_random_graphs(seed):
    generator = random.Random(seed)
    nodes = generator.randint(1, 6)
    own = [np.array([generator.random() for _ in range(generator.randint(1, 4))]) for _ in range(nodes)]
    pairs = {}
    for i in range(nodes):
        for j in range(i + 1, nodes):
            if generator.random() < 0.5:
                first, second = generator.sample([i, j], 2)
                pairs[first, second] = np.array([[generator.random() for _ in own[second]] for _ in own[first]])
    picks, least = minimize(own, pairs)
    best = min(total(own, pairs, each) for each in product(*(range(len(costs)) for costs in own)))
    assert least == pytest.approx(best, rel=1e-12)
    assert total(own, pairs, picks) == pytest.approx(best, rel=1e-12)


def test_a_long_chain():
    """50 options for each of 30 operators: 50^30 combinations."""
    generator = np.random.default_rng(0)
    own = [generator.random(50) for _ in range(30)]
    pairs = {(i, i + 1): generator.random((50, 50)) for i in range(29)}
    picks, least = minimize(own, pairs)
    assert total(own, pairs, picks) == pytest.approx(least)
    backwards = np.zeros(50)
    for i in reversed(range(30)):
        backwards = own[i] + (pairs[i, i + 1] + backwards).min(1) if i < 29 else own[i]
    assert least == pytest.approx(backwards.min())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("layer", [transformer_layer, zamba_layer])
@pytest.mark.parametrize("memory", [None, 2**25])
def test_layers_are_at_least_as_fast_as_3d_parallelism(layer, mesh, memory):
    operators = layer(batch=1, seq=4096)
    found, fixed = search_graph(operators, mesh, memory), best_3d_parallel(operators, mesh, memory)
    assert found.seconds <= fixed.seconds * (1 + 1e-9)
    own = sum(option.seconds for option in found.chosen.values())
    assert found.seconds == pytest.approx(own + sum(found.resharding.values()))
    if memory is not None:
        assert all(option.memory <= memory for option in found.chosen.values())
    assert "in all" in found.explain()


def test_resharding_takes_the_time_of_the_conversions():
    """Every pair of placements of attention's q, against the messages that lowering would send."""
    mesh = Mesh(x=2, y=4, speeds={"x": (0.0, 1e9), "y": (0.0, 1e9)})
    program = programs.attention(8, 8, 8, 256, 8)
    operand = program.operand("q")
    for axes in product(("batch", "heads", "q", "kv"), repeat=2):
        nest = place(Schedule(program, mesh), **dict(zip(mesh.names, axes, strict=True)))
        digits = Digits(nest)
        sent, sizes = 0, {axis.name: axis.size for axis in mesh.axes}
        have = digits.home(operand)
        block = program.nbytes(operand) // 8
        for step, after in conversions(digits, operand, have, digits.needed(operand)):
            size = sizes[step.axis]
            sent += (size - 1) * (block // size if type(step).__name__ == "AllToAll" else block)
            block = program.nbytes(operand) // int(np.prod([sizes[name] for name in after]))
        want = tuple(axis if axis in operand.axes else None for axis in axes)
        assert reshard_seconds(mesh, program.nbytes(operand), ("q", "q"), want) == pytest.approx(sent / 1e9)


def test_errors():
    mesh = Mesh(gpu=4)
    product_of = programs.all_gather_matmul(6, 6, 6)
    with pytest.raises(ValueError, match=r"alone: no placement divides its sizes over Mesh\(gpu=4\)"):
        search_graph([Operator("alone", product_of)], mesh)
    with pytest.raises(ValueError, match="alone takes a from nobody, which is no operator"):
        search_graph([Operator("alone", programs.all_gather_matmul(8, 8, 8), {"a": ("nobody", {})})], mesh)
