"""Layers by the layouts that commir's graph search chooses, against the best 3-D parallel layout (about 3 min; root).

The claim: a layer is faster where all operators' layouts are chosen together than where each axis of the mesh is data,
context or tensor parallel throughout. Forward passes in fp32 on nodes of some ranks; the ranks of a node share one slow
link. Attention is not causal, so that all ranks compute as much in every layout. A rank holds at most half of the parameters
of any one product. The speeds of both levels are measured before. Both layouts take turns; the table shows medians. The 3-D
layout runs twice, and the difference of its two medians is the spread.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.layers import best_3d_parallel, zamba_layer
from benchmarks.support.plans import link_speeds
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed
from commir import Mesh, Plan, search_graph
from commir.searching.graph_run import GraphRunner
from commir.searching.layers import transformer_layer
from commir.searching.operator_options import GraphNode

REPETITIONS, BURST = 10, "16kb"


@dataclass(frozen=True)
class Cell:
    """One measurement: a layer on nodes of some ranks."""

    layer: str
    nodes: int
    per_node: int
    rate: str = "50mbit"

    def __str__(self) -> str:
        return f"{self.layer}, {self.nodes} x {self.per_node}, {self.rate}"

    @property
    def ranks(self) -> int:
        """The ranks of all nodes together."""
        return self.nodes * self.per_node

    def operators(self) -> list[GraphNode]:
        """The layer, small."""
        if self.layer == "Llama":
            return transformer_layer(1, 1024, 512, heads=8, kv_heads=4, ffn=1536, dtype="float32", causal=False)
        return zamba_layer(1, 1024, 512, heads=16, dim=64, state=16, attention_heads=8, dtype="float32", causal=False)

    def limit(self, operators: list[GraphNode]) -> int:
        """Bytes: half of the largest product's parameters."""
        return max(each.program.nbytes(operand) for each in operators for operand in each.parameters()) // 2


CELLS = [Cell(layer, *shape) for layer in ("Llama", "Zamba2") for shape in ((2, 2), (2, 4), (4, 2))]


def blocks(operators: list[GraphNode], plans: dict[str, Plan]) -> dict[str, dict[str, torch.Tensor]]:
    """{operator: {input: a random block}} of parameters, and of the layer's input."""
    given = {}
    for each in operators:
        digits = plans[each.name].digits
        taken = each.parameters() + [operand for operand in each.program.inputs if each.name == "residual_in"]
        shapes = {operand.name: digits.local_shape(operand, digits.home(operand)) for operand in taken}
        given[each.name] = {name: 0.05 * torch.randn(shape) for name, shape in shapes.items()}
        if each.name == "scan":
            given[each.name] = {name: -x.abs() for name, x in given[each.name].items()}
    return given


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    mesh = Mesh(node=cell.nodes, gpu=cell.per_node)
    mesh = mesh.with_speeds(link_speeds(mesh, group, REPETITIONS))
    operators = cell.operators()
    limit = cell.limit(operators)
    graphs = {"3-D": best_3d_parallel(operators, mesh, limit), "searched": search_graph(operators, mesh, limit)}
    plans = {name: graph.plans() for name, graph in graphs.items()}
    runs = {}
    for name in ("3-D again", "3-D", "searched"):
        mine = plans[name.removesuffix(" again")]
        runner, given = GraphRunner(operators, mine, group), blocks(operators, mine)
        runs[name] = timed(lambda runner=runner, given=given: runner(given))
    seconds = repetitions(list(runs.values()), group, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        write_result(out, {
            "seconds": dict(zip(runs, seconds, strict=True)),
            "predicted": {name: graph.seconds for name, graph in graphs.items()},
            "sent": {name: sum(plan.bytes_per_rank for plan in each.values()) for name, each in plans.items()},
            "placements": {name: graph.explain() for name, graph in graphs.items()},
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, found: dict) -> list[str]:
    """A row of the table."""
    seconds, predicted, sent = found["seconds"], found["predicted"], found["sent"]
    return [
        str(cell),
        f"{seconds['3-D']:.3f} s",
        f"{seconds['searched']:.3f} s",
        f"{seconds['3-D'] / seconds['searched']:.2f}x",
        f"{predicted['3-D'] / predicted['searched']:.2f}x",
        f"{sent['3-D'] / 1e6:.2f} MB",
        f"{sent['searched'] / 1e6:.2f} MB",
        f"{abs(seconds['3-D again'] / seconds['3-D'] - 1):.0%}",
    ]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["layer, nodes x ranks, links", "best 3-D", "searched", "speedup", "predicted for messages",
              "sent by a rank, 3-D", "searched", "spread"]  # fmt: skip
    print_or_publish("layers", markdown(header, [row(cell, found) for cell, found in results.items()]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
