"""Readers, fits, predictions and advice for four H100s; oracle: published measurements, and their author's findings."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from commfabric.fabric.readers import extend_by_sweeps, read_curves, read_sections

FILES = Path(__file__).resolve().parents[3] / "examples" / "h100x4"
LINK = 478e9  # 18 links of 26.562 GB/s
KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def curve(name, operation="all_reduce", mode="eager"):
    """The curve of a file in this mode, on four ranks."""
    return next(each for each in read_curves(FILES / name, operation, 4) if each.mode == mode)


def h100(latency="tp_latency_quiet.json"):
    """The fabric of a latency file's two modes, extended by the sweep of large messages."""
    return Fabric(tuple(extend_by_sweeps(read_curves(FILES / latency, "all_reduce"), [curve("all_reduce.csv")])))


CURVES = {
    "all_reduce.csv": curve("all_reduce.csv"),
    "all_gather.csv": curve("all_gather.csv", "all_gather"),
    "reduce_scatter.csv": curve("reduce_scatter.csv", "reduce_scatter"),
    "quiet_all_reduce.txt": curve("quiet_all_reduce.txt"),
    "quiet_all_gather.txt": curve("quiet_all_gather.txt", "all_gather"),
    "all_reduce_graph.txt": curve("all_reduce_graph.txt", mode="graph"),
    "tp_latency.json eager": curve("tp_latency.json"),
    "tp_latency.json graph": curve("tp_latency.json", mode="graph"),
    "tp_latency_quiet.json eager": curve("tp_latency_quiet.json"),
    "tp_latency_quiet.json graph": curve("tp_latency_quiet.json", mode="graph"),
}
DROPPED = {  # sizes in KB: spikes, and in tp_latency.json times with a standard deviation above the mean
    "tp_latency.json eager": [2, 4, 8, 256, 1024],
    "tp_latency_quiet.json eager": [8, 256, 512],
    "quiet_all_gather.txt": [2],
}

# Fits


@pytest.mark.parametrize("name", CURVES)
def test_fits_are_within_5_percent_on_average_and_15_at_most(name):
    mean, worst = CURVES[name].fit_errors
    assert mean <= 0.05 and worst <= 0.15
    assert [size // KB for size, _ in CURVES[name].dropped] == DROPPED.get(name, [])


@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_latencies_extended_by_the_sweep_fit_as_well(mode):
    joined = h100().curve("all_reduce", 4, mode)
    assert joined.fit_errors[0] <= 0.05 and joined.fit_errors[1] <= 0.15
    assert (joined.nbytes[0], joined.nbytes[-1]) == (KB, 8 * GB)


def without(points, left_out):
    """A curve fitted to the points that are not left out."""
    return Curve.fit("all_reduce", 4, [point for point in points if point not in left_out])


def test_intervals_contain_nine_in_ten_of_the_points_left_out():
    """For each of the ten curves, every second point is left out, and then the others. Intervals are not too wide either."""
    inside, total = 0, 0
    for known in CURVES.values():
        points = list(zip(known.nbytes, known.seconds, strict=True))
        for left_out in (points[::2], points[1::2]):
            fitted = without(points, left_out)
            bounds = [(fitted.interval(nbytes), seconds) for nbytes, seconds in left_out]
            inside += sum(low <= seconds <= high for (low, high), seconds in bounds)
            total += len(bounds)
    assert inside / total >= 0.9 and total > 200
    widths = [known.half_width(nbytes) for known in CURVES.values() for nbytes in known.nbytes]
    assert sum(widths) / len(widths) <= 0.12


@pytest.mark.parametrize("name", ("all_reduce.csv", "all_gather.csv", "reduce_scatter.csv"))
def test_intervals_are_right_above_the_sizes_fitted(name):
    """A fit of the first two thirds of the sizes predicts the others."""
    curve = CURVES[name]
    points = list(zip(curve.nbytes, curve.seconds, strict=True))
    kept = len(points) * 2 // 3
    fitted = Curve.fit(curve.operation, 4, points[:kept])
    inside = [fitted.interval(nbytes)[0] <= time <= fitted.interval(nbytes)[1] for nbytes, time in points[kept:]]
    assert sum(inside) >= 0.9 * len(inside)


def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path):
    (tmp_path / "f.csv").write_bytes(b"\xef\xbb\xbf" + (FILES / "all_reduce.csv").read_bytes())
    assert read_curves(tmp_path / "f.csv", "all_reduce", 4) == [CURVES["all_reduce.csv"]]


def test_another_run_lies_in_the_interval():
    fitted, quiet = CURVES["all_reduce.csv"], CURVES["quiet_all_reduce.txt"]
    bounds = [fitted.interval(nbytes) for nbytes in quiet.nbytes]
    inside = sum(low <= seconds <= high for (low, high), seconds in zip(bounds, quiet.seconds, strict=True))
    assert inside >= 0.9 * len(bounds)


def test_small_messages_predict_large_ones_with_wide_intervals():
    """A fit of 1 KB to 4 MB predicts up to 8 GB: the measured times lie in the intervals, which are wide."""
    fitted, sweep = CURVES["tp_latency_quiet.json graph"], CURVES["all_reduce.csv"]
    larger = [(n, t) for n, t in zip(sweep.nbytes, sweep.seconds, strict=True) if n > 4 * MB]
    assert all(fitted.interval(n)[0] <= t <= fitted.interval(n)[1] for n, t in larger) and len(larger) == 11
    assert fitted.interval(8 * GB)[1] > 5 * fitted.interval(8 * GB)[0]


# Findings of the author of the measurements


def test_all_reduce_reaches_77_percent_of_the_link():
    fitted = CURVES["all_reduce.csv"]
    assert fitted.peak_bus_bandwidth / 1e9 == pytest.approx(366, abs=0.5)
    assert fitted.peak_bus_bandwidth / LINK == pytest.approx(0.77, abs=0.005)
    assert fitted.bus_bandwidth(8 * GB) == pytest.approx(fitted.peak_bus_bandwidth, rel=0.05)


@pytest.mark.parametrize("name, peak", [("all_gather", 344), ("reduce_scatter", 350)])
def test_other_collectives_peak(name, peak):
    assert CURVES[f"{name}.csv"].peak_bus_bandwidth / 1e9 == pytest.approx(peak, abs=0.5)


def test_algorithms_and_protocols_rank():
    algorithms = Fabric(tuple(read_curves(FILES / "algo_sweep.txt", "all_reduce", 4)))
    for nbytes in (256 * MB, GB, 8 * GB):
        rates = [algorithms.curve(f"all_reduce {name}", 4).bus_bandwidth(nbytes) for name in ("NVLS", "Ring", "Tree")]
        assert rates == sorted(rates, reverse=True)
    peaks = {each.operation: round(each.peak_bus_bandwidth / 1e9) for each in algorithms.curves}
    assert peaks == {"all_reduce NVLS": 377, "all_reduce Ring": 366, "all_reduce Tree": 259}
    protocols = read_curves(FILES / "proto_sweep.txt", "all_reduce", 4)
    rates = {each.operation.split()[1]: each.bus_bandwidth(256 * MB) / 1e9 for each in protocols}
    assert rates == pytest.approx({"Simple": 340.79, "LL": 146.90, "LL128": 312.49}, abs=0.02)


FLOORS = {"tp_latency.json": (36.6, 19.5), "tp_latency_quiet.json": (23.2, 12.9), "tp_latency_first.json": (23.1, 13.7)}


@pytest.mark.parametrize("name", FLOORS)
def test_latency_floors(name):
    """About 23 us eager and 13 us with graphs; on the busy machine 37 and 20 us."""
    floors = [curve(name, mode=mode).floor * 1e6 for mode in ("eager", "graph")]
    assert floors == pytest.approx(FLOORS[name], abs=0.05)


def test_floor_of_the_sweep_is_the_eager_one():
    assert CURVES["quiet_all_reduce.txt"].floor * 1e6 == pytest.approx(23.3, abs=0.1)


@pytest.mark.parametrize(
    "name, layers, eager, graph",
    [
        ("tp_latency.json", 36, 379, 713),  # Qwen3-8B, and so on as in tp_latency_report.md
        ("tp_latency.json", 32, 426, 803),
        ("tp_latency.json", 80, 171, 321),
        ("tp_latency.json", 126, 108, 204),
        ("tp_latency_first.json", 80, 271, 456),  # its README's Llama-70B
    ],
)
def test_ceilings_of_the_decode_table(name, layers, eager, graph):
    """Tokens per second if nothing but two all-reduces per layer took time."""
    fabric = Fabric(tuple(read_curves(FILES / name, "all_reduce")))
    ceilings = [1 / (2 * layers * fabric.curve("all_reduce", 4, mode).floor) for mode in ("eager", "graph")]
    assert [round(ceiling) for ceiling in ceilings] == [eager, graph]


# Numbers of ranks


def test_numbers_of_ranks_never_measured():
    """The times of 2 and 6 ranks lie in the intervals extrapolated from 4, although 6 use another algorithm. Without
    `extrapolate` they are errors."""
    two, four, six = read_curves(FILES / "scaling.txt", "all_reduce")
    fabric = Fabric((four,))
    assert [each.ranks for each in (two, four, six)] == [2, 4, 6]
    for other in (two, six):
        with pytest.raises(ValueError, match=f"never measured on {other.ranks} ranks; this fabric has"):
            fabric.time("all_reduce", GB, other.ranks)
        for nbytes, seconds in zip(other.nbytes, other.seconds, strict=True):
            low, high = fabric.interval("all_reduce", nbytes, other.ranks, extrapolate=True)
            assert low <= seconds <= high
    assert fabric.time("all_reduce", 8 * GB, 2, extrapolate=True) == pytest.approx(two.seconds[-1], rel=0.06)
    measured = 39013.7e-6  # 8 GB by a ring of 6, in the author's g6_Ring.log
    assert fabric.time("all_reduce", 8 * GB, 6, extrapolate=True) == pytest.approx(measured, rel=0.02)


# Readers


def test_sizes_of_an_all_gather_are_contributions():
    """The file's 64 bytes of output are 16 bytes from each of four ranks; the rows of size 0 are gone."""
    gathered = CURVES["all_gather.csv"]
    assert (gathered.nbytes[0], gathered.seconds[0], len(gathered.nbytes)) == (16, pytest.approx(16.98e-6), 28)
    assert gathered.bus_bandwidth(2 * GB) == pytest.approx(343.92e9, rel=0.05)
    assert CURVES["reduce_scatter.csv"].nbytes[0] == 64


def test_debug_lines_of_a_log_are_ignored():
    (section,) = read_sections(FILES / "scaling_g6_nvls.log")
    assert (section.operation, section.ranks, section.mode) == ("all_reduce", 6, "eager")
    times = [1112.43, 2164.02, 4217.42, 8275.94, 16313.2, 32315.6]
    expected = [(256 * MB << i, pytest.approx(time * 1e-6)) for i, time in enumerate(times)]
    assert section.points == expected


@pytest.mark.parametrize("name", ("quiet_all_reduce.txt", "quiet_all_gather.txt", "all_reduce_graph.txt"))
def test_debug_lines_glued_into_rows_change_nothing(name, tmp_path):
    """NCCL writes them after the root of a row, after its first #wrong, and in lines of their own."""
    debug = "node7:171:171 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n"
    glued = []
    for line in (FILES / name).read_text().splitlines(keepends=True):
        row = re.match(r"( +\d+ +\d+ +float +\w+ +-1)((?: +[\d.]+){3} +0)(.*\n)", line)
        glued += [row[1] + debug, debug, row[2] + debug, debug, row[3]] if row else [line, debug]
    path = tmp_path / name
    path.write_text("".join(glued))
    assert "-1node7:" in path.read_text() and "0node7:" in path.read_text()
    assert read_sections(path) == read_sections(FILES / name)


def test_latency_files_agree_with_their_rows():
    rows = json.loads((FILES / "tp_latency.json").read_text())["size_sweep"]
    eager, graph = read_sections(FILES / "tp_latency.json")
    assert (eager.ranks, eager.mode, graph.mode) == (4, "eager", "graph")
    for section, key in ((eager, "eager"), (graph, "graph")):
        unreliable = [row["bytes"] for row in rows if row[f"{key}_std_us"] > row[f"{key}_us"]]
        assert [size for size, _ in section.dropped] == unreliable
        assert sorted(section.points + section.dropped) == [
            (row["bytes"], pytest.approx(row[f"{key}_us"] * 1e-6)) for row in rows
        ]


@pytest.mark.parametrize(
    "name, kept, message",
    [
        (
            "all_reduce.csv",
            "\n8192,24.73,0.3",
            "all_reduce.csv:12: expected size, time and two rates, got ('8192', '24.73', '0.3', None); cut off",
        ),
        ("all_reduce.csv", "8589934592,351", "all_reduce.csv:32: expected size, time and two rates"),
        ("quiet_all_reduce.txt", "262144     float     sum      -1    26", "quiet_all_reduce.txt:31: only 6 columns"),
        ("quiet_all_reduce.txt", " 57.78       0\n", 'quiet_all_reduce.txt:31: ends before its "# Avg bus bandwidth"'),
        ("quiet_all_reduce.txt", "# Using devices", "quiet_all_reduce.txt:5: no row"),
        ("scaling.txt", "  2147483648     536870912     float", "scaling.txt:5: only 3 columns"),
        ("scaling_g6_nvls.log", "  1112.43  241.31", "scaling_g6_nvls.log:20: only 7 columns"),
        (
            "tp_latency.json",
            '"eager_us": 64.5',
            "tp_latency.json: not a latency file, or cut off: JSONDecodeError: ",
        ),
    ],
)
def test_a_file_that_is_cut_off(name, kept, message, tmp_path):
    text = (FILES / name).read_text()
    path = tmp_path / name
    path.write_text(text[: text.index(kept) + len(kept)])
    with pytest.raises(ValueError, match=re.escape(message)):
        read_curves(path, "all_reduce", 4)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "f:1: no row"),
        (b"\xff\xfe\x00", "f: not text"),
        (b"a poem\nof two lines\n", "f:2: no row"),
        (b'{"loss": 1}', "f: not a latency file, or cut off: KeyError: 'world_size'"),
        (
            b'{"world_size": 4, "size_sweep": []}',
            "all_reduce on 4 ranks: expected points with positive, finite sizes and times, got no points",
        ),
        (b"size_bytes,time_us,algbw_GBs,busbw_GBs\n8,1.0,7.00,9.0\n", "f:2: 8 bytes in 1 us are not 7 GB/s"),
        (b"size_bytes,time_us,algbw_GBs,busbw_GBs\n8,nan,0.00,0.0\n", "f:2: 8 bytes in nan us"),
        (
            b"size_bytes,time_us,algbw_GBs,busbw_GBs\n8,fast,0.00,0.0\n",
            "f:2: expected size, time and two rates, got ('8', 'fast', '0.00', '0.0')",
        ),
        (b"size_bytes,seconds\n8,1\n", "f:2: expected size, time and two rates, got ('8', None, None, None)"),
        (b"size_bytes,time_us,algbw_GBs,busbw_GBs\n8,1.0,nan,9.0\n", "f:2: 8 bytes in 1 us are not nan GB/s"),
        (b'{"world_size": Infinity, "size_sweep": []}', "f: not a latency file, or cut off: OverflowError"),
        (b'{"world_size": ' + b"[" * 100_000, "f: not a latency file, or cut off: RecursionError"),
        (b" 8 2 float sum -1 1.0 0.01 0.01 3 1.0 0.01 0.01 0\n", "f:1: 3 wrong results"),
    ],
)
def test_a_file_of_something_else(content, message, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_curves(path, "all_reduce", 4)


def test_a_run_of_one_gpu_is_refused(tmp_path):
    """nccl-tests runs on one GPU too, and reports a bus bandwidth of 0."""
    (tmp_path / "f").write_text("### GPUS=1\n 80000 20000 float sum -1 10.0 8.00 0.00 0\n")
    with pytest.raises(ValueError, match="f was measured on 1 ranks: expected 2 or more"):
        read_curves(tmp_path / "f", "all_reduce")


def test_files_that_contradict_the_command():
    with pytest.raises(ValueError, match="quiet_all_reduce.txt holds all_reduce, not all_gather"):
        read_curves(FILES / "quiet_all_reduce.txt", "all_gather")
    with pytest.raises(ValueError, match="was measured on 4 ranks: expected 8"):
        read_curves(FILES / "quiet_all_reduce.txt", "all_reduce", 8)
    with pytest.raises(ValueError, match="all_reduce.csv does not say on how many ranks"):
        read_curves(FILES / "all_reduce.csv", "all_reduce")


def test_the_command_joins_all_files(tmp_path):
    words = [sys.executable, "-m", "sparsefusion", "fit", "--out", tmp_path / "fabric.json", "--ranks", "4"]
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        words += ["--" + name.replace("_", "-"), FILES / f"{name}.csv"]
    words += ["--latency", FILES / "tp_latency_quiet.json", "--link-gb-per-s", "478"]
    result = subprocess.run(words, cwd=FILES.parent.parent, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    fabric = Fabric.load(tmp_path / "fabric.json")
    assert result.stdout == fabric.table() + "\n"
    assert fabric.curves[:2] == h100().curves
    assert [each.operation for each in fabric.curves[2:]] == ["all_gather", "reduce_scatter"]
    assert result.stdout.count("77%") == 2  # both modes are extended by the sweep
