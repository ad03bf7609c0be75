"""Writes a report of a fabric: its table, and plots of bus bandwidth and of time."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commfabric.foundation.command_line import FULL, Failure

from .cost_model import Fabric, size_name
from .curve import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(fabric: Fabric, directory: str | Path) -> list[Path]:
    """Write fabric.md and two plots (PNG) into `directory`, which is created if it is missing; returns their paths.

    Raises:
        Failure: matplotlib is not installed.
        ValueError: `directory` is a file.
        OSError: A file, which the error names, cannot be written.
    """
    plt = _pyplot()
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    contents = {"fabric.md": markdown(fabric).encode()}
    for name, draw in (("bandwidth", draw_bandwidth), ("roofline", draw_roofline)):
        figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
        draw(axes, fabric)
        axes.grid(True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        image = io.BytesIO()
        figure.savefig(image, dpi=100)
        plt.close(figure)
        contents[f"{name}.png"] = image.getvalue()
    return [_write(directory / name, content) for name, content in contents.items()]


def _write(path: Path, content: bytes) -> Path:
    """Write a file and return its path. An OSError names it; if the disk is full, the file is removed."""
    try:
        path.write_bytes(content)
    except OSError as error:
        if error.errno in FULL:
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def _pyplot() -> Any:
    """The module matplotlib.pyplot, configured to draw into files. Failure if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise Failure("the report needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def markdown(fabric: Fabric) -> str:
    """The page in Markdown, with links to the plots, which are in the same directory."""
    described = "".join(f"- {key}: {value}\n" for key, value in fabric.description.items())
    dropped = [
        f"- {curve.operation} on {curve.ranks} ranks ({curve.mode}), {size_name(nbytes)}: {seconds * 1e6:.1f} us\n"
        for curve in fabric.curves
        for nbytes, seconds in curve.dropped
    ]
    left_out = "## Left out of the fits\n\n" + "".join(dropped) + "\n" if dropped else ""
    return (
        f"# Fabric\n\n{described}\n{fabric.table()}\n\n"
        "The errors are those of the fit at the measured points. Bus bandwidth is the bytes per second that a ring would "
        "send over each link.\n\n"
        f"{left_out}"
        "![bus bandwidth by message size](bandwidth.png)\n\n"
        "![time by message size, with latency and bandwidth bounds](roofline.png)\n"
    )


def _label(curve: Curve) -> str:
    return f"{curve.operation}, {curve.ranks} ranks" + (", graph" if curve.mode == "graph" else "")


def draw_bandwidth(axes: "Axes", fabric: Fabric) -> None:
    """Draw bus bandwidth over message size: measured points, fitted lines, and the link's bandwidth dashed."""
    for curve in fabric.curves:
        nbytes = np.array(curve.nbytes)
        scale = curve.bus_bandwidth(1) * curve.time(1) / 1e9  # GB on the wire per byte of the message
        dots = axes.plot(nbytes, scale * nbytes / curve.seconds, ".", markersize=4)[0]
        sizes = np.geomspace(nbytes[0], nbytes[-1], 200)
        fitted = [scale * size / curve.time(size) for size in sizes]
        axes.plot(sizes, fitted, color=dots.get_color(), linewidth=1, label=_label(curve))
    link = fabric.description.get("link_bytes_per_s")
    if link:
        axes.axhline(link / 1e9, linestyle="--", color="gray", label="link")
    axes.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s", title="Bus bandwidth")


def draw_roofline(axes: "Axes", fabric: Fabric) -> None:
    """Draw time over message size; dashed: each curve's lower bound, the larger of alpha and beta * nbytes."""
    for curve in fabric.curves:
        nbytes = np.array(curve.nbytes)
        dots = axes.plot(nbytes, np.array(curve.seconds) * 1e6, ".", markersize=4, label=_label(curve))[0]
        sizes = np.geomspace(nbytes[0], nbytes[-1], 200)
        axes.plot(sizes, [curve.time(size) * 1e6 for size in sizes], color=dots.get_color(), linewidth=1)
        bound = np.maximum(curve.alpha, curve.beta * sizes) * 1e6
        axes.plot(sizes, bound, "--", color=dots.get_color(), linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title="Time, and max(alpha, beta * bytes)")
