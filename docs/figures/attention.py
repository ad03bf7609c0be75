"""Figures of attention on a grid of ranks: where queries, keys and values travel, and how traffic falls with ranks."""

from pathlib import Path

from svg import COLOURS, INK, Drawing

from attention2d.cost.volume import messages
from attention2d.layout.grid import Grid
from benchmarks.support import charts

ROWS = COLS = 3
CELL, GAP, LEFT, TOP = 96, 44, 150, 96
BLUE, ORANGE, GREEN = (COLOURS[name][1] for name in ("blue", "orange", "green"))


def attention_on_a_grid() -> Path:
    """Draw nine ranks, with one of them, its row and its column marked."""
    drawing = Drawing(760, 520, "Attention on a grid of 3 rows and 3 columns")
    drawing.text(LEFT + 1.5 * CELL + GAP, 32, "queries travel along a row", 15, True, "middle", BLUE)
    drawing.text(LEFT + 1.5 * CELL + GAP, 54, "to every cell of it, C - 1 chunks", 14, False, "middle", BLUE)
    place = [[(LEFT + j * (CELL + GAP), TOP + i * (CELL + GAP)) for j in range(COLS)] for i in range(ROWS)]
    for i in range(ROWS):
        for j in range(COLS):
            x, y = place[i][j]
            mine = i == 1 and j == 1
            colour = "violet" if mine else "blue" if i == 1 else "orange" if j == 1 else "grey"
            drawing.box(x, y, CELL, CELL, f"rank {i + ROWS * j}\nrow {i}\ncolumn {j}", colour, 14, True)
    x, y = place[1][1]
    middle = y + CELL / 2
    for other in (0, 2):
        from_x = place[1][other][0] + (CELL if other == 0 else 0)
        to_x = x if other == 0 else x + CELL
        drawing.line([(from_x, middle - 14), (to_x, middle - 14)], BLUE, 2.4, True)
        drawing.text((from_x + to_x) / 2, middle - 22, "Q", 14, True, "middle", BLUE)
        drawing.line([(to_x, middle + 14), (from_x, middle + 14)], GREEN, 2.4, True, True)
        drawing.text((from_x + to_x) / 2, middle + 32, "out", 13, True, "middle", GREEN)
        from_y = place[other][1][1] + (CELL if other == 0 else 0)
        to_y = y if other == 0 else y + CELL
        drawing.line([(x + CELL / 2, from_y), (x + CELL / 2, to_y)], ORANGE, 2.4, True)
        drawing.text(x + CELL / 2 + 10, (from_y + to_y) / 2 + 5, "K, V", 14, True, colour=ORANGE)
    for number, line in enumerate(("keys and", "values travel", "along a", "column,", "R - 1 chunks")):
        drawing.text(LEFT - 16, TOP + 1.5 * CELL + GAP - 30 + 20 * number, line, 14, number < 4, "end", ORANGE)
    notes = [
        ("Rank 4 attends", INK), ("the queries of its row", BLUE), ("to the keys of its column", ORANGE), ("", INK),
        ("and sends what it found", INK), ("to the queries' owners,", GREEN), ("who merge C partial", INK),
        ("results into one softmax.", INK), ("", INK), ("Over all cells, every query", INK), ("meets every key once.", INK),
    ]  # fmt: skip
    for number, (line, colour) in enumerate(notes):
        drawing.text(560, TOP + 90 + 21 * number, line, 14, colour=colour)
    drawing.note(LEFT, 498, "A rank holds 1/P of the sequence. A chunk is what one rank holds of Q, or of K and V.")
    return drawing.save("attention-on-a-grid")


def sent(ranks: int, rows: int, cols: int, k: float = 1.0) -> float:
    """The bytes that the busiest rank sends in forward, in units of the whole sequence's queries. k: kv_heads / heads."""
    slots, heads, head_dim = 2**20 // ranks, 32, 128
    nbytes = messages(Grid(0, 1, rows, cols), slots, 1, heads, int(heads * k), head_dim, 2).volume.forward
    return nbytes / (2**20 * heads * head_dim * 2)


def grid_traffic(figure: charts.pyplot.Figure) -> None:
    """Plot the bytes of a ring and of a square grid, by ranks, on logarithmic axes."""
    counts = [4, 16, 64, 256, 1024]
    axes = figure.subplots()
    axes.plot(counts, [sent(p, p, 1) for p in counts], "o-", label="ring: P x 1")
    squares = [sent(p, round(p**0.5), round(p**0.5)) for p in counts]
    axes.plot(counts, squares, "s-", label="grid: √P x √P")
    axes.plot(counts, [squares[-1] * (counts[-1] / p) ** 0.5 for p in counts], ":", color="C5", label="slope 1/√P")
    charts.ticks(axes.xaxis, counts)
    charts.ticks(axes.yaxis, [0.1, 0.2, 0.5, 1, 2])
    axes.set(ylim=(0.1, 2.6), xlabel="ranks P", ylabel="sent by the busiest rank,\nin sizes of all queries")
    charts.legend(figure, axes, 3)
