"""PROJECTION, not a measurement: attention over a million tokens on 64 to 1024 ranks, by the bytes they send (about 1 min).

The bytes are exact (`volume`): forward and backward in bf16 with fp32 gradients. The seconds are those of the messages,
under two assumptions, neither of which was measured on so many ranks. Over NVLink, a step takes a third of the time of an
all-gather among the four H100s of examples/h100x4. Over network cards, messages travel at 50 GB/s, the rate of 400 Gbit/s,
without latency. Matrix products, forward and backward, are 3.5 times those of forward; they run at half of an H100's 989
TFLOP/s and are spread evenly over the ranks. An overlapped schedule hides messages that take less time than the products.
"""

from pathlib import Path

from attention2d.cost.volume import Messages, messages
from attention2d.layout.grid import Grid
from attention2d.layout.token_order import local_length
from attention2d.schedules.choosing import candidates
from benchmarks.support import table_charts
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.readers import extend_by_sweeps, read_curves

FILES = Path(__file__).resolve().parents[2] / "examples" / "h100x4"
SEQ, RANKS, FLOPS = 2**20, (64, 256, 1024), 0.5 * 989e12
MEASURED, CARD = 4, 50e9  # ranks of the measured fabric; bytes per second of a network card
SHAPES = {
    "32/32 heads of 128": (32, 32, 128),
    "64/8 heads of 128 (Llama-3-70B)": (64, 8, 128),
    "8/1 heads of 128": (8, 1, 128),
}
SCHEDULES = ("ring", "paper's 2-D", "2-D", "3-D")


def h100s() -> Fabric:
    """The fabric of four H100s: small messages from timed all-reduces of a token, larger ones from nccl-tests."""
    sweeps = [read_curves(FILES / f"{name}.csv", name, 4)[0] for name in ("all_reduce", "all_gather", "reduce_scatter")]
    return Fabric(tuple(extend_by_sweeps(read_curves(FILES / "tp_latency_quiet.json", "all_reduce", 4), sweeps)), {})


def points(ranks: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Grid]:
    """The compared grids by name. Those called 2-D and 3-D send the fewest bytes of their kind."""
    ordered = candidates(ranks, heads, kv_heads, head_dim, SEQ)
    ordered.sort(key=lambda each: each.bytes_sent)
    flat = next(each for each in ordered if each.ulysses == 1)
    square = 2 ** (ranks.bit_length() // 2)
    return {
        "ring": Grid(0, 1, ranks, 1),
        "paper's 2-D": Grid(0, 1, square, ranks // square),
        "2-D": Grid(0, 1, flat.rows, flat.cols),
        "3-D": Grid(0, ordered[0].ulysses, ordered[0].rows, ordered[0].cols),
    }


def sent(name: str, grid: Grid, shape: tuple[int, int, int]) -> Messages:
    """The messages of one rank. shape: (heads, kv_heads, head_dim)."""
    slots = local_length("zigzag", SEQ, grid.ranks)
    return messages(grid, slots, 1, *shape, 2, transpose=name == "paper's 2-D")


def gigabytes(name: str, grid: Grid, shape: tuple[int, int, int]) -> float:
    """The gigabytes that one rank sends, forward and backward."""
    volume = sent(name, grid, shape).volume
    return (volume.forward + volume.backward) / 1e9


def seconds(fabric: Fabric, name: str, grid: Grid, shape: tuple[int, int, int]) -> str:
    """The time of all messages, over NVLink and over network cards."""
    made = sent(name, grid, shape)
    steps = [message for message in (*made.forward, *made.backward) if message[0]]
    nvlink = sum(count * fabric.time("all_gather", nbytes, MEASURED) / (MEASURED - 1) for count, nbytes in steps)
    return f"{nvlink:.2g} / {gigabytes(name, grid, shape) * 1e9 / CARD:.2g} s"


def row(fabric: Fabric, title: str, shape: tuple[int, int, int], ranks: int) -> list[str]:
    """A row of the table: one shape on `ranks` ranks."""
    heads, _, head_dim = shape
    products = 3.5 * 2 * SEQ**2 * heads * head_dim / ranks / FLOPS
    cells = []
    for name, grid in points(ranks, *shape).items():
        shown = f"{grid.rows} x {grid.cols}" if grid.ulysses == 1 else f"{grid.ulysses} x {grid.rows} x {grid.cols}"
        at = "" if name == "ring" else f"{shown}: "
        cells.append(f"{at}{gigabytes(name, grid, shape):.2f} GB, {seconds(fabric, name, grid, shape)}")
    return [title, str(ranks), f"{products:.2g} s", *cells]


def main() -> None:
    """Compute and publish."""
    fabric = h100s()
    rows = [row(fabric, title, shape, ranks) for title, shape in SHAPES.items() for ranks in RANKS]
    header = ["PROJECTION", "ranks", "products", *(f"{name}: NVLink / card" for name in SCHEDULES)]
    publish("attention-projection", markdown(header, rows))
    table_charts.draw("attention-projection")


if __name__ == "__main__":
    main()
