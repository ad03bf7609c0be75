"""Layouts of whole graphs. Oracle: enumeration of all combinations; the messages of lowered conversions."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.support.layers import best_3d_parallel, zamba_layer
from commir import Mesh, Schedule, programs
from commir.lowering.operand_layouts import Digits, conversions
from commir.scheduling.placements import place
from commir.searching.elimination import minimize
from commir.searching.graph import GraphPlan, _cheapest, search_graph
from commir.searching.layers import _sum as sum_of
from commir.searching.layers import matrix_product, transformer_layer
from commir.searching.operator_options import BY_GRAPH, GraphNode, Relayouts, options_of

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


def chain(generator, length):
    """Products, each of the one before, with an input that an earlier one makes too."""
    operators = [replace(matrix_product("p0", 2, 8, 8, 8, "float64", ""), inputs={})]
    for number in range(1, length):
        source = f"p{generator.randrange(number)}"
        operators.append(matrix_product(f"p{number}", 2, 8, 8, 8, "float64", source))
    return operators


@pytest.mark.parametrize("seed", range(10))
def test_the_least_time_of_random_operators(seed):
    """Against all combinations of their options."""
    generator = random.Random(seed)
    operators, mesh = chain(generator, 3), Mesh(gpu=4, speeds={"gpu": (generator.random(), 1.0)})
    options = {each.name: options_of(each, mesh, None, None) for each in operators}
    relayouts, times = Relayouts(mesh), []
    for picked in product(*options.values()):
        chosen = dict(zip(options, picked, strict=True))
        time = sum(option.seconds for option in picked)
        for each in operators:
            for operand, (producer, _) in each.inputs.items():
                taken = each.program.operand(operand)
                arriving = each.arriving(operand, chosen[producer].out)
                time += relayouts.seconds(each.program, taken, arriving, chosen[each.name].needs(taken))
        times.append(time)
    found = search_graph(operators, mesh)
    assert found.seconds == pytest.approx(min(times))
    assert sum(plan.seconds for plan in found.plans().values()) == pytest.approx(found.seconds)


def joined(generator, length):
    """Products and sums, each of earlier ones: branches part and join, also two of one operator."""
    operators = [replace(matrix_product("p0", 2, 8, 8, 8, "float64", ""), inputs={})]
    for number in range(1, length):
        sources = generator.choices([each.name for each in operators], k=2)
        if generator.random() < 0.5:
            operators.append(sum_of(f"s{number}", (2, 8, 8), "float64", *sources))
        else:
            operators.append(matrix_product(f"p{number}", 2, 8, 8, 8, "float64", sources[0]))
    return operators


def every_sum(operators, options, mesh):
    """The time of each combination of options, an array with a dimension for each operator."""
    relayouts, sums, names = Relayouts(mesh), np.zeros([len(found) for found in options.values()]), list(options)

    def along(costs, *nodes):
        return costs.reshape([len(options[name]) if name in nodes else 1 for name in names])

    for each in operators:
        sums = sums + along(np.array([option.seconds for option in options[each.name]]), each.name)
        for operand, (producer, _) in each.inputs.items():
            taken = each.program.operand(operand)
            costs = [
                [relayouts.seconds(each.program, taken, each.arriving(operand, left.out), right.needs(taken))
                 for right in options[each.name]]
                for left in options[producer]
            ]  # fmt: skip
            sums = sums + along(np.array(costs), producer, each.name)  # a producer stands before its consumers
    return sums


@pytest.mark.parametrize(
    "seed", [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.full) for seed in range(200)]
)
def test_the_least_time_of_random_joined_operators(seed):
    """Three to five operators of two or three placements, against the first of all combinations that can be lowered."""
    generator = random.Random(seed)
    sizes = generator.choice([{"gpu": 4}, {"x": 2, "y": 2}])
    mesh = Mesh(**sizes, speeds={name: (generator.random(), 1 + generator.random()) for name in sizes})
    operators = joined(generator, generator.randint(3, 5))
    allowed, options = {}, {}
    for each in operators:
        placements = list(dict.fromkeys(option.axes for option in options_of(each, mesh, None, None)))
        allowed[each.name] = generator.sample(placements, min(len(placements), generator.randint(2, 3)))
        options[each.name] = options_of(each, mesh, None, allowed[each.name])
    found, sums = search_graph(operators, mesh, allowed=allowed), every_sum(operators, options, mesh)
    for cheapest in sums.argsort(axis=None):
        picks = zip(options.items(), np.unravel_index(cheapest, sums.shape), strict=True)
        chosen = {name: each[pick] for (name, each), pick in picks}
        if GraphPlan(tuple(operators), mesh, chosen, 0.0, {}).first_illegal() is None:
            break
    assert found.seconds == pytest.approx(sums.flat[cheapest], rel=1e-12)
    taken = tuple(options[name].index(option) for name, option in found.chosen.items())
    assert sums[taken] == pytest.approx(sums.flat[cheapest], rel=1e-12)  # the same choice, or one as fast
    found.plans()  # which can be lowered


def test_the_least_time_of_operators_with_two_inputs():
    """With random times, against all combinations of a few options, of which some cannot be lowered together."""
    generator, noise, mesh, refused = random.Random(0), np.random.default_rng(0), Mesh(x=2, y=2), 0
    operators = [replace(matrix_product(name, 2, 8, 8, 8, "float64", ""), inputs={}) for name in ("p0", "p1")]
    operators.append(sum_of("both", (2, 8, 8), "float64", "p0", "p1"))
    every, relayouts = {each.name: options_of(each, mesh, None, None) for each in operators}, Relayouts(mesh)
    for _ in range(200):
        options = {
            name: [replace(each, seconds=generator.random()) for each in generator.sample(found, 5)]
            for name, found in every.items()
        }
        edges = {}
        for operand, producer in zip(("x0", "x1"), operators, strict=False):
            ends = producer, options[producer.name], operators[2], options["both"]
            times = relayouts.edge(*ends, operand)
            edges[producer.name, "both"] = np.where(np.isfinite(times), noise.random(times.shape), times)
        own = {name: np.array([each.seconds for each in found]) for name, found in options.items()}
        left, right = (own[name][:, None] + edges[name, "both"] for name in ("p0", "p1"))
        sums = left[:, None] + right + own["both"]
        for cheapest in sums.argsort(axis=None):
            picks = zip(options.items(), np.unravel_index(cheapest, sums.shape), strict=True)
            chosen = {name: found[pick] for (name, found), pick in picks}
            if GraphPlan(tuple(operators), mesh, chosen, 0.0, {}).first_illegal() is None:
                break
            refused += 1
        assert _cheapest(operators, mesh, options, edges).seconds == pytest.approx(sums.flat[cheapest])
    assert refused > 5


def test_layouts_that_cannot_be_turned_into_one_another():
    operators = [replace(matrix_product(name, 2, 8, 8, 8, "float64", "p0"), inputs={}) for name in ("p0", "p1")]
    options = {each.name: options_of(each, MESHES[0], None, None) for each in operators}
    edges = {("p0", "p1"): np.full([len(options["p0"]), len(options["p1"])], np.inf)}
    with pytest.raises(
        ValueError, match=r"no layouts of the operators on Mesh\(gpu=4\) can be turned into one another"
    ):
        _cheapest(operators, MESHES[0], options, edges)


@pytest.mark.parametrize("length, options", [(30, 50), (10_000, 2)])
def test_a_long_chain(length, options):
    """50^30 combinations; and more nodes than a search through all of them for each one could take."""
    generator = np.random.default_rng(0)
    own = [generator.random(options) for _ in range(length)]
    pairs = {(i, i + 1): generator.random((options, options)) for i in range(length - 1)}
    picks, least = minimize(own, pairs)
    assert total(own, pairs, picks) == pytest.approx(least)
    backwards = own[-1]
    for i in reversed(range(length - 1)):
        backwards = own[i] + (pairs[i, i + 1] + backwards).min(1)
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
    assert "in all" in found.explain() and " on gpu; " in found.explain()
    assert {plan.reason for plan in found.plans().values()} == {BY_GRAPH}


@pytest.mark.parametrize("layer", [transformer_layer, pytest.param(zamba_layer, marks=pytest.mark.full)])
def test_without_speeds_a_graph_is_explained_in_bytes(layer):
    """They are those of its plans. If one level has a speed, there are seconds instead, as for a plan."""
    mesh = Mesh(node=2, gpu=2)
    found = search_graph(layer(batch=2, seq=512), mesh)
    lines, sent = found.explain().splitlines(), [plan.bytes_per_rank for plan in found.plans().values()]
    assert lines[-1] == f"in all {sum(sent):,} bytes of messages" and sum(sent)
    own = [found.chosen[node.name].plan(node, mesh, {}).bytes_per_rank for node in found.operators]
    assert [line.rpartition("; ")[2] for line in lines[: len(own)]] == [f"{nbytes:,} bytes" for nbytes in own]
    assert all(line.endswith(" bytes") for line in lines[len(own) : -1])
    fast = search_graph(layer(batch=2, seq=512), mesh.with_speeds({"gpu": (0.0, 1e10)}))
    assert "bytes" not in fast.explain() and fast.explain().endswith(" s of messages")


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
        assert Relayouts(mesh).seconds(program, operand, ("q", "q"), want) == pytest.approx(sent / 1e9)


def test_a_swap_takes_the_time_of_the_slower_axis():
    """Ranks (0, 1) and (1, 0) exchange their blocks; then ranks along y exchange halves of them, which is fast."""
    mesh = Mesh(x=2, y=2, speeds={"x": (0.0, 1e6), "y": (0.0, 1e9)})
    program = programs.attention(1, 8, 8, 256, 8)
    operand = program.operand("q")
    seconds = Relayouts(mesh).seconds(program, operand, ("q", "heads"), ("heads", "q"))
    assert seconds == pytest.approx(program.nbytes(operand) / 4 * (1e-6 + 0.5e-9))


def test_errors():
    mesh = Mesh(gpu=4)
    product_of = programs.all_gather_matmul(6, 6, 6)
    with pytest.raises(ValueError, match=r"alone: no placement divides its axes \(.*rows 6.*\) over Mesh\(gpu=4\)"):
        search_graph([GraphNode("alone", product_of)], mesh)
    program = programs.all_gather_matmul(8, 8, 8)
    with pytest.raises(ValueError, match="alone: memory=100: its parameters need at least 128 bytes of a rank"):
        search_graph([GraphNode("alone", program)], mesh, memory=100)
    first = GraphNode("first", programs.matmul_reduce_scatter(6, 8, 8))
    odd = GraphNode("odd", programs.all_gather_matmul(6, 8, 8), {"a": ("first", {"rows": "rows", "cols": "inner"})})
    with pytest.raises(ValueError, match=r"odd: no plan on Mesh\(x=2, y=2\): a: axis rows of 6 does not divide over 4"):
        search_graph([first, odd], Mesh(x=2, y=2), allowed={"odd": [("rows", "cols")]})
    with pytest.raises(ValueError, match="alone takes a from nobody: expected another operator"):
        search_graph([GraphNode("alone", program, {"a": ("nobody", {})})], mesh)
    with pytest.raises(ValueError, match="alone takes a from alone: expected another operator"):
        search_graph([GraphNode("alone", program, {"a": ("alone", {})})], mesh)
    with pytest.raises(ValueError, match="two operators are called alone"):
        search_graph([GraphNode("alone", program)] * 2, mesh)


def edge(renamed, consumer, operand="a"):
    """The message of the error of an edge from a product c (rows 8, cols 8), kept along cols."""
    graph = [
        GraphNode("first", programs.all_gather_matmul(8, 8, 8)),
        GraphNode("second", consumer, {operand: ("first", renamed)}),
    ]
    with pytest.raises(ValueError, match=f"^second takes {operand} from first: ") as raised:
        search_graph(graph, Mesh(gpu=4))
    return str(raised.value).partition(": ")[2]


def test_edges_that_do_not_fit():
    """Blocks would be read in another order than they were written in."""
    matmul, scatter = programs.all_gather_matmul, programs.matmul_reduce_scatter
    assert edge({"depth": "rows"}, matmul(8, 8, 8)) == "depth as rows, but c has rows, cols, and a rows, inner"
    straight = {"rows": "rows", "cols": "inner"}
    assert edge(straight, matmul(8, 8, 8)) == "c is kept along cols, and a along another axis, rows"
    assert "its axes are {'rows': 8, 'cols': 8} of c, and {'rows': 8, 'inner': 16} of a" in edge(
        straight, scatter(8, 8, 16)
    )
    assert edge({}, matmul(8, 8, 8)) == "the edge must say which axis of a is cols, along which c is kept"
    transposed = {"cols": "inner", "rows": "cols"}
    assert edge(transposed, scatter(8, 8, 8), "b").startswith("its axes are {'rows': 8, 'cols': 8} of c")
    assert edge(straight, scatter(8, 8, 8, "bfloat16")) == "it is float32, and matmul_reduce_scatter needs bfloat16"
    zigzag = programs.attention(1, 1, 1, 8, 8)
    assert edge({"rows": "heads", "cols": "q"}, zigzag, "q") == "cols is in contiguous order, q in zigzag order"
