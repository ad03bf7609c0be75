"""Layers by the plans of a graph on ranks. Oracles: the layer in torch's operations; the same graph on one rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from attention_problems import exact
from benchmarks.support.layers import best_3d_parallel, zamba_layer
from commir import Mesh, search_graph, verify
from commir.execution.state import Count
from commir.searching.graph_run import GraphRunner
from commir.searching.layers import transformer_layer

LLAMA = dict(batch=2, seq=16, hidden=16, heads=4, kv_heads=4, ffn=32, dtype="float64")
ZAMBA = dict(batch=2, seq=16, hidden=16, heads=4, dim=8, state=4, attention_heads=4, dtype="float64")
GROUPED = LLAMA | dict(heads=4, kv_heads=2)
LAYERS = {
    "llama": lambda: transformer_layer(**LLAMA),
    "llama with groups": lambda: transformer_layer(**GROUPED),
    "zamba": lambda: zamba_layer(**ZAMBA),
}
SLOW_NODES = {"node": (1e-5, 1e8), "gpu": (1e-6, 1e11)}
MESHES = [
    (2, dict(gpu=2)), (4, dict(node=2, gpu=2)), (8, dict(node=2, gpu=4)),
    pytest.param(8, dict(pod=2, node=2, gpu=2), marks=pytest.mark.full),
]  # fmt: skip


def given_to(operators, seed=0):
    """{operator: {input: whole tensor}} for parameters, and for the input of the layer."""
    generator, given = torch.Generator().manual_seed(seed), {}
    for each in operators:
        names = [operand.name for operand in each.parameters()] + ["x0"] * (each.name == "residual_in")
        shapes = {name: each.program.shape(each.program.operand(name)) for name in names}
        given[each.name] = {
            name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
        }
        if each.name == "scan":
            given[each.name] = {name: -x.abs() for name, x in given[each.name].items()}
    return given


def llama(given):
    """The layer in torch's operations."""
    x = given["residual_in"]["x0"]
    heads = [(x @ given[f"in_{name}"]["b"]).unflatten(-1, (-1, 4)) for name in "qkv"]
    y = x + exact(*heads, causal=True)[0].flatten(2) @ given["out_attention"]["b"]
    gate, up = (y @ given[name]["b"] for name in ("in_gate", "in_up"))
    return y + (torch.nn.functional.silu(gate) * up) @ given["out_mlp"]["b"]


def run_layer(rank, operators, plans, given):
    """(this rank's block of the layer's output, bytes sent)."""
    local, count = {}, Count()
    for name, whole in given.items():
        plan, there = plans[name], rank % plans[name].mesh.ranks
        dtype = next((x.dtype for x in whole.values()), torch.float64)
        shapes = {each.name: torch.zeros(plan.program.shape(each), dtype=dtype) for each in plan.inputs()}
        shards = plan.shard(shapes | whole, there)
        local[name] = {key: shards[key] for key in whole}
    group = dist.group.WORLD if dist.is_initialized() else None
    return GraphRunner(operators, plans, group)(local, count)["residual_out"], count.sent


@pytest.mark.parametrize("best", [search_graph, best_3d_parallel])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("world, mesh", MESHES)
@pytest.mark.parametrize("memory", [None, 1100])
def test_layers_on_ranks(ranks, world, mesh, name, best, memory):
    """With a limit of memory, no rank can hold all of a product's parameters."""
    operators, mesh = LAYERS[name](), Mesh(speeds=SLOW_NODES if "node" in mesh else None, **mesh)
    limit = memory and 8 * memory // world
    if limit and world == 8 and (name, best) == ("llama with groups", best_3d_parallel):
        with pytest.raises(ValueError, match="no 3-D layout divides the operators"):  # its key/value heads are too few
            best(operators, mesh, limit)
        return
    found = best(operators, mesh, limit)
    plans, given = found.plans(), given_to(operators)
    for plan in plans.values():
        verify(plan)
    results = ranks(run_layer, world, operators, plans, given)
    assert {sent for _, sent in results} == {sum(plan.bytes_per_rank for plan in plans.values())}
    last = plans["residual_out"]
    whole = last.unshard([{"y": block} for block, _ in results])["y"]
    alone = search_graph(operators, Mesh(gpu=1))
    expected = llama(given) if name.startswith("llama") else run_layer(0, operators, alone.plans(), given)[0]
    assert (whole - expected).abs().max() <= 1e-13 * max(1.0, expected.abs().max())


def test_what_a_graph_is_predicted_to_take():
    """The times of its plans; where messages of several operands are sent together, one latency may be enough for them."""
    for name in LAYERS:
        found = search_graph(LAYERS[name](), Mesh(gpu=4))
        assert sum(plan.seconds for plan in found.plans().values()) == pytest.approx(found.seconds)
        slow = search_graph(LAYERS[name](), Mesh(gpu=4, speeds={"gpu": (1.0, 1e9)}))
        assert sum(plan.seconds for plan in slow.plans().values()) <= slow.seconds * (1 + 1e-9)


def test_layouts_that_cannot_be_lowered_together_are_not_chosen():
    """One key/value head: q would arrive cut along heads, and k cannot be cut so."""
    operators = transformer_layer(2, 24, 24, heads=12, kv_heads=1, ffn=48, dtype="float64")
    assert search_graph(operators, Mesh(n=2, g=2), 2400).plans()


def different(rank, operators, plans, given):
    try:
        run_layer(rank, operators, plans, given)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world", [2])
def test_plans_that_do_not_fit_together(ranks, world):
    """An operator's plan of its own takes its input elsewhere, in a block of as many elements."""
    operators = transformer_layer(**LLAMA | dict(hidden=32))
    by_tensor = {each.name: [("rows",)] for each in operators if each.name.startswith(("in_", "residual"))}
    plans, given = search_graph(operators, Mesh(gpu=world), allowed=by_tensor).plans(), {}
    (gate,) = (each for each in operators if each.name == "gate_mlp")
    own = search_graph([replace(gate, inputs={})], Mesh(gpu=world), allowed={"gate_mlp": [("cols",)]}).plans()[
        "gate_mlp"
    ]

    def run(rank):
        return different(rank, operators, plans | {"gate_mlp": own}, given), different(rank, operators, plans, given)

    message = "gate_mlp takes x0 from in_gate: its plan takes cols on gpu, and that of in_gate leaves rows on gpu"
    for wrong, right in ranks(run, world):
        assert wrong.startswith(message) and not (right or "").startswith("gate_mlp")


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("given, message", [
    ({"residual": {"x0": torch.zeros(2)}}, "no plan for operator 'residual': there are plans for residual_in, "),
    ({"residual_in": {"x0": torch.zeros(2, requires_grad=True)}}, "residual_in: x0 requires a gradient, which no graph's"),
])  # fmt: skip
def test_what_one_rank_is_given_wrong_is_an_error_on_all(ranks, world, given, message):
    operators = transformer_layer(**LLAMA)
    plans = search_graph(operators, Mesh(gpu=world)).plans()

    def run(rank):
        with pytest.raises(ValueError) as error:
            GraphRunner(operators, plans, dist.group.WORLD)(given if rank == 1 else {})
        return str(error.value)

    assert all(message in text and text.endswith("(rank 1)") for text in ranks(run, world))


def test_an_unknown_input_is_an_error():
    operators = transformer_layer(**LLAMA)
    run = GraphRunner(operators, search_graph(operators, Mesh(gpu=1)).plans(), None)
    with pytest.raises(ValueError, match="residual_in: elementwise takes x0, not x1"):
        run({"residual_in": {"x1": torch.zeros(2)}})
