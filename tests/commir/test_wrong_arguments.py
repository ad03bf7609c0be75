"""Likely mistakes in calls of commir get one error that says what is wanted. Oracle: the text of the errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import commir
from commir import In, Mesh, Out, Schedule, grid, programs
from commir.execution.gradient import backward_plan
from commir.ir.program import Axis, Operand, Result
from commir.searching.graph_run import GraphRunner
from commir.searching.grids import best_grid
from commir.searching.layers import transformer_layer, zamba_layer
from commir.searching.operator_options import GraphNode
from commir.searching.search import all_plans


@commir.operator
def product(rows=4, cols=4):
    a = In[rows, cols]
    b = In[cols].home(None)
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] += torch.exp(a[rows, cols]) * b[cols]


MESH, FOUR = Mesh(gpu=2), Mesh(a=2, b=2)
PROGRAM = programs.attention(1, 2, 2, 8, 4)
PLAN = commir.search(PROGRAM, MESH)[0]
ONES = torch.ones(4, 4)
SCAN = commir.place(Schedule(programs.selective_scan(1, 16, 8, 2, 4), Mesh(gpu=4)), gpu="seq").lower()
RING = commir.place(Schedule(programs.attention(1, 4, 4, 32, 8), Mesh(gpu=4)), gpu="q").lower()
ALONE, ALONE_INPUTS = commir.place(Schedule(product(), Mesh(gpu=1)), gpu="rows").lower(), {"a": ONES, "b": ONES[0]}
LAYER = [GraphNode("up", programs.all_gather_matmul(8, 8, 8))]
ARRAY, MATRIX = np.zeros((20, 3)), torch.zeros(20, 3)  # the repr of each has several lines
BY_HAND = commir.place(Schedule(product(), MESH), gpu="rows")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: commir.search(product, MESH), r"search takes Program \(call the operator .* nearest\(\)\), not Operator"),
        (lambda: commir.pareto(product, MESH), "pareto takes Program"),
        (lambda: commir.pareto(3, MESH), "pareto takes Program"),
        (lambda: commir.pareto(PROGRAM, 3), "pareto takes Mesh"),
        (lambda: commir.place(PROGRAM, gpu="q"), r"place takes LoopNest \(Schedule\(program, mesh\) makes one\), not Prog"),
        (lambda: commir.measure_tile(3, 2), "measure_tile takes Program"),
        (lambda: commir.measure_tile(PROGRAM, "2"), "a tile of a plan on '2' ranks: a whole number"),
        (lambda: commir.measure_overlap(3, None), "measure_overlap takes Program"),
        (lambda: PLAN.on_mesh(3), "on_mesh takes Mesh"),
        (lambda: Mesh(speeds=(1e-5, 1e9), g=2), r"speeds=\(1e-05, .*\): they are given as \{mesh axis: \(seconds, bytes"),
        (lambda: Mesh(speeds=5, g=2), "speeds=5: they are given as"),
        (lambda: Mesh(speeds={"g": (torch.ones(2), 1e9)}, g=2), r"speed of mesh axis g is \(tensor\(.*it must be \(0 to 1e"),
        (lambda: MESH.with_speeds({"gpu": (0, torch.ones(2))}), r"speed of mesh axis gpu is \(0, tensor\(.*it must be \(0"),
        *((lambda speed=speed: Mesh(speeds={"g": speed}, g=2), "speed of mesh axis g is .*two numbers below .* or a Fabric")
          for speed in (torch.tensor([0, 1e9]), {0, 1e9}, map(float, (0, 1e9)), {0: 1, 1e9: 2}, ("0", "1"), (0, 1, 2),
                        (0, 10**400))),
        (lambda: commir.search_graph(3, MESH), "search_graph takes a list of operators, not 3"),
        (lambda: PLAN.unshard([{"out": torch.zeros(1, 4, 2, 4)}, {"out": torch.zeros(1, 3, 2, 4)}]),
         r"unshard: out of rank 1 is \(1, 3, 2, 4\); its block of out has shape \(1, 4, 2, 4\)"),
        (lambda: PLAN.unshard([{}, {"out": torch.zeros(1, 4, 2, 4)}]), "unshard: out of rank 0 is missing; its block"),
        (lambda: PLAN.unshard([{"out": torch.zeros(1, 4, 2, 4, dtype=each)} for each in (torch.float32, torch.float64)]),
         "unshard: out of rank 1 is torch.float64, and of rank 0 torch.float32"),
        (lambda: PLAN.unshard([{"out": torch.zeros(1, 4, 2, 4)}, {}]), "unshard: out of rank 1 is missing; its block"),
        (lambda: commir.search(PROGRAM, MESH, memory=True), "memory=True: it must be a number of bytes of at least 0"),
        (lambda: commir.search(PROGRAM, MESH, memory=-1), "memory=-1: it must be a number of bytes"),
        (lambda: commir.search(PROGRAM, MESH, memory=float("nan")), "memory=nan: it must be a number of bytes"),
        (lambda: Schedule(product, MESH), "Schedule takes Program"),
        (lambda: Schedule(PROGRAM, 4), r"Schedule takes Mesh \(such as Mesh\(gpu=4\)\), not 4"),
        (lambda: commir.search(PROGRAM, 4), r"search takes Mesh \(such as Mesh\(gpu=4\)\), not 4"),
        (lambda: commir.search(PROGRAM, 4, fabric=(1e-5, 1e9)), "search takes Mesh"),
        (lambda: commir.search(PROGRAM, MESH, memory="1GB"), "memory='1GB': it must be a number of bytes"),
        (lambda: commir.search(PROGRAM, MESH, top="3"), "search: top='3'; it must be a whole number of at least 1"),
        (lambda: commir.verify([PLAN]), r"verify takes Plan \(Schedule.lower\(\) makes one, and search\(\) a list"),
        (lambda: commir.interpret(BY_HAND, {}), "interpret takes Plan"),
        (lambda: commir.execute(ALONE, ALONE_INPUTS, counter=3), "counter=3: it must be a Counter, or None"),
        (lambda: commir.interpret(BY_HAND.lower(), {}, 3), "interpret: counts=3; it must be a list, or None"),
        (lambda: SCAN.at(blocks=2), "axis blocks of 2: the schedule divides seq into 8 blocks"),
        (lambda: SCAN.at(heads=6), "axis heads of 6: states would pass in another form than with 8 heads, as the steps do"),
        (lambda: RING.at(q=36), r"q: axis q of 36 does not divide over 4 ranks \(zigzag order"),
        (lambda: commir.execute([PLAN], {}), "execute takes Plan"),
        (lambda: commir.differentiable(PLAN, count=3), "count=3: it must be a Count, or None"),
        (lambda: commir.differentiable([PLAN]), "differentiable takes Plan"),
        (lambda: commir.fastest(PLAN), r"fastest takes Sequence \(such as the plans that search\(\) returns\)"),
        (lambda: commir.fastest([BY_HAND]), "fastest takes Plan"),
        (lambda: PLAN.shard([torch.zeros(2)], 0), r"inputs are \{name: tensor\}, not \[tensor"),
        (lambda: commir.search_graph([PROGRAM], MESH), r"search_graph takes GraphNode \(such as GraphNode\("),
        (lambda: commir.search_graph([product], MESH), r"search_graph takes GraphNode \(.*\), not Operator\(name='product'"),
        (lambda: backward_plan([PLAN]), "backward_plan takes Plan"),
        (lambda: all_plans(product, MESH), "all_plans takes Program"),
        (lambda: all_plans(PROGRAM, 4), "all_plans takes Mesh"),
        (lambda: commir.search_graph([], 4), "search_graph takes Mesh"),
        (lambda: PLAN.with_options(caussal=True), "attention has no option 'caussal'; it has causal, scale"),
        (lambda: BY_HAND.lower().with_options(causal=True), "product has no option 'causal'; it has none"),
        (lambda: GraphNode("a", product), r"GraphNode takes Program \(call the operator .* nearest\(\)\), not Operator"),
        (lambda: GraphNode(3, product()), "graph node 3: name is 3, and no str"),
        (lambda: GraphNode("a", product(), {"b": "up"}), r"graph node a: inputs is \{'b': 'up'\}, and no .*Mapping\[str, "),
        (lambda: commir.search_graph(LAYER, MESH, allowed=3), r"allowed=3: it is given as \{operator: \[\(loop of each"),
        (lambda: commir.search_graph(LAYER, MESH, allowed={"up": [3]}), r"allowed\['up'\] is \[3\]; it needs a loop for"),
        (lambda: GraphRunner(LAYER, {}, None)({}), r"GraphRunner: up takes Plan \(.*\), not None"),
        (lambda: GraphRunner(LAYER, [PLAN], None)({}), "GraphRunner takes a list of operators, and {operator: plan}, not "),
        (lambda: transformer_layer(hidden=100, heads=8), "100 hidden elements do not divide over 8 heads: 4 are left"),
        (lambda: zamba_layer(hidden=100), "100 hidden elements do not divide over 32 heads: 4 are left"),
        (lambda: transformer_layer(heads=0), "heads=0: it must be a whole number of at least 1"),
        (lambda: zamba_layer(attention_heads="4"), "attention_heads='4': it must be a whole number of at least 1"),
        (lambda: programs.attention(heads="8"), "heads='8': it must be a whole number of at least 1"),
        (lambda: programs.attention(causal="false"), "causal='false': it must be True or False"),
        (lambda: programs.attention(backward="no"), "backward='no': it must be True or False"),
        (lambda: programs.attention(order=""), "order"),
        (lambda: programs.attention(scale=True), "scale=True: it must be a number, or None"),
        (lambda: programs.attention(scale="1"), "scale='1': it must be a number, or None"),
        (lambda: programs.selective_scan(groups=None), "groups=None: it must be a whole number of at least 1"),
        (lambda: programs.gated_delta(heads=0), "heads=0: it must be a whole number of at least 1"),
        (lambda: MESH.with_speeds(None), r"speeds=None: they are given as \{mesh axis: \(seconds, bytes per second\)\}"),
        (lambda: Mesh.of_axes(["gpu"]), r"a mesh consists of MeshAxis\(name, size, level\), not \('gpu',\)"),
        (lambda: PLAN.shard(dict.fromkeys("qkv", torch.zeros(1, 8, 2, 4)), "0"), "rank '0' is no whole number"),
        (lambda: PLAN.unshard(None), r"unshard takes \{name: block\} of each rank in a list, not None"),
        (lambda: PLAN.unshard([{}]), "unshard: 1 part for a mesh of 2 ranks"),
        (lambda: PLAN.unshard([{}] * 3), "unshard: 3 parts for a mesh of 2 ranks"),
        (lambda: PLAN.unshard([{"out": 3}, {"out": 3}]), "unshard: out of rank 0 is 3; its block of out has shape"),
        (lambda: commir.verify(PLAN, 2**64), "verify: seed=18446744073709551616; it must be a whole number of at least 0"),
        (lambda: commir.verify(PLAN, "seed"), "verify: seed='seed'; it must be a whole number"),
        (lambda: commir.fastest([PLAN], device="gpu"), "device='gpu': it must be a device of torch, such as 'cpu'"),
        (lambda: commir.measure_tile(PROGRAM, 2, device=None), "device=None: it must be a device of torch"),
        *((lambda measure=measure, device=device: measure(device), f"^device='{device}': torch cannot use it on this mach")
          for device in ("cuda:99", "xla")
          for measure in (lambda device: commir.fastest([ALONE], device=device),
                          lambda device: commir.measure_tile(PROGRAM, 2, device=device),
                          lambda device: commir.measure_overlap(PROGRAM, device=device))),
        *((lambda measure=measure: measure("meta"), "^device='meta': its tensors have no data to compute with$")
          for measure in (lambda device: commir.fastest([ALONE], device=torch.device(device)),
                          lambda device: commir.measure_tile(programs.weighted_sum(12, 12), 2, device=device),
                          lambda device: commir.measure_overlap(PROGRAM, device=device))),
        (lambda: commir.interpret(ALONE, None), r"^inputs are \{name: tensor\}, not None$"),
        (lambda: commir.interpret(ALONE, ALONE_INPUTS | {"b": 3}), "^b is 3, and no tensor$"),
        (lambda: commir.interpret(ALONE, ALONE_INPUTS | {"b": ARRAY}), r"^b is array\(\[\[0., .*, and no tensor$"),
        *((lambda call=call, value=value: call(value), r"(array|tensor)\(\[\[0., 0., 0.\], \[0., ")
          for value in (ARRAY, MATRIX)
          for call in (lambda value: commir.search(value, MESH), lambda value: commir.search(PROGRAM, value),
                       lambda value: commir.search(PROGRAM, MESH, top=value),
                       lambda value: commir.search(PROGRAM, MESH, verified=value),
                       lambda value: commir.search(PROGRAM, MESH, memory=value),
                       lambda value: commir.search(PROGRAM, MESH, fabric=value),
                       lambda value: commir.search(PROGRAM, MESH, point_seconds=value),
                       lambda value: commir.search_graph(value, MESH),
                       lambda value: commir.search_graph(LAYER, MESH, allowed={"up": value}),
                       lambda value: GraphNode(value, PROGRAM), lambda value: GraphNode("a", PROGRAM, value),
                       lambda value: GraphRunner(LAYER, value, None)({}), lambda value: GraphRunner(value, {}, None)({}),
                       lambda value: commir.interpret(ALONE, value), lambda value: commir.interpret(ALONE, {}, value),
                       lambda value: commir.execute(ALONE, ALONE_INPUTS, count=value),
                       lambda value: commir.verify(PLAN, value), lambda value: commir.measure_tile(PROGRAM, value),
                       lambda value: commir.measure_tile(PROGRAM, 2, device=value),
                       lambda value: commir.fastest([ALONE], None, value),
                       lambda value: PLAN.unshard(value), lambda value: PLAN.shard(value, 0),
                       lambda value: Mesh(g=value), lambda value: Mesh(g=2, speeds=value),
                       lambda value: Mesh(g=2, speeds={"g": value}), lambda value: Mesh.of_axes([value]),
                       lambda value: MESH.coordinates(value), lambda value: MESH.with_speeds(value),
                       lambda value: PROGRAM.axis(value), lambda value: PROGRAM.operand(value),
                       lambda value: PROGRAM.with_options(scale=value), lambda value: Axis(value, 4),
                       lambda value: Axis("rows", value), lambda value: Operand("a", value),
                       lambda value: programs.attention(scale=value), lambda value: programs.attention(causal=value),
                       lambda value: programs.attention(heads=value), lambda value: programs.attention(dtype=value),
                       lambda value: Schedule(PROGRAM, MESH).tile("q", value), lambda value: commir.place(value),
                       lambda value: Schedule(PROGRAM, MESH).tile("q", 2, value),
                       lambda value: Schedule(PROGRAM, MESH).shard(value, "q", "gpu"),
                       lambda value: Schedule(PROGRAM, MESH).shard("q", value, "gpu"),
                       lambda value: Schedule(PROGRAM, MESH).shard("q", "q", value),
                       lambda value: Schedule(PROGRAM, MESH).replicate("q", value),
                       lambda value: Schedule(PROGRAM, MESH).reorder(value),
                       lambda value: Schedule(PROGRAM, MESH).join("q", value),
                       lambda value: Schedule(PROGRAM, MESH).chunk(value),
                       lambda value: Schedule(PROGRAM, MESH).shift(value, "gpu"),
                       lambda value: Schedule(PROGRAM, MESH).parallelize("q", value),
                       lambda value: Schedule(PROGRAM, MESH).patch(value),
                       lambda value: Schedule(PROGRAM, MESH).apply([(value,)]),
                       lambda value: commir.known(Schedule(PROGRAM, MESH), value),
                       lambda value: commir.known(Schedule(PROGRAM, MESH), "ring", value),
                       lambda value: commir.place(Schedule(PROGRAM, MESH), gpu=value),
                       lambda value: commir.scheduling.placements.in_chunks(Schedule(PROGRAM, MESH), value, 2),
                       lambda value: commir.scheduling.placements.in_chunks(Schedule(PROGRAM, MESH), "q", value),
                       lambda value: Axis("rows", 4, value), lambda value: Axis("rows", 4, "s", value),
                       lambda value: programs.attention(order=value), lambda value: MESH.axis(value),
                       lambda value: MESH.size(value), lambda value: MESH.split(value, a=2),
                       lambda value: commir.search_graph(LAYER, MESH, allowed=value),
                       lambda value: commir.execute(ALONE, {}, value), lambda value: commir.fastest([ALONE], value))),
        (lambda: PLAN.unshard([{"out": ARRAY}, {}]), r"^unshard: out of rank 0 is array\(\[\[0., .*; its block of out"),
        *((call, r"tensor\(\[\[0., 0., 0.\], \[0., ")
          for call in (lambda: commir.search_graph(LAYER, MESH, allowed={MATRIX: 3}),
                       lambda: commir.interpret(ALONE, {MATRIX: ONES}),
                       lambda: GraphRunner(LAYER, {"up": PLAN, MATRIX: 3}, None)({}),
                       lambda: MESH.with_speeds({MATRIX: 3}), lambda: Mesh(g=2, speeds={MATRIX: 3}))),
        *((lambda call=call: call(np.int64(1)), r"np\.int64\(1\) \(not Python's int\)")
          for call in (lambda value: Mesh(g=value), lambda value: Axis("rows", value),
                       lambda value: commir.verify(PLAN, value), lambda value: commir.search(PROGRAM, MESH, top=value),
                       lambda value: programs.attention(heads=value),
                       lambda value: commir.search(PROGRAM, MESH, memory=value),
                       lambda value: commir.fastest([ALONE], None, value))),
        (lambda: programs.attention(scale=np.float32(1)), r"scale=np\.float32\(1\.0\) \(not Python's float\): it must be"),
        (lambda: commir.interpret(ALONE, {0: ONES}), "^product takes a, b, not 0$"),
        (lambda: commir.interpret(ALONE, {"a\nb": ONES}), r"^product takes a, b, not 'a\\nb'$"),
        (lambda: GraphNode("a\nb", PROGRAM), r"graph node 'a\\nb': its name must be a printable text"),
        (lambda: Schedule(PROGRAM, MESH).tile("q", 2, 5), r"tile\(q, 2\): 5 is no name of a digit"),
        (lambda: Schedule(PROGRAM, MESH).reorder(["q"]), r"attention has no digit \['q'\]; it has batch, heads, q, kv"),
        (lambda: Schedule(PROGRAM, MESH).shard(["q"], "heads", "gpu"), r"attention has no operand \['q'\]; it has q, k, v,"),
        (lambda: commir.known(Schedule(PROGRAM, MESH), ["ring"]), r"attention has no known schedule \['ring'\]; it has "),
        (lambda: commir.known(Schedule(PROGRAM, MESH), "ring", 0), "the mesh has no axis 0; it has gpu"),
        (lambda: commir.known(Schedule(PROGRAM, FOUR), "USP", "a", "a"), "known: a, a name a mesh axis twice"),
        (lambda: commir.search(PROGRAM, Mesh(gpu=2, speeds={"gpu": (0, 1e9)}), fabric="x"), "speed of mesh axis gpu is 'x'"),
        (lambda: best_grid(PROGRAM, MESH, training="no"), "training='no': it must be True or False"),
        (lambda: Schedule(PROGRAM, MESH).apply([("tile", "q")]), "tile: missing a required argument: 'factor'"),
        (lambda: Schedule(PROGRAM, MESH).apply([("tile", "q", 2, "a", "b", "c")]), "tile: too many positional arguments"),
        (lambda: Schedule(PROGRAM, MESH).apply([5]), r"primitives are given as lists in a list, not \[5\]"),
        (lambda: Schedule(PROGRAM, MESH).apply(None), "primitives are given as lists in a list, not None"),
        (lambda: Schedule(PROGRAM, MESH).apply([()]), "'' is none of the primitives tile, join"),
        (lambda: Axis("rows", 4, []), r"axis rows has kind \[\], none of s, r, c, w"),
        (lambda: Operand("a", "rows"), r"operand a: axes is 'rows', and no tuple\[str, \.\.\.\]"),
        (lambda: Operand("a", ("rows",), groups={"rows": 2}), r"operand a: groups is \{'rows': 2\}, and no tuple\[tuple\["),
        (lambda: Result("sum", "c"), r"result: outputs is 'c', and no tuple\[str, \.\.\.\]"),
        (lambda: replace(PROGRAM, axes=list(PROGRAM.axes)), r"program attention: axes is \[Axis\(.*, and no tuple\[Axis, "),
        (lambda: product(dtype=[]), r"program product: dtype is \[\], and no str"),
    ],
)  # fmt: skip
def test_arguments_of_another_type(call, message):
    """One line, also where a device or the repr of an argument has several."""
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_limit_of_memory_of_a_graph_is_a_number():
    node = commir.searching.operator_options.GraphNode("alone", programs.all_gather_matmul(8, 8, 8))
    with pytest.raises(ValueError, match="memory='1GB': it must be a number of bytes"):
        commir.search_graph([node], MESH, memory="1GB")


@pytest.mark.parametrize(
    "dtypes, message",
    [
        ((torch.int64, torch.int64), "a is torch.int64; a plan computes with floating-point tensors"),
        ((torch.float8_e4m3fn,) * 2, "a is torch.float8_e4m3fn; a plan computes with floating-point tensors"),
        ((torch.float32, torch.int64), "b is torch.int64; a plan computes with floating-point tensors"),
        (
            (torch.bfloat16, torch.float64),
            "a is torch.bfloat16, and b torch.float64; the inputs of product must have one",
        ),
    ],
)
def test_dtypes_that_would_round_the_results(dtypes, message):
    inputs = {"a": torch.ones(4, 4).to(dtypes[0]), "b": torch.ones(4).to(dtypes[1])}
    plan = BY_HAND.lower()
    with pytest.raises(ValueError, match=message):
        commir.interpret(plan, inputs)
    alone = commir.place(Schedule(product(), Mesh(gpu=1)), gpu="rows").lower()
    with pytest.raises(ValueError, match=message):
        commir.execute(alone, inputs)


def test_statistics_are_in_float32():
    """lse of a bf16 backward pass is kept in at least fp32."""
    program = programs.attention(1, 2, 2, 8, 4, backward=True, dtype="bfloat16")
    plan = commir.search(program, MESH)[0]
    shapes = {each.name: program.shape(each) for each in plan.inputs()}
    inputs = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    inputs["lse"] = inputs["lse"].float()
    assert {x.dtype for x in commir.interpret(plan, inputs).values()} == {torch.bfloat16}


def test_a_list_of_speeds_that_changes_later():
    """As JSON has it: the same as a tuple, and the mesh stays as it is."""
    speed = [1e-5, 1e9]
    mesh = Mesh(gpu=4, speeds={"gpu": speed})
    speed[1] = 1.0
    assert mesh == Mesh(gpu=4, speeds={"gpu": (1e-5, 1e9)}) == Mesh(gpu=4).with_speeds({"gpu": [1e-5, 1e9]})
