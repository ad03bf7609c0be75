"""Fits, predictions, the fabric file and its commands; oracle: synthetic curves whose alpha and beta are known."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chosen import full
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.launched import disks_work, fill_disk, small_disk
from commfabric.fabric.cost_model import Fabric, check_writable, size_name
from commfabric.fabric.curve import Curve, wire
from commfabric.fabric.fitting import predict, spikes
from sparsefusion.cli import commands

ROOT = Path(__file__).resolve().parents[3]
SIZES = [8 << doubling for doubling in range(28)]  # to 1 GB
MB = 1 << 20


def line(alpha, beta, sizes=SIZES):
    """Points (nbytes, seconds) on the line alpha + beta * nbytes."""
    return [(nbytes, alpha + beta * nbytes) for nbytes in sizes]


def curve_of(operation="all_reduce", ranks=4, alpha=20e-6, beta=4e-12, mode="eager", noise=0.0, changing=False):
    """A curve of known alpha and beta. noise: the largest relative error of a time. changing: alpha is larger above 1 MB."""
    random = np.random.default_rng(0)
    points = [(nbytes, time * (1 + random.uniform(-noise, noise))) for nbytes, time in line(alpha, beta)]
    points = [(nbytes, time + 5 * alpha * (changing and nbytes > MB)) for nbytes, time in points]
    return Curve.fit(operation, ranks, points, mode)


# Fits

alphas = st.floats(1e-7, 1e-2)
betas = st.floats(1e-12, 1e-7)


@settings(deadline=None, max_examples=15)
@given(alphas, betas)
def test_a_line_is_recovered(alpha, beta):
    curve = Curve.fit("all_reduce", 4, line(alpha, beta))
    for nbytes in (1, 100, 12345, MB, 5_000_000_000):
        assert curve.time(nbytes) == pytest.approx(alpha + beta * nbytes, rel=1e-6)
    assert len(curve.segments) == 1 and curve.dropped == ()


@settings(deadline=None, max_examples=15)
@given(alphas, betas, st.integers(0, 1000))
def test_noise_of_5_percent_stays_within_10(alpha, beta, seed):
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(SIZES))
    curve = Curve.fit("all_reduce", 4, [(n, t * f) for (n, t), f in zip(line(alpha, beta), noise, strict=True)])
    for nbytes in SIZES:
        assert curve.time(nbytes) == pytest.approx(alpha + beta * nbytes, rel=0.10)
    assert curve.fit_errors[0] <= 0.05


def test_changes_of_protocol_are_found():
    points = line(10e-6, 1e-9, SIZES[:10]) + line(30e-6, 1e-10, SIZES[10:20]) + line(5e-4, 1e-11, SIZES[20:])
    curve = Curve.fit("all_reduce", 4, points)
    assert [(s.first, s.last) for s in curve.segments] == [
        (8, SIZES[9]),
        (SIZES[10], SIZES[19]),
        (SIZES[20], SIZES[-1]),
    ]
    assert [s.alpha for s in curve.segments] == pytest.approx([10e-6, 30e-6, 5e-4], rel=1e-6)
    assert [s.beta for s in curve.segments] == pytest.approx([1e-9, 1e-10, 1e-11], rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20))
def test_no_message_is_faster_than_a_smaller_one(times):
    """This holds for any measured times, also for those of only one or two sizes."""
    curve = Curve.fit("all_reduce", 4, list(zip(SIZES, times, strict=False)))
    grid = np.unique(np.geomspace(1, 4 * SIZES[-1], 300).astype(int))
    predicted = predict(curve.segments, grid)
    assert np.all(np.diff(predicted) >= 0) and predicted[0] > 0
    assert curve.time(8 * curve.nbytes[-1]) > curve.time(curve.nbytes[-1])  # also after segments without slope


def test_spikes_are_dropped_and_reported():
    points = line(20e-6, 4e-12)
    points[5], points[8] = (points[5][0], 60e-6), (points[8][0], 70e-6)
    curve = Curve.fit("all_reduce", 4, points)
    assert curve.dropped == (points[5], points[8])
    assert curve.fit_errors[1] <= 1e-9 and len(curve.nbytes) == len(points) - 2


def test_points_that_are_no_spikes():
    """Noise, the first size of a slower protocol, and the last point, which cannot be compared with a larger size."""
    assert spikes([20, 20.5, 19.8, 22, 20.1, 20.3]) == []
    assert spikes([20, 20, 20, 40, 40, 40, 40]) == []
    assert spikes([20, 20, 20, 20, 60]) == []
    assert spikes([20, 20, 60, 20, 20]) == [2]


def test_repeated_sizes_count_as_their_median_and_high_quantiles_are_kept():
    curve = Curve.fit("p2p", 2, [(2048, 9.0, 9.5), (1024, 5.0, 6.0), (1024, 1.0, 2.0), (1024, 4.0, 7.0)])
    assert (curve.nbytes, curve.seconds, curve.high) == ((1024, 2048), (4.0, 9.0), (6.0, 9.5))


@pytest.mark.parametrize("points", ([], [(0, 1.0)], [(8, 0.0)], [(8, -1.0)], [(8, math.inf)], [(8, math.nan)]))
def test_points_that_cannot_be_fitted(points):
    with pytest.raises(ValueError, match="all_reduce"):
        Curve.fit("all_reduce", 4, points)


def test_the_floor_is_the_median_of_small_messages():
    assert curve_of(alpha=20e-6, beta=4e-12).floor == pytest.approx(20e-6, rel=0.01)
    slow = curve_of(alpha=300e-6, beta=40e-9)  # 200 mbit: a message of 7.5 KB takes twice the latency
    assert 300e-6 <= slow.floor <= 310e-6
    assert Curve.fit("all_reduce", 2, line(20e-6, 4e-12, SIZES[20:])).floor is None


# Intervals


@pytest.mark.parametrize("noise", (full(0.02), 0.05, full(0.1)))
def test_intervals_contain_nine_in_ten_of_the_points_left_out(noise):
    inside, total = 0, 0
    for seed in range(20):
        factors = np.random.default_rng(seed).uniform(1 - noise, 1 + noise, len(SIZES))
        points = [(n, t * f) for (n, t), f in zip(line(20e-6, 4e-12), factors, strict=True)]
        curve = Curve.fit("all_reduce", 4, points[::2])
        for nbytes, seconds in points[1:-1:2]:
            low, high = curve.interval(nbytes)
            inside, total = inside + (low <= seconds <= high), total + 1
            assert math.log(high / low) / 2 <= 4 * noise
    assert inside / total >= 0.9


def test_intervals_widen_outside_the_measured_sizes():
    curve = curve_of(noise=0.05)
    last = curve.nbytes[-1]
    widths = [math.log(curve.interval(nbytes)[1] / curve.interval(nbytes)[0]) for nbytes in (last, 2 * last, 8 * last)]
    assert widths[0] < widths[1] < widths[2]
    level = curve_of(alpha=1e-3, beta=1e-13)  # a link so fast that no size shows its bandwidth
    assert level.interval(8 * last)[1] >= 8 * level.interval(last)[1]
    flat = Curve.fit("all_reduce", 4, [(n, 20e-6 * f) for n, f in zip((1024, 2048, 4096), (1, 1.01, 1), strict=True)])
    assert flat.interval(4 * MB)[1] >= 1024 * flat.interval(4096)[1]  # the bandwidth may be that of the last size
    assert flat.interval(8)[0] < flat.interval(1024)[0] and flat.interval(8)[1] <= flat.interval(1024)[1]


# The fabric


def test_wire_factors():
    """nccl-tests' factors; that of an all-gather is for a rank's contribution, a quarter of the output on four ranks."""
    names = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather", "p2p", "all_reduce int8 two_shot", "gossip")
    assert [wire(name, 4) for name in names] == [1.5, 0.75, 0.75, 3, 1, 1.5, 1]


def test_queries_of_a_measured_curve():
    fabric = Fabric((curve_of(), curve_of("all_gather", beta=8e-12), curve_of(mode="graph", alpha=10e-6)))
    assert fabric.time("all_reduce", MB, 4) == pytest.approx(20e-6 + 4e-12 * MB)
    assert fabric.time("all_reduce", MB, 4, mode="graph") == pytest.approx(10e-6 + 4e-12 * MB)
    assert fabric.alpha("all_reduce", 4) == pytest.approx(20e-6)
    assert fabric.beta("all_gather", 4) == pytest.approx(8e-12)
    assert fabric.curve("all_gather", 4).bus_bandwidth(1 << 40) == pytest.approx(3 / 8e-12, rel=1e-4)
    low, high = fabric.interval("all_reduce", MB, 4)
    assert low <= fabric.time("all_reduce", MB, 4) <= high
    one = [fabric.time("all_reduce", MB, 1), *fabric.interval("all_reduce", MB, 1)]
    assert one + [fabric.alpha("all_reduce", 1), fabric.beta("all_reduce", 1)] == [0.0] * 5


@pytest.mark.parametrize(
    "asked, message",
    [
        (
            ("all_reduce", 8, 3),
            r"all_reduce \(eager\) was never measured on 3 ranks; this fabric has all_reduce \(eager\) on 2, ",
        ),
        (("all_gather", 8, 4), r"all_gather \(eager\) was never measured on 4 ranks; this fabric has all_reduce"),
        (
            ("all_reduce", 8, 4, True, "graph"),
            r"all_reduce \(graph\) was never measured on 4 ranks; .* all_reduce \(eager\)",
        ),
        (("all_reduce", 8, 0), "nbytes=8, ranks=0: expected"),
        (("all_reduce", -1, 4), "nbytes=-1, ranks=4: expected a finite nbytes"),
        (("all_reduce", math.nan, 4), "nbytes=nan, ranks=4: expected a finite nbytes"),
    ],
)
def test_predictions_need_a_measurement(asked, message):
    fabric = Fabric((curve_of(ranks=2), curve_of(ranks=4)))
    for query in (fabric.time, fabric.interval):
        with pytest.raises(ValueError, match=message):
            query(*asked)


@pytest.mark.parametrize(
    "operation, steps, sent",
    [
        ("all_reduce", 7 / 3, 1.75 / 1.5),
        ("all_gather", 7 / 3, 7 / 3),
        ("all_to_all", 7 / 3, 0.875 / 0.75),
        ("p2p", 1, 1),
    ],
)
def test_extrapolation_follows_a_ring_and_widens_the_interval(operation, steps, sent):
    fabric = Fabric((curve_of(operation, 2, alpha=7e-6), curve_of(operation, 4, noise=0.02)))
    curve = fabric.curve(operation, 4)
    expected = curve.alpha * steps + (curve.time(MB) - curve.alpha) * sent
    assert fabric.time(operation, MB, 8, extrapolate=True) == pytest.approx(expected)
    assert fabric.beta(operation, 8, extrapolate=True) == pytest.approx(curve.beta * sent)
    low, high = fabric.interval(operation, MB, 8, extrapolate=True)
    measured = fabric.interval(operation, MB, 4)
    assert low < min(expected, measured[0]) and high > max(expected, measured[1])
    assert fabric.time(operation, MB, 4, extrapolate=True) == curve.time(MB)


def test_latency_is_not_extrapolated_downwards():
    """A launch costs the same on fewer ranks; nevertheless the interval includes the ring's shorter latency."""
    fabric = Fabric((curve_of(),))
    assert fabric.alpha("all_reduce", 2, extrapolate=True) == pytest.approx(20e-6)
    low, high = fabric.interval("all_reduce", 8, 2, extrapolate=True)
    assert low < 20e-6 / 3 and high > 20e-6


def test_an_empty_message_without_latency():
    """A fit whose line begins at 0 seconds predicts 0 seconds, also for a number of ranks that was not measured."""
    fabric = Fabric((Curve.fit("all_reduce", 4, line(0, 1e-9)),))
    assert fabric.time("all_reduce", 0, 8, extrapolate=True) == 0
    assert fabric.interval("all_reduce", 0, 8, extrapolate=True) == (0, 0)


# The file


def test_a_fabric_is_read_back_exactly(tmp_path):
    points = [(nbytes, time, 2 * time) for nbytes, time in line(1 / 3 * 1e-5, 1e-11)]
    points[4] = (points[4][0], 1e-4, 2e-4)
    fabric = Fabric(
        (Curve.fit("all_reduce int8 two_shot", 4, points), curve_of(noise=0.05)), {"source": "here", "n": 1}
    )
    fabric.save(tmp_path / "fabric.json")
    assert Fabric.load(tmp_path / "fabric.json") == fabric
    assert [path.name for path in tmp_path.iterdir()] == ["fabric.json"]


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "fabric.json"
    Fabric((curve_of(),)).save(path)
    text = path.read_text().rstrip()
    for length in range(0, len(text), 101):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match="fabric.json is no fabric file of version 1, or is damaged"):
            Fabric.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.update(format="x"), "is no fabric file"),
        (lambda content: content.update(version=2), "it has the format 'sparsefusion fabric', version 2"),
        (lambda content: content.pop("curves"), "damaged .KeyError: 'curves'"),
        (lambda content: content["curves"][0].pop("segments"), "damaged"),
        (lambda content: content["curves"][0].update(colour=1), "damaged"),
        (lambda content: content["curves"][0]["seconds"].__setitem__(0, math.nan), "nan is not a valid size or time"),
        (lambda content: content["curves"][0]["seconds"].__setitem__(0, "fast"), "'fast' is not a valid size or time"),
        (lambda content: content["curves"][0]["segments"][0].update(alpha=math.inf), "inf is not a valid size or time"),
        (lambda content: content["curves"][0]["nbytes"].reverse(), "ascending"),
        (lambda content: content["curves"][0]["seconds"].pop(), "each with a time"),
        (lambda content: content["curves"][0].update(ranks=1), "on 1 ranks, eager: expected .* 2 ranks or more"),
        (lambda content: content["curves"][0].update(mode="slow"), "slow: expected .* the mode eager or graph"),
        (lambda content: content["curves"].append(content["curves"][0]), "two curves of all_reduce on 4 ranks"),
        (lambda content: content["curves"][0]["segments"].reverse(), "segments that join such sizes"),
        (
            lambda content: content["description"].update(link_bytes_per_s="fast"),
            "damaged .ValueError: ",
        ),
        (lambda content: content["curves"][0]["nbytes"].__setitem__(-1, 10**400), "is not a valid size or time"),
    ],
)
def test_a_damaged_file_is_refused(change, message, tmp_path):
    path = tmp_path / "fabric.json"
    fabric = Fabric((curve_of(changing=True),))
    assert len(fabric.curves[0].segments) > 1
    fabric.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        Fabric.load(path)
    assert str(path) in str(caught.value)


def test_a_file_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "f.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="f.json is no fabric file"):
        Fabric.load(tmp_path / "f.json")


def test_files_of_other_kinds(tmp_path):
    """A directory is an error. A pipe, as /dev/stdout may be, receives the text and is not replaced."""
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "f.json", FileNotFoundError)):
        with pytest.raises(error, match=f"'{path}'"):
            Fabric((curve_of(),)).save(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Fabric((curve_of(),)).save(pipe)
    assert json.loads(os.read(reader, 1 << 20))["version"] == 1 and pipe.is_fifo()
    os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_hidden_file_of_another_user_is_not_used(tmp_path):
    """In a shared directory such as /tmp, a user who guesses the name of the hidden file can create a link there."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".fabric.json.{os.getpid()}").symlink_to(victim)
    Fabric((curve_of(),)).save(tmp_path / "fabric.json")
    assert victim.read_text() == "mine" and not (tmp_path / "fabric.json").is_symlink()


def test_a_directory_without_permission_is_refused(tmp_path, monkeypatch):
    """This is checked before a measurement. `os.access` is replaced, because it permits root everything."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode != os.W_OK)
    with pytest.raises(ValueError, match="cannot write .*f.json: .* not writable"):
        check_writable(tmp_path / "f.json")


def test_sizes_have_names():
    assert [size_name(n) for n in (8, 1024, 1536, 16 * MB, 8 << 30)] == ["8 B", "1 KB", "1.5 KB", "16 MB", "8 GB"]


# Commands


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*words): (exit code, stdout, stderr) of the command line, in this process."""
    monkeypatch.setattr(commands, "leave_on_interrupt", lambda: None)
    monkeypatch.setattr(commands, "silence_third_parties", lambda: None)

    def run(*words):
        try:
            code = commands.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def table(tmp_path):
    """A CSV file in the format of examples/h100x4, with alpha = 20 us and beta = 4 us/MB."""
    lines = [f"{n},{t * 1e6},{n / t / 1e9},{1.5 * n / t / 1e9}" for n, t in line(20e-6, 4e-12)]
    path = tmp_path / "all_reduce.csv"
    path.write_text("\n".join(["size_bytes,time_us,algbw_GBs,busbw_GBs", *lines]) + "\n")
    return path


def test_fit_and_report(command, table, tmp_path):
    out = tmp_path / "fabric.json"
    code, printed, _ = command("fit", "--all-reduce", table, "--ranks", 4, "--link-gb-per-s", 500, "--out", out)
    assert code == 0
    row = "| all_reduce | 4 | eager | 28 | - | 20.0 us + 4 us/MB to 1 GB | 0.0% | 0.0% | 20.0 us | 373 | 75% |"
    assert printed.splitlines()[-1] == row
    assert Fabric.load(out).alpha("all_reduce", 4) == pytest.approx(20e-6)
    code, printed, _ = command("report", "--fabric", out, "--out", tmp_path / "page")
    names = ["fabric.md", "bandwidth.png", "roofline.png"]
    assert code == 0 and printed.split() == [str(tmp_path / "page" / name) for name in names]
    page = (tmp_path / "page" / "fabric.md").read_text()
    assert row in page and all(f"]({name})" in page for name in names[1:])
    for name in names[1:]:
        assert (tmp_path / "page" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["fit", "--out", "f"], "fit needs a file"),
        (["fit", "--all-reduce", "TABLE", "--out", "f"], "all_reduce.csv does not say .* add --ranks N"),
        (["fit", "--all-reduce", "none.csv", "--out", "f"], "none.csv"),
        (["fit", "--all-reduce", "TABLE", "--ranks", "1", "--out", "f"], "'1' must be a number of ranks, at least 2"),
        (["fit", "--link-gb-per-s", "-1", "--out", "f"], "must be positive"),
        (["fit", "--all-reduces", "f", "--out", "f"], "did you mean --all-reduce"),
        (["measure", "--out", "f", "--sizes", "2M:1M"], "begins above its end"),
        (["measure", "--out", "f", "--sizes", "1T:2T"], "invalid size '1T'"),
        (["measure", "--out", "f", "--collectives", "all_reduce,gather"], "unknown collective 'gather'"),
        (["report", "--fabric", "TABLE", "--out", "d"], "all_reduce.csv is no fabric file"),
        (["fit", "--all-reduce", "TABLE", "--ranks", "8", "--out", "f"], "all_reduce on 8 ranks it must be 1.750"),
        (["fit", "--all-gather", "TABLE", "--ranks", "4", "--out", "f"], "for all_gather on 4 ranks it must be 0.750"),
        (
            ["fit", "--all-reduce", "TABLE", "TABLE", "--ranks", "4", "--out", "f"],
            "two curves of all_reduce on 4 ranks",
        ),
        (["fit", "--all-reduce", "TABLE", "--ranks", "4", "--out", "."], "Is a directory: '[.]'"),
        (["measure", "--out", "f", "--sizes", "1:16"], "begins below 4 bytes"),
    ],
)
def test_errors_of_the_command_line_take_one_line(words, message, command, table):
    code, printed, error = command(*(table if word == "TABLE" else word for word in words))
    assert (code, printed) == (2, "") and error.count("\n") == 1
    assert re.search(message, error), error


def test_a_report_goes_into_a_directory(command, table, tmp_path):
    Fabric((curve_of(),)).save(tmp_path / "f.json")
    code, _, error = command("report", "--fabric", tmp_path / "f.json", "--out", table)
    assert code == 2 and error == f"sparsefusion report: {table} is not a directory\n"


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("kilobytes", (pytest.param(8, marks=pytest.mark.full), 40))
def test_a_full_disk(command, table, tmp_path, kilobytes):
    """One line names the file, and no part of it remains; an earlier one stays as it is."""
    fit = ("fit", "--all-reduce", table, "--ranks", 4, "--out")
    assert command(*fit, tmp_path / "f.json")[0] == 0
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        code, _, error = command("report", "--fabric", tmp_path / "f.json", "--out", disk)
        line = rf"sparsefusion report: rank 0 cannot write {disk}/(\w+\.png): No space left on device\n"
        failed = re.fullmatch(line, error)
        assert code == 1 and failed and not (disk / failed[1]).exists(), error
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        fill_disk(folder=disk)
        code, _, error = command(*fit, disk / "fabric.md")
        assert (
            code == 1 and error == f"sparsefusion fit: rank 0 cannot write {disk}/fabric.md: No space left on device\n"
        )
        (disk / "filler").unlink()
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


def test_a_report_needs_matplotlib(command, tmp_path, monkeypatch):
    Fabric((curve_of(),)).save(tmp_path / "f.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = command("report", "--fabric", tmp_path / "f.json", "--out", tmp_path / "page")
    assert code == 1 and error == "sparsefusion report: the report needs matplotlib: pip install matplotlib\n"


def test_measure_passes_its_flags_on():
    words = ["measure", "--out", "f.json", "--sizes", "1K:8K", "--collectives", "p2p,all_gather", "--ranks", "4,2"]
    arguments = commands.parser().parse_args(words)
    assert (arguments.sizes, arguments.ranks) == ([1024, 2048, 4096, 8192], [2, 4])
    assert (list(arguments.collectives), arguments.device, arguments.out) == (["p2p", "all_gather"], None, "f.json")
    default = commands.parser().parse_args(["measure", "--out", "f"])
    assert (default.sizes[0], default.sizes[-1], len(default.collectives)) == (8, 16 * MB, 5)


def test_neither_help_nor_fits_load_torch_or_matplotlib():
    program = (
        "import sys, contextlib, commfabric.fabric.readers, commfabric.fabric.report\n"
        "from sparsefusion import Fabric, __main__\n"
        "with contextlib.suppress(SystemExit): __main__.main(['measure', '--help'])\n"
        "sys.exit({'torch', 'matplotlib'} & set(sys.modules) != set())"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "--collectives" in result.stdout, result.stderr
