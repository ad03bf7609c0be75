"""Known schedules among commir's plans, and predicted time and memory of all (about 1 min; nothing is measured).

The first table has the known schedules that the candidates of a search contain, by name, with their exact bytes. The second
and the figure are about every plan of an attention operator on 2 nodes of 4 GPUs.

The counterpart of figure 13 of the paper on Mercury: all plans of commir's space, the known schedules, and the Pareto front.
Speeds are those of the paper's H100 nodes (NVLink in a node, 100 Gbit/s between nodes); a tile is assumed to run at 500
TFLOP/s. Times are predictions.
"""

from functools import partial

from benchmarks.support import charts
from benchmarks.support.plans import all_plans
from benchmarks.support.tables import markdown, publish
from commir import Mesh, Plan, pareto, programs
from commir.scheduling.known_schedules import known_as

MESH = Mesh(node=2, gpu=4, speeds={"node": (1e-5, 12.5e9), "gpu": (3e-6, 450e9)})
PROGRAM = programs.attention(heads=32, seq=65536, head_dim=128, dtype="bfloat16")
SMALLER = programs.attention(heads=8, seq=8192, head_dim=64, dtype="bfloat16")
FLAT, SIZES = Mesh(gpu=8), (8192, 8192, 8192, "bfloat16")
KNOWN = [
    (SMALLER, FLAT, ["ring", "all-gather", "Ulysses", "USP"]),
    (SMALLER, FLAT, ["Attention2D", "Attention2D, overlapped", "3-D", "3-D, overlapped"]),
    (SMALLER, FLAT, ["TokenRing"]),
    (SMALLER, Mesh(node=2, gpu=4), ["double ring", "LoongTrain"]),
    (programs.decode_attention(heads=8, seq=8192, head_dim=64, dtype="bfloat16"), FLAT, ["tree"]),
    (programs.all_gather_matmul(*SIZES), FLAT, ["all-gather, then product", "AsyncTP"]),
    (programs.matmul_reduce_scatter(*SIZES), FLAT, ["product, then reduce-scatter", "AsyncTP"]),
]
TILE = dict(point_seconds=4 / 500e12, call_seconds=1e-5)
MARKERS = {
    "double ring": "s",
    "all-gather": "^",
    "Ulysses": "D",
    "USP": "v",
    "LoongTrain": "<",
    "Attention2D": "P",
    "3-D": "X",
}


def plot(plans: list[Plan], front: list[Plan], figure: charts.pyplot.Figure) -> None:
    """Plot all plans as dots, known schedules as markers, and the front as a line."""
    axes = figure.subplots()

    def points(chosen: list[Plan]) -> tuple[list[float], list[float]]:
        return [plan.seconds * 1e3 for plan in chosen], [plan.memory / 1e6 for plan in chosen]

    axes.plot(*points(plans), ".", color="C5", alpha=0.3, markersize=2, rasterized=True, label="all plans")
    axes.step(*points(front), where="post", color="C0", linewidth=2, label="Pareto front")
    for number, (name, marker) in enumerate(MARKERS.items(), 1):
        chosen = [plan for plan in plans if kind(plan) == name]
        axes.plot(*points(chosen), marker, color=f"C{number % 7}", markersize=6, label=name)
    fastest = front[0].seconds * 1e3
    charts.ticks(axes.xaxis, [15, 30, 60, 120])
    charts.ticks(axes.yaxis, [300, 1000, 3000])
    axes.set(xlabel="predicted time, ms", ylabel="memory of a rank, MB", xlim=(0.95 * fastest, 8 * fastest))
    charts.legend(figure, axes, 3)


def kind(plan: Plan) -> str:
    """The name of a known schedule, whether overlapped or not."""
    return known_as(plan.schedule).removesuffix(", overlapped")


def row(plan: Plan) -> list[str]:
    """A row of the table of the front."""
    placement = str(plan.schedule).partition(": ")[2]
    sent = f"{plan.bytes_per_rank / 1e6:.0f} MB"
    return [placement, known_as(plan.schedule), f"{plan.seconds * 1e3:.2f} ms", f"{plan.memory / 1e6:.0f} MB", sent]


def known_rows() -> list[list[str]]:
    """Rows of the table of known schedules: of each name, the candidate of the search that sends the fewest bytes."""
    rows = []
    for program, mesh, names in KNOWN:
        plans = sorted(all_plans(program, mesh), key=lambda plan: plan.bytes_per_rank)
        for name in names:
            plan = next(plan for plan in plans if known_as(plan.schedule) == name)
            fewer = sum(each.bytes_per_rank < plan.bytes_per_rank for each in plans)
            placement, sent = str(plan.schedule).partition(": ")[2], f"{plan.bytes_per_rank:,}"
            rows.append([name, f"{program.name}, {mesh!r}", placement, sent, f"{fewer} of {len(plans)}"])
    return rows


def main() -> None:
    """Publish the tables of known schedules and of the front, and plot all plans."""
    header = ["known schedule", "program and mesh", "placement", "bytes sent by a rank", "candidates that send fewer"]
    publish("known-schedules", markdown(header, known_rows()))
    plans, front = all_plans(PROGRAM, MESH, **TILE, with_chunks=True), pareto(PROGRAM, MESH, **TILE)
    best_known = {name: min((p for p in plans if kind(p) == name), key=lambda p: p.seconds) for name in MARKERS}
    rows = [row(plan) for plan in front]
    rows += [row(plan) for plan in best_known.values() if plan.schedule not in [each.schedule for each in front]]
    publish("pareto", markdown(["placement", "known as", "predicted time", "memory", "sent by a rank"], rows))
    charts.save("pareto", partial(plot, plans, front), height=4)


if __name__ == "__main__":
    main()
