"""Operators at the sizes of the paper on Mercury, predicted by commir's cost model (about 5 min; nothing is measured).

The counterparts of figures 9 to 12 of the paper: attention and products of matrices of Llama-3 8B and 70B from 4K to 2M
tokens, batch 1 to 16, on nodes of L4, A100 and H100 GPUs (its table 3). Links have half of the stated bandwidth in each
direction, 3 us of latency in a node and 10 us between nodes; each GPU has the bandwidth between nodes by itself. Tiles run
at half of the GPU's dense peak, and hide messages entirely. Attention is not causal, forward, in bf16. The search may hold
the GPU's memory; known schedules that hold more are left out.

USP is its fastest split: heads on the innermost ranks, and rings outside of them, one for each level.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.support.layers import best_3d_parallel
from benchmarks.support.tables import markdown, publish
from commir import Mesh, Plan, Schedule, known, place, programs, search, search_graph
from commir.ir.program import Program
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import Placement
from commir.searching.layers import transformer_layer
from commir.searching.operator_options import GraphNode, options_of, tile_name

HEADS = {"32/32": 32, "32/8": 8}  # query heads / key and value heads, of 128 elements: {name: key and value heads}
RING = Placement("q", True)
K, M = 1024, 1024**2


@dataclass(frozen=True)
class Gpu:
    """A row of the paper's table 3, as predictions use it: seconds are those of a message, rates are per second."""

    name: str
    flops: float
    memory: float
    hbm: float
    inside: float
    between: float

    def mesh(self, nodes: int, gpus: int) -> Mesh:
        """Nodes of some GPUs."""
        return Mesh(node=nodes, gpu=gpus, speeds={"node": (1e-5, self.between), "gpu": (3e-6, self.inside)})


GPUS = [
    Gpu("L4", 60e12, 24e9, 300e9, 32e9, 6.25e9),
    Gpu("A100", 156e12, 40e9, 1555e9, 300e9, 6.25e9),
    Gpu("H100", 495e12, 80e9, 3350e9, 450e9, 12.5e9),
]
MESHES = [(1, 8), (2, 4), (4, 4)]


def tile(gpu: Gpu, flops_per_point: int) -> dict[str, float]:
    """The times of tiles that a search takes."""
    return dict(point_seconds=flops_per_point / gpu.flops, call_seconds=1e-5)


def lowered(plans: Iterator[Callable[[], Schedule]], gpu: Gpu, flops_per_point: int) -> Plan | None:
    """The fastest plan that fits into the memory, of schedules that may be illegal."""
    found = []
    for make in plans:
        try:
            plan = make().lower().with_tile(**tile(gpu, flops_per_point))
        except IllegalSchedule:
            continue
        found += [plan] if plan.memory <= gpu.memory else []
    return min(found, key=lambda plan: plan.seconds, default=None)


def flat_ring(program: Program, mesh: Mesh) -> Iterator[Callable[[], Schedule]]:
    """One ring of all GPUs, as fast as its slowest link."""
    level = "node" if mesh.size("node") > 1 else "gpu"
    yield lambda: known(Schedule(program, Mesh(rank=mesh.ranks, speeds={"rank": mesh.speeds[level]})), "ring")


def ulysses(program: Program, mesh: Mesh) -> Iterator[Callable[[], Schedule]]:
    """Heads on all GPUs."""
    yield lambda: place(Schedule(program, mesh), node="heads", gpu="heads")


def usp(program: Program, mesh: Mesh) -> Iterator[Callable[[], Schedule]]:
    """Heads on the innermost ranks, for every number of these, and rings outside of them."""
    nodes, gpus = mesh.size("node"), mesh.size("gpu")
    for inner in (n for n in range(2, gpus) if gpus % n == 0):
        split = mesh.split("gpu", ring=gpus // inner, heads=inner)
        yield lambda split=split: place(Schedule(program, split), node=RING, ring=RING, heads="heads")
    for inner in (n for n in range(1, nodes) if nodes % n == 0):
        split = mesh.split("node", ring=nodes // inner, more=inner)
        yield lambda split=split: place(Schedule(program, split), ring=RING, more="heads", gpu="heads")


BASELINES = {"ring": flat_ring, "Ulysses": ulysses, "USP": usp}


def attention(gpu: Gpu, shape: tuple[int, int], kv_heads: int, batch: int, seq: int) -> dict[str, Plan | None]:
    """The plans of the known schedules and of the search; None: none fits."""
    program = programs.attention(batch, 32, kv_heads, seq, 128, causal=False, dtype="bfloat16")
    mesh = gpu.mesh(*shape)
    found = {name: lowered(plans(program, mesh), gpu, 4) for name, plans in BASELINES.items()}
    try:
        return found | {"searched": search(program, mesh, memory=int(gpu.memory), top=1, **tile(gpu, 4))[0]}
    except ValueError:
        return found | {"searched": None}


def placement(plan: Plan) -> str:
    """The loops of a plan's mesh axes that have several ranks."""
    alone = tuple(f" on {axis.name}" for axis in plan.mesh.axes if axis.size == 1)
    parts = str(plan.schedule).partition(": ")[2].split("; ")
    return "; ".join(part for part in parts if not part.endswith(alone)) if alone else "; ".join(parts)


def slower(plan: Plan | None, searched: Plan) -> str:
    """How many times as long as the searched plan another takes."""
    return "does not fit" if plan is None else f"{plan.seconds / searched.seconds:.2f}x"


def duration(seconds: float) -> str:
    """A time in three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def tokens(number: int) -> str:
    """A number of tokens in K or M."""
    return f"{number // M}M" if number >= M else f"{number // K}K"


def summary_rows() -> list[list[str]]:
    """For each GPU, mesh and number of heads, six batches and lengths together: the geometric mean and the most."""
    rows = []
    cells = [(1, 4 * K), (4, 4 * K), (16, 4 * K), (1, 64 * K), (16, 64 * K), (1, 2 * M)]
    for gpu in GPUS:
        for shape in MESHES:
            for heads, kv_heads in HEADS.items():
                found = [attention(gpu, shape, kv_heads, *cell) for cell in cells]
                fitting = [each for each in found if each["searched"] is not None]
                row = [gpu.name, "x".join(map(str, shape)), heads, f"{len(fitting)} of {len(cells)}"]
                for name in BASELINES:
                    ratios = [e[name].seconds / e["searched"].seconds for e in fitting if e[name]]
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
                    row.append(
                        f"{mean:.2f}x, at most {max(ratios):.2f}x; fits {len(ratios)}" if ratios else "fits none"
                    )
                rows.append(row)
    return rows


def length_rows() -> list[list[str]]:
    """Figure 11: H100, 2 x 4, 32 heads, from 32K to 2M tokens."""
    rows = []
    for seq in (32 * K, 64 * K, 128 * K, 256 * K, 512 * K, M, 2 * M):
        found = attention(GPUS[2], (2, 4), 32, 1, seq)
        best = found["searched"]
        others = [slower(found[name], best) for name in BASELINES]
        rows.append([tokens(seq), duration(best.seconds), *others, placement(best), f"{best.memory / 1e9:.2f} GB"])
    return rows


def mesh_rows() -> list[list[str]]:
    """Figure 10: several meshes of A100 and H100, with 4K tokens on each GPU or 32K in all."""
    rows = []
    for gpu in GPUS[1:]:
        for shape in ((1, 4), (4, 1), (1, 8), (2, 4), (4, 2), (4, 4)):
            for what, seq in (("4K on each", 4 * K * math.prod(shape)), ("32K in all", 32 * K)):
                found = attention(gpu, shape, 32, 1, seq)
                best = found["searched"]
                others = [slower(found[name], best) for name in BASELINES]
                cells = [gpu.name, "x".join(map(str, shape)), what, duration(best.seconds), *others]
                rows.append([*cells, placement(best)])
    return rows


def product_rows() -> list[list[str]]:
    """The products of an MLP of Llama-3 8B, figure 9: AllGather-GEMM and GEMM-ReduceScatter."""
    rows = []
    for gpu in GPUS:
        for shape in MESHES:
            for batch in (1, 16):
                sizes = 4096 * batch, 14336, 4096
                pair = (programs.all_gather_matmul(*sizes, "bfloat16"),
                        programs.matmul_reduce_scatter(sizes[0], 4096, 14336, "bfloat16"))  # fmt: skip
                for name, axis, program in zip(("AG", "RS"), ("cols", "inner"), pair, strict=True):
                    mesh = gpu.mesh(*shape)
                    best = search(program, mesh, memory=int(gpu.memory), top=1, **tile(gpu, 2))[0]
                    others = [
                        slower(lowered(iter([lambda p=part, program=program, mesh=mesh:
                                             place(Schedule(program, mesh), node=p, gpu=p)]), gpu, 2), best)
                        for part in (Placement(axis), Placement(axis, True))
                    ]  # fmt: skip
                    where = [gpu.name, "x".join(map(str, shape)), str(batch), name]
                    rows.append([*where, duration(best.seconds), *others, placement(best)])
    return rows


def tile_times(operators: list[GraphNode], mesh: Mesh, gpu: Gpu) -> dict[str, float]:
    """The predicted times of all tiles: by arithmetic, or by the memory's bandwidth if that takes longer."""
    found = {}

    def collect(one: Program) -> float:
        moved = sum(one.nbytes(operand) for operand in one.operands)
        flops = {"attention": 4}.get(one.tile, 2)
        found[tile_name(one)] = max(one.points * flops / gpu.flops, moved / gpu.hbm) + 1e-5
        return 0.0

    for each in operators:
        options_of(each, mesh, None, None, collect)
    return found


def layer_rows() -> list[list[str]]:
    """Figure 12: layers of Llama-3 8B and 70B on H100, 4,096 tokens, against the best 3-D parallel layout."""
    rows = []
    models = {"8B": dict(), "70B": dict(hidden=8192, heads=64, ffn=28672)}
    for model, sizes in models.items():
        operators = transformer_layer(1, 4096, **sizes, causal=False)
        limit = max(each.program.nbytes(x) for each in operators for x in each.parameters()) // 2
        for gpu in GPUS[2:]:
            for shape in ((2, 4), (4, 2)):
                mesh = gpu.mesh(*shape)
                times = tile_times(operators, mesh, gpu)
                fixed = best_3d_parallel(operators, mesh, limit, times)
                found = search_graph(operators, mesh, limit, times=times)
                without = search_graph(operators, mesh, limit), best_3d_parallel(operators, mesh, limit)
                resharding = [sum(graph.resharding.values()) for graph in (fixed, found)]
                rows.append([
                    f"Llama-3 {model}", gpu.name, "x".join(map(str, shape)), duration(fixed.seconds),
                    duration(found.seconds), f"{fixed.seconds / found.seconds:.2f}x",
                    " -> ".join(map(duration, resharding)),
                    f"{without[1].seconds / without[0].seconds:.2f}x",
                ])  # fmt: skip
    return rows


def main() -> None:
    """Publish all tables."""
    beside = ["one ring", "Ulysses", "USP"]
    publish("paper-attention", markdown(["GPU", "mesh", "heads", "fits", *beside], summary_rows()))
    publish("paper-lengths", markdown(["tokens", "searched", *beside, "chosen", "holds"], length_rows()))
    publish("paper-meshes", markdown(["GPU", "mesh", "tokens", "searched", *beside, "chosen"], mesh_rows()))
    header = ["GPU", "mesh", "batch", "product", "searched", "one after the other", "AsyncTP", "chosen"]
    publish("paper-products", markdown(header, product_rows()))
    header = ["layer", "GPU", "mesh", "best 3-D", "searched", "speedup", "resharding", "speedup of messages alone"]
    publish("paper-layers", markdown(header, layer_rows()))


if __name__ == "__main__":
    main()
