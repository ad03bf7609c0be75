"""Times of collectives; oracles: busy loops of known length, and torch.distributed itself, asked what it was handed."""

import json
import os
import re
import subprocess
import sys
from itertools import count, product
from pathlib import Path
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from sparsefusion.cli.commands import parser
from sparsefusion.fabric import measurement
from sparsefusion.fabric.cost_model import Fabric
from sparsefusion.fabric.measurement import COLLECTIVES, collective_calls, measure, repetitions, timed
from sparsefusion.foundation.command_line import run

ROOT = Path(__file__).resolve().parents[3]
KB = 1024
worlds = pytest.mark.parametrize("world", (2, 3))


def busy(seconds):
    """A function that takes at least so long."""

    def loop():
        until = perf_counter() + seconds
        while perf_counter() < until:
            pass

    return loop


def noted(**seconds):
    """(calls as `measure` takes them, {operation: the sizes they were prepared for}); see `told`."""
    sizes = {name: [] for name in seconds}

    def prepare(name):
        return lambda nbytes: sizes[name].append(nbytes) or (lambda: seconds[name])

    return {name: prepare(name) for name in seconds}, sizes


@pytest.fixture
def told(monkeypatch):
    """Calls tell how long they took; so that tests do not depend on how busy the machine is."""
    monkeypatch.setattr(measurement, "timed", lambda function, device, mode: function)


@pytest.fixture
def quickly(monkeypatch):
    """As few repetitions as there may be."""
    monkeypatch.setattr(measurement, "BUDGET_S", 0.0)


# What is measured


@worlds
def test_every_rank_gets_the_fabric_of_the_slowest(ranks, world, told):
    """Of each call: another rank is slow in the second than in the first."""
    sizes = [64 * KB, 1 * KB, 8 * KB]  # in any order

    def job(rank):
        calls, prepared = noted(all_reduce=0.5 if rank == world - 1 else 0.25, p2p=0.75 if rank == 0 else 0.0)
        fabric = measure(dist.group.WORLD, calls, sizes)
        assert prepared == {"all_reduce": sorted(sizes), "p2p": sorted(sizes)}
        return fabric

    first, *others = ranks(job, world)
    assert all(other == first for other in others)
    assert [(c.operation, c.ranks, c.mode) for c in first.curves] == [
        (n, world, "eager") for n in ("all_reduce", "p2p")
    ]
    assert first.description == {"source": "measured", "device": "cpu"}
    for curve, seconds in zip(first.curves, (0.5, 0.75), strict=True):
        assert curve.nbytes == tuple(sorted(sizes)) and curve.seconds == curve.high == (seconds,) * 3


@worlds
def test_a_point_is_the_median_and_the_90th_percentile(ranks, world, told, monkeypatch):
    """Of the repetitions, after one to warm up: here of the 15 numbers 1, 2, ... 15 in any order."""

    def job(rank):
        monkeypatch.setattr(measurement, "MOST", 15)
        order = [1000, 8, 1, 15, 2, 14, 3, 13, 4, 12, 5, 11, 6, 10, 7, 9]
        times = iter([number * 1e-3 for number in order])
        fabric = measure(dist.group.WORLD, {"p2p": lambda nbytes: lambda: next(times)}, [1 * KB])
        return fabric.curve("p2p", world)

    for curve in ranks(job, world):
        assert curve.seconds == pytest.approx((0.008,)) and curve.high == pytest.approx((0.0136,))


@worlds
def test_what_lags_is_left_out_of_a_race(ranks, world, told):
    """From 64 KB on, once it takes more than three times the fastest, be it on one rank; what was measured of it is kept.
    Not without a race."""
    sizes = [1 * KB, 64 * KB, 128 * KB]

    def job(rank):
        found = []
        for race in (True, False):
            calls, prepared = noted(quick=0.1, near=0.299, lagging=0.301 if rank == world - 1 else 0.1)
            fabric = measure(dist.group.WORLD, calls, sizes, race=race)
            found.append(prepared)
            assert {curve.operation: list(curve.nbytes) for curve in fabric.curves} == prepared
        return found

    for race, all_of_them in ranks(job, world):
        assert race == {"quick": sizes, "near": sizes, "lagging": sizes[:2]}
        assert all_of_them == {"quick": sizes, "near": sizes, "lagging": sizes}


@worlds
@pytest.mark.parametrize("race", (False, True))
def test_what_is_slow_stops(ranks, world, told, race):
    """After two seconds, be it on one rank, or in a race after a second in all; at the latest when nothing is left."""
    sizes = [1 * KB, 2 * KB, 64 * KB, 128 * KB]

    def job(rank):
        calls, prepared = noted(quick=1.9, slow=2.1 if rank == 0 else 0.1)
        measure(dist.group.WORLD, calls, sizes, race=race)
        alone, left = noted(slow=2.1)
        fabric = measure(dist.group.WORLD, alone, sizes, race=race)
        assert fabric.curve("slow", world).nbytes == (1 * KB,)
        return prepared, left

    for prepared, left in ranks(job, world):
        assert prepared == {"quick": [1 * KB] if race else sizes, "slow": [1 * KB]}
        assert left == {"slow": [1 * KB]}


@worlds
def test_repetitions(ranks, world):
    """The slowest rank's seconds, (repetitions, functions); as many as asked for, or as the budget allows: 3 to 100."""
    few, several = measurement.BUDGET_S / 2, measurement.BUDGET_S / 5.5

    def job(rank):
        ran = count()
        asked = repetitions([lambda: float(next(ran)), lambda: rank / 2], dist.group.WORLD, count=4)
        shapes = [
            repetitions([lambda: 0.0, lambda s=seconds: s], dist.group.WORLD).shape for seconds in (1e-9, several, few)
        ]
        return asked, next(ran), shapes

    for asked, times, shapes in ranks(job, world):
        assert asked.dtype == torch.float64
        assert asked.tolist() == [[repetition, (world - 1) / 2] for repetition in (1, 2, 3, 4)]  # 0 warmed up
        assert times == 5
        assert shapes == [(100, 2), (5, 2), (3, 2)]


def test_a_stopwatch():
    ran = []
    watch = timed(lambda: (ran.append(1), busy(0.01)()))
    assert not ran
    assert watch() >= 0.01 and watch() >= 0.01 and len(ran) == 2


# What the collectives are


def handed_over(call):
    """{function of torch.distributed: bytes handed to it} while call() ran; every call goes through."""
    found = {}

    def noting(name, original):
        def noted(*arguments, **keywords):
            if name == "batch_isend_irecv":
                nbytes = sum(o.tensor.nbytes for o in arguments[0] if o.op is dist.isend)
            else:
                nbytes = arguments[1 if name == "all_gather" else 0].nbytes
            found[name] = found.get(name, 0) + nbytes
            return original(*arguments, **keywords)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_to_all_single", "batch_isend_irecv"):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        call()
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
def test_what_a_size_means(ranks, world):
    """all_reduce, reduce_scatter, all_to_all: this rank's input, in rows for all; all_gather: its part; p2p: the message,
    from each even rank to the next."""

    def job(rank):
        calls = collective_calls(dist.group.WORLD)
        assert list(calls) == list(COLLECTIVES)
        found = {}
        for name, nbytes in product(COLLECTIVES, (4, 1200, 6 * KB)):
            call = calls[name](nbytes)
            found[name, nbytes] = handed_over(call), handed_over(call)
        return found

    of_torch = {
        "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "all_to_all_single",
        "all_to_all": "all_to_all_single", "p2p": "batch_isend_irecv",
    }  # fmt: skip
    for rank, found in enumerate(ranks(job, world)):
        for (name, nbytes), (first, second) in found.items():
            assert first == second, "prepared once, performed often"
            rows = name in ("reduce_scatter", "all_to_all")
            nbytes = 4 * world if rows and nbytes == 4 else nbytes
            if name == "p2p" and (rank ^ 1) >= world:
                assert first == {}
            else:
                nbytes *= name != "p2p" or rank % 2 == 0
                assert first == {of_torch[name]: nbytes}, (name, rank)


@pytest.mark.parametrize("world", (3, 4))
def test_the_collectives_measured(ranks, world, quickly):
    """All of them, by some of the ranks while another does something else."""
    size = world - 1

    def job(rank):
        group = dist.new_group(range(1, world))
        return measure(group, collective_calls(group), [1 * KB, 4 * KB, 16 * KB]) if rank else None

    _, first, *others = ranks(job, world)
    assert all(other == first for other in others)
    for name in COLLECTIVES:
        assert first.time(name, 2 * KB, size) > 0
    with pytest.raises(ValueError, match=f"never measured on {world} ranks"):
        first.time("all_reduce", 2 * KB, world)


# The command


def torchrun(ranks, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "sparsefusion", "measure", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("started,counts", [(2, ""), pytest.param(3, "2,3", marks=pytest.mark.full)])
def test_measure_under_torchrun(tmp_path, started, counts):
    """The table on stdout and the same fabric in the file, nothing else; of fewer ranks than run, too."""
    out = tmp_path / "fabric.json"
    flags = ["--sizes", "1K:4K", "--collectives", "all_reduce,p2p", "--device", "cpu"]
    done = torchrun(started, "--out", out, *flags, *(["--ranks", counts] if counts else []))
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["fabric.json"]
    fabric = Fabric.load(out)
    assert done.stdout == fabric.table() + "\n"
    assert {(c.operation, c.ranks) for c in fabric.curves} == set(product(("all_reduce", "p2p"), range(2, started + 1)))
    for curve in fabric.curves:
        sizes = sorted([*curve.nbytes, *(size for size, _ in curve.dropped)])
        assert sizes == [1024, 2048, 4096] and curve.mode == "eager"
    told = fabric.description
    assert (told["source"], told["backend"], told["device"]) == ("measured", "gloo", "cpu")
    assert told["torch"] == torch.__version__ and told["host"] == os.uname().nodename
    again = tmp_path / "again.json"
    fabric.save(again)
    assert json.loads(again.read_text()) == json.loads(out.read_text()) and Fabric.load(again) == fabric


@pytest.mark.parametrize("flags,world,message", [
    (["--out", "f.json"], None, "measure needs 2 ranks or more: torchrun --nproc-per-node 2 -m sparsefusion measure .*"),
    (["--out", "f.json"], "1", "measure needs 2 ranks or more.*"),
    (["--out", "nowhere/f.json"], "2", "nowhere/f.json: there is no directory /.*/nowhere"),
    (["--out", "."], "2", "\\. is a directory"),
    pytest.param(["--out", "f.json", "--device", "cuda"], "2", "--device cuda: torch finds no CUDA device",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="finds one")),
    (["--out", "f.json", "--ranks", "2,5"], "4", "--ranks 5 must be from 2 to the 4 ranks that were started"),
])  # fmt: skip
def test_errors_before_ranks_meet(flags, world, message, tmp_path, monkeypatch, capsys):
    """Exit code 2 and one line, on every rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparsefusion.foundation.command_line.RANK_0_GRACE_S", 0.0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    arguments = parser().parse_args(["measure", *flags])
    for rank in range(int(world or 1)):
        monkeypatch.setenv("RANK", str(rank))
        assert run("sparsefusion measure", lambda: measurement.measure_command(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == (rank == 0)
        assert rank or re.fullmatch(f"sparsefusion measure: {message}\n", err), err
    assert not list(tmp_path.iterdir()) and not dist.is_initialized()


@pytest.mark.parametrize("flags,message", [
    ([], "the following arguments are required: --out"),
    (["--out", "F", "--sizes", "4M:1K"], "argument --sizes: '4M:1K' begins above its end"),
    (["--out", "F", "--sizes", "1X:2K"], "argument --sizes: '1X' is no size such as 4096, 64K or 16M"),
    (["--out", "F", "--sizes", "1K"], "argument --sizes: '' is no size such as 4096, 64K or 16M"),
    (["--out", "F", "--collectives", "all_reduce,reduce"], "argument --collectives: 'reduce' is none of all_reduce, .*"),
    (["--out", "F", "--ranks", "1"], "argument --ranks: '1' must be a number of ranks, at least 2"),
    (["--out", "F", "--ranks", "2,"], "argument --ranks: '' must be a number of ranks, at least 2"),
    (["--out", "F", "--rank", "2"], r"unknown argument --rank \(did you mean --ranks\?\)"),
])  # fmt: skip
def test_errors_of_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as left:
        parser().parse_args(["measure", *flags])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == "" and err.count("\n") == 1
    assert re.fullmatch(rf"sparsefusion( measure)?: {message}\n", err), err


def test_sizes_of_flags():
    arguments = parser().parse_args(["measure", "--out", "F", "--sizes", "1K:10K", "--ranks", "4,2,4"])
    assert arguments.sizes == [1024, 2048, 4096, 8192] and arguments.ranks == [2, 4]
    default = parser().parse_args(["measure", "--out", "F"])
    assert default.sizes == [1 << bits for bits in range(10, 25)]
    assert tuple(default.collectives) == COLLECTIVES and default.ranks is None
