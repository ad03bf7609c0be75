"""Published measurements of four H100s: their author's findings beside those of the fitted fabric (about 1 min).

The claim: the fits are off by 5 % on average and by 15 % at most, and lead to the same findings. The plot shows the
measured points and the fits, of latencies (eager and as CUDA graphs, with intervals) and of bus bandwidth.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.support import charts
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from commfabric.fabric.readers import extend_by_sweeps, read_curves

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "h100x4"
LINK = 478e9  # bytes per second of a GPU's links, one way
MB, GB = 1 << 20, 1 << 30
LAYERS = 80  # Llama-3-70B


def read(name: str, operation: str = "all_reduce") -> list[Curve]:
    """The curves of one file; files that state no number of ranks are of four."""
    return read_curves(FILES / name, operation, None if name in ("scaling.txt", "scaling_g6_nvls.log") else 4)


def bandwidth_rows(sweeps: list[Curve]) -> Iterator[list[str]]:
    """Rows: the peak bandwidth of each collective, and the ranking of algorithms and protocols."""
    published = {"all_reduce": "366 GB/s, 77 %", "all_gather": "344 GB/s, 72 %", "reduce_scatter": "350 GB/s, 73 %"}
    for sweep in sweeps:
        peak, fitted = sweep.peak_bus_bandwidth, sweep.bus_bandwidth(sweep.nbytes[-1])
        ours = f"{peak / 1e9:.0f} GB/s, {peak / LINK:.0%} measured; {fitted / 1e9:.0f} GB/s fitted"
        yield [f"{sweep.operation}: peak bus bandwidth, share of the link", published[sweep.operation], ours]
    for title, name, nbytes, theirs in (
        ("algorithms at 8 GB", "algo_sweep.txt", 8 * GB, "NVLS 376, Ring 366, Tree 259"),
        ("protocols at 256 MB", "proto_sweep.txt", 256 * MB, "Simple 340, LL128 313, LL 147"),
    ):
        rates = {curve.operation.split()[1]: curve.bus_bandwidth(nbytes) / 1e9 for curve in read(name)}
        ours = ", ".join(f"{name} {rates[name]:.0f}" for name in sorted(rates, key=rates.get, reverse=True))
        yield [f"{title}, GB/s", theirs, ours]


def latency_rows() -> Iterator[list[str]]:
    """Rows: latency floors, and the tokens per second that they allow."""
    for name, floors, ceilings in (
        ("tp_latency_first.json", "23.1 / 13.7 us", "271 / 456"),
        ("tp_latency_quiet.json", "23.2 / 12.9 us", "-"),
        ("tp_latency.json", "36.6 / 19.5 us", "171 / 321"),
    ):
        found = [curve.floor for curve in read(name)]
        yield [f"{name}: floor, eager / graph", floors, " / ".join(f"{floor * 1e6:.1f}" for floor in found) + " us"]
        allowed = " / ".join(f"{1 / (2 * LAYERS * floor):.0f}" for floor in found)
        yield [f"{name}: tokens/s of Llama-3-70B at most", ceilings, allowed]


def fit_rows(curves: list[tuple[str, Curve]]) -> Iterator[list[str]]:
    """Rows: the errors of each fit."""
    for name, curve in curves:
        mean, worst = curve.fit_errors
        width = np.mean([curve.half_width(nbytes) for nbytes in curve.nbytes])
        dropped = f", {len(curve.dropped)} dropped" if curve.dropped else ""
        yield [f"fit of {name}", "-", f"mean {mean:.1%}, max {worst:.1%}, interval ±{width:.0%}{dropped}"]


def plot(fabric: Fabric, sweeps: list[Curve], figure: charts.pyplot.Figure) -> None:
    """Plot latencies with their intervals, and bus bandwidths."""
    upper, lower = figure.subplots(2)
    for mode in ("eager", "graph"):
        curve = fabric.curve("all_reduce", 4, mode)
        small = [(nbytes, time) for nbytes, time in zip(curve.nbytes, curve.seconds, strict=True) if nbytes <= 16 * MB]
        sizes = np.geomspace(small[0][0], small[-1][0], 100)
        dots = upper.plot(*zip(*[(n, t * 1e6) for n, t in small], strict=True), ".", label=mode)[0]
        upper.plot(sizes, [curve.time(size) * 1e6 for size in sizes], color=dots.get_color(), linewidth=1)
        low, high = np.array([curve.interval(size) for size in sizes]).T * 1e6
        upper.fill_between(sizes, low, high, color=dots.get_color(), alpha=0.2, linewidth=0)
    upper.set(ylabel="us", title="all-reduce of 4 H100s")
    charts.ticks(upper.yaxis, [10, 20, 50, 100])
    charts.ticks(upper.xaxis, [1e3, 1e5, 1e7])
    upper.set_xticklabels(["1 KB", "100 KB", "10 MB"])
    for sweep in sweeps:
        nbytes, sizes = np.array(sweep.nbytes), np.geomspace(sweep.nbytes[0], sweep.nbytes[-1], 100)
        wire = sweep.bus_bandwidth(1) * sweep.time(1) / 1e9
        dots = lower.plot(nbytes, wire * nbytes / sweep.seconds, ".", label=sweep.operation)[0]
        lower.plot(sizes, [sweep.bus_bandwidth(size) / 1e9 for size in sizes], color=dots.get_color(), linewidth=1)
    lower.axhline(LINK / 1e9, color="C5", linestyle="--", linewidth=1)
    lower.set(ylabel="GB/s", title="bus bandwidth (dashed: that of the links)")
    charts.ticks(lower.xaxis, [1e3, 1e6, 1e9])
    lower.set_xticklabels(["1 KB", "1 MB", "1 GB"])
    for axes in (upper, lower):
        axes.legend(loc="center left", bbox_to_anchor=(0, 0.65))


def main() -> None:
    """Read the files, fit them, and publish the table and draw the chart."""
    sweeps = [read(f"{name}.csv", name)[0] for name in ("all_reduce", "all_gather", "reduce_scatter")]
    quiet = read("tp_latency_quiet.json")
    fabric = Fabric(tuple(extend_by_sweeps(quiet, sweeps)), {"link_bytes_per_s": LINK})
    named = [(f"{sweep.operation}.csv", sweep) for sweep in sweeps]
    named += [(f"tp_latency_quiet.json, {curve.mode}", curve) for curve in quiet]
    rows = [*bandwidth_rows(sweeps), *latency_rows(), *fit_rows(named)]
    charts.save("fabric_h100", partial(plot, fabric, sweeps), height=5)
    publish("fabric-h100", markdown(["4 H100 SXM", "its source", "ours"], rows))


if __name__ == "__main__":
    main()
