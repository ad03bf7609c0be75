"""Charts that are drawn from the published tables of docs/, without measuring again."""

import re

from matplotlib.pyplot import Figure

from benchmarks.support import charts
from benchmarks.support.charts import LINKS, dots, legend, ticks
from benchmarks.support.tables import published


def numbers(cell: str) -> list[float]:
    """The numbers in a cell of a table."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell.replace(",", ""))]


def speed(figure: Figure) -> None:
    """Decoded tokens per second of transformers and of each format of the weights."""
    header, *rows = published("speed")
    rows = [row for row in rows if row[1] == "decode"]
    axes, step = figure.subplots(), 0.8 / len(rows)
    for place, row in enumerate(rows):
        heights = [number + step * (place - (len(rows) - 1) / 2) for number in range(len(row) - 3)]
        bars = axes.barh(heights, [numbers(cell)[0] for cell in row[2:-1]], step, label=row[0], color=f"C{place}")
        axes.bar_label(bars, ["", *(f"{numbers(cell)[1]:.1f}x" for cell in row[3:-1])], padding=3, fontsize=7)
    axes.set_yticks(range(len(header) - 3), header[2:-1])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.12)  # room for the labels
    axes.set_title("Decoding on one thread of a CPU", loc="left")
    axes.set(xlabel="tokens per second")
    legend(figure, axes, len(rows))


def throughput(figure: Figure) -> None:
    """The throughput of two ranks relative to one rank and to two replicas, from the shortest output to the longest."""
    rows = {
        f"{row[0].removesuffix(' 130m')}, {row[1]}": {
            "of one rank": numbers(row[4]),
            "of two replicas": numbers(row[5]),
        }
        for row in published("throughput")[1:]
        if row[2]
    }
    axes = figure.subplots()
    dots(axes, rows)
    axes.axvline(1, color="C5", linewidth=1)
    axes.set(xlabel="times the tokens per second", ylabel="model, tokens of the prompt")
    axes.set_xticks([1, 1.5, 2], ["1x", "1.5x", "2x"])
    legend(figure, axes, 2)


def ablation(figure: Figure) -> None:
    """The time of a token on each link, for the steps that matter most."""
    header, *steps = published("ablation")
    names = ("naive sharding", "split by channel", "with cache")
    rows = {
        LINKS.get(link, link.replace(", the paper's", " (paper)")): {
            name: numbers(step[column])[:1] for name, step in zip(names, steps, strict=False)
        }
        for column, link in enumerate(header)
        if column
    }
    axes = figure.subplots()
    dots(axes, rows)
    ticks(axes.xaxis, [10, 100, 1000, 10000])
    axes.set(xlabel="ms per token")
    legend(figure, axes, 3)


def grid_attention(figure: Figure) -> None:
    """The speed of each schedule relative to a ring's against the bytes that it saves, behind links of 20 Mbit/s."""
    header, *rows = published("grid-attention")
    axes = figure.subplots()
    for column, marker in zip(range(2, 9), "os^Dv*x", strict=True):
        points = [numbers(row[column])[1::-1] for row in rows if "20mbit" in row[0] and row[column]]
        axes.plot(*zip(*points, strict=True), marker, markersize=6, label=header[column])
    axes.axline((1, 1), (2, 2), color="C5", linewidth=1, label="equal")
    for axis in (axes.xaxis, axes.yaxis):
        ticks(axis, [0.5, 1, 2, 4], "x")
    axes.set(xlabel="times fewer bytes than a ring", ylabel="times a ring's speed")
    legend(figure, axes, 3)


def sparse_gradients(figure: Figure) -> None:
    """The speed of a step relative to dense gradients, by model, ranks and link."""
    header, *table = published("sparse-gradients")
    names = {
        "torch fp16": "torch fp16",
        "PowerSGD": "PowerSGD",
        "auto": "SparseFusion, auto",
        "no messages": "no messages",
    }
    rows = {}
    for row in table:
        size, ranks, link = row[0].split(", ")
        cells = {new: numbers(row[header.index(old)])[:1] for old, new in names.items()}
        rows[f"{size}, {ranks} ranks, {LINKS[link]}"] = cells
    axes = figure.subplots()
    dots(axes, rows)
    axes.axvline(1, color="C5", linewidth=1)
    ticks(axes.xaxis, [1, 2, 5, 10, 20], "x")
    axes.set(xlabel="times the speed of dense gradients")
    legend(figure, axes, 2)


def peers_of_hybrids(figure: Figure) -> None:
    """Decoded tokens per second of each hybrid: transformers and ours in fp32, llama.cpp and ours with 4-bit weights."""
    bars: dict[str, dict[str, tuple[float, str]]] = {}  # {model: {series: (tokens per second, label)}}
    for row in published("peers-of-hybrids")[1:]:
        if row[2].endswith("transformers"):
            names, cell = ("ours, fp32", "transformers, fp32"), row[3]
        elif row[2].startswith("decode after 256,"):
            names, cell = ("ours, int4", "llama.cpp, Q4_K"), row[6]
        else:
            continue
        ours, theirs, ratio = numbers(cell)
        bars.setdefault(row[0], {}).update({names[0]: (ours, f"{ratio:.1f}x"), names[1]: (theirs, "")})
    bars = {name: cells for name, cells in bars.items() if len(cells) == 4}
    axes = figure.subplots()
    for place, series in enumerate(("transformers, fp32", "ours, fp32", "llama.cpp, Q4_K", "ours, int4")):
        values, labels = zip(*(cells[series] for cells in bars.values()), strict=True)
        heights = [number + 0.2 * (place - 1.5) for number in range(len(bars))]
        axes.bar_label(axes.barh(heights, values, 0.2, label=series), labels, padding=3, fontsize=7)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.12)  # room for the labels
    axes.set_title("Decoding hybrids on two threads of a CPU", loc="left")
    axes.set(xlabel="tokens per second")
    legend(figure, axes, 2)


HEIGHTS = {
    speed: 4.2, throughput: 3.4, ablation: 2.4,
    grid_attention: 3.8, sparse_gradients: 4.2, peers_of_hybrids: 5,
}  # fmt: skip


def draw(*names: str) -> None:
    """Draw the charts of these tables, or of all that have been measured."""
    for chart, height in HEIGHTS.items():
        table = chart.__name__.replace("_", "-")
        if (not names or table in names) and published(table):
            charts.save(chart.__name__, chart, height=height)
