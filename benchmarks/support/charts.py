"""Charts of the documentation in one style: SVG with text as text, one file for light pages and one for dark ones."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 (after the choice of a backend)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "assets" / "plots"
LINKS = {
    "100mbit": "100 Mbit/s",
    "200mbit": "200 Mbit/s",
    "500mbit": "500 Mbit/s",
    "1gbit": "1 Gbit/s",
    "none": "no limit",
}
THEMES = {  # {name: (text, grid, colours of the series)}
    "light": ("#24292f", "#d8dee4", ["#2f5bd0", "#c2630a", "#1c7f45", "#7a3fc2", "#bb2f2a", "#57606a", "#0b7f8f"]),
    "dark": ("#d5d9e2", "#4a5160", ["#8fb4ff", "#f5ab63", "#72d49b", "#c9abff", "#ff938d", "#a8b0bd", "#6bd3e0"]),
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "docs",
    "font.size": 9,
    "legend.frameon": False,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
}


def save(name: str, draw: Callable[[pyplot.Figure], None], width: float = 4.5, height: float = 3) -> None:
    """Write docs/assets/plots/NAME-light.svg and NAME-dark.svg. draw: fills an empty figure of width x height inches."""
    for theme, (text, grid, colours) in THEMES.items():
        style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
        with matplotlib.rc_context(
            STYLE | style | {"grid.color": grid, "axes.prop_cycle": pyplot.cycler(color=colours)}
        ):
            figure = pyplot.figure(figsize=(width, height))
            draw(figure)
            figure.savefig(FOLDER / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


def legend(figure: pyplot.Figure, axes: pyplot.Axes, columns: int) -> None:
    """Put the names of the series of `axes` above all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=columns)


def ticks(axis: matplotlib.axis.Axis, values: Sequence[float], unit: str = "") -> None:
    """Make an axis logarithmic, with these ticks only."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(values, [f"{value:,g}{unit}" for value in values])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def dots(axes: pyplot.Axes, rows: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a line of text for each row, and in it a dot for each series, at the last of its values.

    A stroke spans all values of the series. rows: {row: {series: values}}.
    """
    names = list(dict.fromkeys(series for row in rows.values() for series in row))
    for number, name in enumerate(names):
        shift = (
            0.3 * (number - (len(names) - 1) / 2) / max(1, len(names) - 1) if any(map(_several, rows.values())) else 0
        )
        found = [(place + shift, row[name]) for place, row in enumerate(rows.values()) if name in row]
        heights, values = zip(*found, strict=True)
        ends = [min(each) for each in values], [max(each) for each in values]
        axes.hlines(heights, *ends, color=f"C{number}", linewidth=1.5)
        axes.plot([each[-1] for each in values], heights, "o", color=f"C{number}", label=name)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _several(row: Mapping[str, Sequence[float]]) -> bool:
    return any(len(values) > 1 for values in row.values())
