"""Measurements that others made: nccl-tests' text and CSV of it, and JSON of the latency of eager calls and CUDA graphs.

Sizes leave here as `Fabric` counts them; nccl-tests' size of an all-gather is its whole output. A file that is cut off,
or is none of these, is a ValueError that names file and line.
"""

import csv
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from .curve import Curve, wire

COLUMNS = "size count type redop root time algbw busbw #wrong".split()  # where a file has no header
OPERATIONS = {"alltoall": "all_to_all", "sendrecv": "p2p"}  # nccl-tests' names where they are not ours
RATE_ROUNDING = 0.01  # GB/s, and relative
FAST = 1.0  # GB/s: from there on the two rates of a row are known to a percent


@dataclass
class Section:
    """One run in a file: points are (nbytes, seconds); variant: the algorithm or protocol that its title names.

    operation and ranks: None where the file does not tell; bus: the bus bandwidth over the algorithm's, from which both
    can be doubted; dropped: points the file itself discredits.
    """

    operation: str | None = None
    ranks: int | None = None
    mode: str = "eager"
    variant: str = ""
    bus: float | None = None
    points: list = field(default_factory=list)
    dropped: list = field(default_factory=list)


def read_curves(path, operation: str, ranks: int | None = None) -> list[Curve]:
    """The curves of one file of `operation`, in whichever format: one for each number of ranks, mode and variant.

    ranks: how many there were, needed unless the file says it. A variant joins the name: "all_reduce Ring". Rows of empty
    messages, with which nccl-tests begins some sweeps, are left out.
    """
    curves = {}
    for section in read_sections(path):
        if section.operation not in (None, operation):
            raise ValueError(f"{path} holds {section.operation}, not {operation}")
        if None not in (ranks, section.ranks) and ranks != section.ranks:
            raise ValueError(f"{path} was measured on {section.ranks} ranks, not {ranks}")
        count = section.ranks or ranks
        if count is None:
            raise ValueError(f"{path} does not say on how many ranks it was measured: add --ranks N")
        share = count if operation == "all_gather" else 1
        expected = wire(operation, count) / share
        if section.bus is not None and abs(section.bus / expected - 1) > 2 * RATE_ROUNDING:
            raise ValueError(
                f"{path}: its bus bandwidth is {section.bus:.3f} times the algorithm's; "
                f"that of {operation} on {count} ranks would be {expected:.3f} times"
            )
        key = (f"{operation} {section.variant}".strip(), count, section.mode)
        points, dropped = curves.setdefault(key, ([], []))
        points += [(size // share, seconds) for size, seconds in section.points if size >= share]
        dropped += section.dropped
    return [Curve.fit(name, count, points, mode, dropped) for (name, count, mode), (points, dropped) in curves.items()]


def extended(curves, sweeps) -> list[Curve]:
    """The curves, each with the larger sizes of the sweep of the same operation and ranks; and the other sweeps.

    A latency file ends where its modes have come together, and a sweep of eager calls goes on: what launches cost no
    longer shows at such sizes.
    """
    longer = []
    for curve in curves:
        larger = [
            point
            for sweep in sweeps
            if (sweep.operation, sweep.ranks) == (curve.operation, curve.ranks)
            for point in _points(sweep)
            if point[0] > curve.nbytes[-1]
        ]
        longer.append(Curve.fit(curve.operation, curve.ranks, _points(curve) + larger, curve.mode, curve.dropped))
    keys = {(curve.operation, curve.ranks, curve.mode) for curve in curves}
    return longer + [sweep for sweep in sweeps if (sweep.operation, sweep.ranks, sweep.mode) not in keys]


def _points(curve):
    return list(zip(curve.nbytes, curve.seconds, strict=True))


def read_sections(path) -> list[Section]:
    """The runs in one file, the format recognized by how it begins; sizes as they stand there."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error})") from None
    if text.lstrip().startswith("{"):
        return read_latency(path, text)
    if text.startswith("size_bytes,"):
        return [_csv_section(path, text)]
    return read_nccl_tests(path, text)


# JSON of latencies


def read_latency(path, text: str) -> list[Section]:
    """Means of eager calls and of graph replays by size (bytes, eager_us, graph_us, perhaps eager_std_us, ...).

    A mean that is smaller than its standard deviation is that of one straggler: its point is dropped.
    """
    try:
        made = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: JSON that is cut off or damaged: {error.msg}") from None
    sections = []
    try:
        for mode in ("eager", "graph"):
            section = Section("all_reduce", int(made["world_size"]), mode)
            for row in made["size_sweep"]:
                mean, deviation = float(row[f"{mode}_us"]), float(row.get(f"{mode}_std_us", 0))
                good = math.isfinite(mean) and deviation <= mean
                (section.points if good else section.dropped).append((int(row["bytes"]), mean * 1e-6))
            if not section.points:
                raise ValueError(f"no {mode} times")
            sections.append(section)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a latency file: {type(error).__name__} {error}") from None
    return sections


# CSV


def _csv_section(path, text) -> Section:
    section = Section()
    rows = csv.reader(text.splitlines())
    header = next(rows)
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"{path}:{number}: {len(row)} of {len(header)} columns; cut off?")
        named = dict(zip(header, row, strict=True))
        columns = [named.get(name) for name in ("size_bytes", "time_us", "algbw_GBs", "busbw_GBs")]
        _add_point(section, path, number, *columns)
    return section


def _add_point(section, path, number, size, time_us, gb_per_s, bus_gb_per_s) -> None:
    """Add a row's point; the rates beside the time show a time that is cut off, and what was measured."""
    try:
        nbytes, microseconds, rate, bus = int(size), float(time_us), float(gb_per_s), float(bus_gb_per_s)
    except (TypeError, ValueError):
        raise ValueError(f"{path}:{number}: {size!r}, {time_us!r}, {gb_per_s!r}: no size, time and rate") from None
    if not 0 < microseconds < math.inf or abs(nbytes / microseconds / 1e3 - rate) > RATE_ROUNDING * (1 + rate):
        raise ValueError(f"{path}:{number}: {nbytes} bytes in {microseconds:g} us are not {rate:g} GB/s")
    section.points.append((nbytes, microseconds * 1e-6))
    if rate >= FAST:
        section.bus = bus / rate


# nccl-tests' text


def read_nccl_tests(path, text: str) -> list[Section]:
    """The out-of-place columns of nccl-tests, also of several runs, titled "### ALGO=Ring", "### GPUS=4", in one file.

    Lines of NCCL_DEBUG between and inside the lines are taken out first.
    """
    lines = list(_without_debug(text))
    sections = [section for run in _runs(lines) if (section := _section(path, run)).points]
    if not sections:
        raise ValueError(f"{path}:{lines[-1][0] if lines else 1}: up to here no row of nccl-tests, CSV or latency JSON")
    return sections


def _runs(lines):
    """The (number, line) of each run: one begins with a title, or with nccl-tests' first line if rows came before."""
    runs = [[]]
    for number, line in lines:
        anew = "nccl-tests version" in line and any(_is_row(before) for _, before in runs[-1])
        if anew or line.startswith("###"):
            runs.append([])
        runs[-1].append((number, line))
    return runs


def _is_row(line) -> bool:
    return re.match(r"\s+\d+(\s|$)", line) is not None


def _section(path, lines) -> Section:
    """One run. Its header says where the times stand; a run with a header ends in its average."""
    section, columns, number, average = Section(), COLUMNS, 0, True
    for number, line in lines:
        if _is_row(line):
            _add_point(section, path, number, *_row(path, number, line.split(), columns))
        elif line.startswith("#") and {"size", "time", "busbw"} <= set(line.split()):
            columns, average = line.split()[1:], False
        elif line.startswith("#"):
            _remark(line, section)
            average = average or "Avg bus bandwidth" in line
    if not average:
        raise ValueError(f'{path}:{number}: ends before its "# Avg bus bandwidth"; cut off?')
    return section


def _row(path, number, words, columns):
    """Size, time and both rates of a row, out of place: the first of the columns of each name."""
    if len(words) <= columns.index("busbw"):
        raise ValueError(f"{path}:{number}: {len(words)} columns of a row; cut off?")
    wrong = words[columns.index("#wrong")] if "#wrong" in columns[: len(words)] else "0"
    if wrong not in ("0", "N/A"):
        raise ValueError(f"{path}:{number}: {wrong} wrong results; nothing measured with them counts")
    return [words[columns.index(name)] for name in ("size", "time", "algbw", "busbw")]


def _without_debug(text):
    """(number, line) of the lines without what NCCL_DEBUG wrote, those joined again that it broke in two.

    The name of the host, which begins its lines, may be glued to a number: it is learnt from lines that are whole.
    """
    hosts = sorted(set(re.findall(r"^(\S+?):\d+:\d+ \[\d+\] .*NCCL ", text, re.MULTILINE)))
    names = "|".join(map(re.escape, hosts)) or "(?!)"
    debug = re.compile(rf"(?:{names}):\d+:\d+ \[\d+\] .*")
    pending, start = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        start = start if pending else number
        rest = debug.sub("", line)
        pending += rest
        if rest == line:
            yield start, pending
            pending = ""
    if pending:
        yield start, pending


def _remark(line, section) -> None:
    """Learn from a title, or from nccl-tests' remarks: operation, mode, ranks, variant."""
    if line.startswith("###"):
        named = dict(re.findall(r"(\w+)=(\S+)", line))
        section.variant = " ".join(named[key] for key in ("ALGO", "PROTO") if key in named)
        section.ranks = int(named["GPUS"]) if "GPUS" in named else None
    elif started := re.search(r"Collective test starting: (\w+)_perf", line):
        section.operation = OPERATIONS.get(started[1], started[1])
    elif graph := re.search(r"\bgraph: (\d+)", line):
        section.mode = "graph" if int(graph[1]) else "eager"
    elif rank := re.match(r"#\s+Rank\s+(\d+)\s.* device ", line):
        section.ranks = max(section.ranks or 0, int(rank[1]) + 1)
