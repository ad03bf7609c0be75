"""What "the NVLink wall" concludes from four H100s, computed from its measurements (about 1 min).

The claim: all-reduces of decoded tokens cost their latency, not their bytes, so that CUDA graphs gain more than bandwidth
would.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.tables import markdown, publish
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from commfabric.fabric.readers import extend_by_sweeps, read_curves

FILES = Path(__file__).resolve().parents[2] / "examples" / "h100x4"
KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
MODES = ("eager", "graph")


def read(name: str, ranks: int | None = 4) -> list[Curve]:
    """The curves of the all-reduces in a file."""
    return read_curves(FILES / name, "all_reduce", ranks)


def setting_rows() -> Iterator[list[str]]:
    """Rows: the measured bus bandwidth of algorithms, protocols and numbers of GPUs, and its ratio to the first one."""
    named = {f"algorithms, {size // MB} MB": ("algo_sweep.txt", size) for size in (256 * MB, GB, 8 * GB)}
    for title, (name, nbytes) in (named | {"protocols, 256 MB": ("proto_sweep.txt", 256 * MB)}).items():
        curves = {curve.operation.split()[1]: curve for curve in read(name)}
        yield [title, ratios({name: bus_bandwidth(curve, nbytes) for name, curve in curves.items()})]
    scaling = {f"{curve.ranks} GPUs": bus_bandwidth(curve, 8 * GB) for curve in read("scaling.txt", None)}
    yield ["NCCL's own choice, 8192 MB", ratios(scaling)]


def bus_bandwidth(curve: Curve, nbytes: int) -> float:
    """Measured GB/s over a link, if the algorithm is a ring."""
    return curve.bus_bandwidth(nbytes) * curve.time(nbytes) / curve.interpolated(nbytes) / 1e9


def ratios(rates: dict[str, float]) -> str:
    """'A 100 (1.00), B 50 (0.50)'."""
    first = next(iter(rates.values()))
    return ", ".join(f"{name} {rate:.0f} ({rate / first:.2f})" for name, rate in rates.items())


def latency_rows(fabric: Fabric) -> Iterator[list[str]]:
    """Rows: how much of a small message's time is latency, and what CUDA graphs gain at each size."""
    for nbytes in (8 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB):
        curves = [fabric.curve("all_reduce", 4, mode) for mode in MODES]
        eager, graph = (curve.time(nbytes) for curve in curves)
        shares = " / ".join(f"{min(1.0, curve.floor / curve.time(nbytes)):.0%}" for curve in curves)
        ring = nbytes * 1.5 / 366e9
        times = f"{eager * 1e6:.1f} / {graph * 1e6:.1f} us ({eager / graph:.2f}x)"
        yield [f"{nbytes // KB} KB", times, shares, f"{ring * 1e6:.2f} us"]


def main() -> None:
    """Compute and publish."""
    fabric = Fabric(tuple(extend_by_sweeps(read("tp_latency_quiet.json"), read("all_reduce.csv"))))
    publish("nvlink-settings", markdown(["4 H100s, all-reduce", "bus bandwidth in GB/s"], list(setting_rows())))
    header = ["all-reduce of", "eager / graph (gain)", "of it latency floor", "its bytes at 366 GB/s"]
    publish("nvlink-latency", markdown(header, list(latency_rows(fabric))))


if __name__ == "__main__":
    main()
