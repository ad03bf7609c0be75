"""How long commir's searches take, by the number of ranks (about 3 min; on one core).

The claim: attention on 64 ranks is searched in less than 0.5 s and on 512 in less than 2 s without a limit of memory, and
layers on 64 ranks in less than 5 s. Medians of several searches in one process; the first is not counted.
Operators with many loops, and limits of memory that no plan meets, take longer: they are searched once.
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from benchmarks.support.layers import zamba_layer
from benchmarks.support.tables import markdown, publish
from commir import In, Mesh, Out, grid, operator, programs, search, search_graph, verify
from commir.ir.program import Program
from commir.searching.candidates import candidates
from commir.searching.layers import transformer_layer
from commir.searching.operator_options import GraphNode

REPETITIONS = 5
NODES = {"node": (1e-5, 12.5e9), "gpu": (3e-6, 450e9)}
MESHES = [Mesh(gpu=ranks) for ranks in (4, 64, 512)]
MESHES += [Mesh(node=nodes, gpu=8, speeds=NODES) for nodes in (8, 64)]
ATTENTION = programs.attention(16, 32, 8, 2**20, 128, dtype="bfloat16")
NAME = "attention, batch 16, 32/8 heads"
MANY = Mesh(gpu=512)


@operator
def products(batch=512, rows=512, columns=512, inner=512):  # type: ignore[no-untyped-def]
    """A product of batches of matrices: four loops."""
    a = In[batch, rows, inner]
    b = In[batch, inner, columns]
    c = Out[batch, rows, columns]
    for batch, rows, columns, inner in grid("sssr"):
        c[batch, rows, columns] += a[batch, rows, inner] * b[batch, inner, columns]


@operator
def contraction(a=512, b=512, c=512, d=512, e=512, f=512):  # type: ignore[no-untyped-def]
    """Six loops."""
    x = In[a, b, e, f]
    y = In[c, d, e, f]
    z = Out[a, b, c, d]
    for a, b, c, d, e, f in grid("ssssrr"):
        z[a, b, c, d] += x[a, b, e, f] * y[c, d, e, f]


def seconds(function: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """The median time of a function, of which the first call is not counted; 0 repetitions: the time of that call."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def attention_row(program: Program, mesh: Mesh) -> list[str]:
    """A row: candidates, the time of the search, that with a limit of memory, and that of verifying the best plan."""
    best = search(program, mesh)[0]
    limit = int(0.8 * best.memory)
    row = [f"{NAME}, {mesh!r}", f"{len(list(candidates(program, mesh))):,}"]
    row += [
        f"{seconds(lambda: search(program, mesh)):.3f} s",
        f"{seconds(lambda: search(program, mesh, memory=limit)):.3f} s",
    ]
    return [*row, f"{seconds(lambda: verify(best)):.3f} s" if mesh.ranks <= 64 else ""]


def slow_rows(mesh: Mesh) -> list[list[str]]:
    """Rows of operators with many loops, and of a limit of memory that no plan meets; one search each."""
    rows = []
    for name, program in {"product of batches": products(), "contraction of six loops": contraction()}.items():
        time_s = seconds(lambda program=program: search(program, mesh), 0)
        rows.append([f"{name}, {mesh!r}", f"{len(list(candidates(program, mesh))):,}", f"{time_s:.3f} s", "", ""])
    shapes = [(ATTENTION.shape(each), ATTENTION.itemsize(each)) for each in ATTENTION.operands]
    kept = sum(math.prod(shape) * itemsize // mesh.ranks for shape, itemsize in shapes)

    def refused() -> None:
        with suppress(ValueError):
            search(ATTENTION, mesh, memory=kept)
            raise AssertionError(f"a plan of {ATTENTION.name} holds {kept} bytes")

    return [*rows, [f"{NAME}, {mesh!r}, no plan fits", "", "", f"{seconds(refused, 0):.3f} s", ""]]


def graph_row(name: str, operators: list[GraphNode], mesh: Mesh) -> list[str]:
    """A row: the number of operators, and the time of the search."""
    return [
        f"{name}, {mesh!r}",
        f"{len(operators)} operators",
        f"{seconds(lambda: search_graph(operators, mesh)):.3f} s",
        "",
        "",
    ]


def main() -> None:
    """Measure and publish the table."""
    torch.set_num_threads(1)
    rows = [attention_row(ATTENTION, mesh) for mesh in MESHES] + slow_rows(MANY)
    pods = Mesh(pod=2, node=4, gpu=8)
    rows += [graph_row("Llama layer", transformer_layer(), pods), graph_row("Zamba2 layer", zamba_layer(), pods)]
    header = ["program and mesh", "candidates", "search", "with a limit of memory", "verifying the best plan"]
    publish("search-time", markdown(header, rows))


if __name__ == "__main__":
    main()
