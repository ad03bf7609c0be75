"""Times of collectives; oracles: busy loops of known length, and torch.distributed, whose arguments are recorded."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from itertools import count, product
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
import torch.distributed as dist

from commfabric.fabric import command, measurement
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.measurement import COLLECTIVES, collective_calls, measure, repetitions, timed
from commfabric.fabric.nccl import environment, in_own_process
from commfabric.foundation.command_line import Failure, run
from sparsefusion.cli.commands import parser

ROOT = Path(__file__).resolve().parents[3]
KB = 1024
worlds = pytest.mark.parametrize("world", (2, 3))


def busy(seconds):
    """A function that takes at least this many seconds."""

    def loop():
        until = perf_counter() + seconds
        while perf_counter() < until:
            pass

    return loop


def recorded_calls(**seconds):
    """(calls as `measure` takes them, {operation: the sizes they were prepared for}); see `exact_times`."""
    sizes = {name: [] for name in seconds}

    def prepare(name):
        return lambda nbytes: sizes[name].append(nbytes) or (lambda: seconds[name])

    return {name: prepare(name) for name in seconds}, sizes


@pytest.fixture
def exact_times(monkeypatch):
    """Calls return the seconds they claim to take, so that tests do not depend on how busy the machine is."""
    monkeypatch.setattr(measurement, "timed", lambda function, device, mode: function)


@pytest.fixture
def few_repetitions(monkeypatch):
    """The smallest number of repetitions."""
    monkeypatch.setattr(measurement, "BUDGET_S", 0.0)


# What is measured


@worlds
def test_every_rank_gets_the_fabric_of_the_slowest(ranks, world, exact_times):
    """The slowest rank of one operation is another than that of the other."""
    sizes = [64 * KB, 1 * KB, 8 * KB]  # in any order

    def job(rank):
        calls, prepared = recorded_calls(all_reduce=0.5 if rank == world - 1 else 0.25, p2p=0.75 if rank == 0 else 0.0)
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
def test_a_point_is_the_median_and_the_90th_percentile(ranks, world, exact_times, monkeypatch):
    """Of the repetitions after the warm-up: here the 15 numbers 1, 2, ... 15 in some order."""

    def job(rank):
        monkeypatch.setattr(measurement, "MAX_REPETITIONS", 15)
        order = [1000, 8, 1, 15, 2, 14, 3, 13, 4, 12, 5, 11, 6, 10, 7, 9]
        times = iter([number * 1e-3 for number in order])
        fabric = measure(dist.group.WORLD, {"p2p": lambda nbytes: lambda: next(times)}, [1 * KB])
        return fabric.curve("p2p", world)

    for curve in ranks(job, world):
        assert curve.seconds == pytest.approx((0.008,)) and curve.high == pytest.approx((0.0136,))


@worlds
def test_slow_operations_leave_a_race(ranks, world, exact_times):
    """From 64 KB on, an operation leaves once it takes more than three times the fastest one on any rank. Its earlier
    points are kept. Without a race it stays."""
    sizes = [1 * KB, 64 * KB, 128 * KB]

    def job(rank):
        found = []
        for race in (True, False):
            calls, prepared = recorded_calls(quick=0.1, near=0.299, lagging=0.301 if rank == world - 1 else 0.1)
            fabric = measure(dist.group.WORLD, calls, sizes, race=race)
            found.append(prepared)
            assert {curve.operation: list(curve.nbytes) for curve in fabric.curves} == prepared
        return found

    for in_a_race, without in ranks(job, world):
        assert in_a_race == {"quick": sizes, "near": sizes, "lagging": sizes[:2]}
        assert without == {"quick": sizes, "near": sizes, "lagging": sizes}


@worlds
@pytest.mark.parametrize("race", (False, True))
def test_measurements_end_when_calls_are_slow(ranks, world, exact_times, race):
    """An operation that takes two seconds on any rank is measured no further; a race ends when all operations together take
    one second; a measurement ends when no operation is left."""
    sizes = [1 * KB, 2 * KB, 64 * KB, 128 * KB]

    def job(rank):
        calls, prepared = recorded_calls(quick=1.9, slow=2.1 if rank == 0 else 0.1)
        measure(dist.group.WORLD, calls, sizes, race=race)
        alone, left = recorded_calls(slow=2.1)
        fabric = measure(dist.group.WORLD, alone, sizes, race=race)
        assert fabric.curve("slow", world).nbytes == (1 * KB,)
        return prepared, left

    for prepared, left in ranks(job, world):
        assert prepared == {"quick": [1 * KB] if race else sizes, "slow": [1 * KB]}
        assert left == {"slow": [1 * KB]}


@worlds
def test_a_measurement_ends_when_its_time_is_over(ranks, world, few_repetitions):
    """Also if only one rank is slow. Its warm-up and three repetitions of the first size take longer than `seconds`."""
    sizes = [8, 1 * KB, 2 * KB]

    def job(rank):
        call = busy(0.02) if rank == world - 1 else lambda: None
        fabrics = [
            measure(dist.group.WORLD, {"p2p": lambda nbytes: call}, sizes, seconds=seconds) for seconds in (0.05, 600)
        ]
        return [fabric.curve("p2p", world).nbytes[-1] for fabric in fabrics]  # the largest that was measured

    assert ranks(job, world) == [[8, sizes[-1]]] * world


def test_a_run_leaves_the_time_that_it_does_not_use_to_the_following_ones(monkeypatch):
    clock = iter([100.0, 100.0, 104.0, 140.0])
    monkeypatch.setattr(measurement.time, "monotonic", lambda: next(clock))
    assert list(measurement.time_shares(30, 3)) == [10.0, 13.0, 0.0]


@worlds
def test_repetitions(ranks, world):
    """The slowest rank's seconds (repetitions, functions), for `count` repetitions, or 3 to 100 as the budget allows."""
    seconds_for_3, seconds_for_5 = measurement.BUDGET_S / 2, measurement.BUDGET_S / 5.5

    def job(rank):
        calls = count()
        slowest = repetitions([lambda: float(next(calls)), lambda: rank / 2], dist.group.WORLD, count=4)
        shapes = [
            repetitions([lambda: 0.0, lambda s=seconds: s], dist.group.WORLD).shape
            for seconds in (1e-9, seconds_for_5, seconds_for_3)
        ]
        return slowest, next(calls), shapes

    for slowest, number_of_calls, shapes in ranks(job, world):
        assert slowest.dtype == torch.float64
        assert slowest.tolist() == [[repetition, (world - 1) / 2] for repetition in (1, 2, 3, 4)]  # 0 is the warm-up
        assert number_of_calls == 5
        assert shapes == [(100, 2), (5, 2), (3, 2)]


def test_a_stopwatch_measures_each_call():
    ran = []
    watch = timed(lambda: (ran.append(1), busy(0.01)()))
    assert not ran
    assert watch() >= 0.01 and watch() >= 0.01 and len(ran) == 2


# The collectives that are measured


def bytes_passed_on(call):
    """{function of torch.distributed: bytes passed to it} while call() ran; every call is performed."""
    found = {}

    def recording(name, original):
        def recorded(*arguments, **keywords):
            if name == "batch_isend_irecv":
                nbytes = sum(o.tensor.nbytes for o in arguments[0] if o.op is dist.isend)
            else:
                nbytes = arguments[1 if name == "all_gather" else 0].nbytes
            found[name] = found.get(name, 0) + nbytes
            return original(*arguments, **keywords)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_to_all_single", "batch_isend_irecv"):
            patch.setattr(dist, name, recording(name, getattr(dist, name)))
        call()
    return found


@pytest.mark.parametrize("world", (2, 3, pytest.param(4, marks=pytest.mark.full)))
def test_what_a_size_means(ranks, world):
    """For all_reduce, reduce_scatter and all_to_all it is this rank's input (of the latter two: in rows, one for each
    rank); for all_gather this rank's part; for p2p the message, which each even rank sends to the next one."""

    def job(rank):
        calls = collective_calls(dist.group.WORLD)
        assert list(calls) == list(COLLECTIVES)
        found = {}
        for name, nbytes in product(COLLECTIVES, (4, 1200, 6 * KB)):
            call = calls[name](nbytes)
            found[name, nbytes] = bytes_passed_on(call), bytes_passed_on(call)
        return found

    torch_functions = {
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
                assert first == {torch_functions[name]: nbytes}, (name, rank)


@pytest.mark.parametrize("world", (3, pytest.param(4, marks=pytest.mark.full)))
def test_all_collectives_are_measured(ranks, world, few_repetitions):
    """The ranks of a group measure, while another rank does something else."""
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


@pytest.mark.full
@pytest.mark.parametrize("started,counts", [(2, ""), pytest.param(3, "2,3", marks=pytest.mark.full)])
def test_measure_under_torchrun(tmp_path, started, counts):
    """stdout has only the table, and the file the same fabric. With --ranks, smaller numbers of ranks are measured, too."""
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
    description = fabric.description
    assert [description[key] for key in ("source", "backend", "device")] == ["measured", "gloo", "cpu"]
    assert description["torch"] == torch.__version__ and description["host"] == os.uname().nodename
    again = tmp_path / "again.json"
    fabric.save(again)
    assert json.loads(again.read_text()) == json.loads(out.read_text()) and Fabric.load(again) == fabric


@pytest.mark.parametrize("flags,world,message", [
    (["--out", "f.json"], None, "measure needs 2 ranks or more: torchrun --nproc-per-node 2 -m sparsefusion measure .*"),
    (["--out", "f.json"], "1", "measure needs 2 ranks or more.*"),
    (["--out", "f.json", "--ranks", "2,5"], "4", "--ranks 5 must be from 2 to the 4 ranks that were started"),
])  # fmt: skip
def test_errors_before_ranks_meet(flags, world, message, tmp_path, monkeypatch, capsys):
    """Every rank exits with code 2, and only rank 0 prints a line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("commfabric.foundation.command_line.RANK_0_GRACE_S", 0.0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    arguments = parser().parse_args(["measure", *flags])
    for rank in range(int(world or 1)):
        monkeypatch.setenv("RANK", str(rank))
        assert run("sparsefusion measure", lambda: command.measure_command(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == (rank == 0)
        assert rank or re.fullmatch(f"sparsefusion measure: {message}\n", err), err
    assert not list(tmp_path.iterdir()) and not dist.is_initialized()


@pytest.fixture
def launch(ranks, monkeypatch, tmp_path):
    """launch(world, action, flags): what action(measure_command, rank) returned on ranks that a launcher has started.

    Each rank has a directory of its own, as if on another host. flags(rank): its command line. The ranks meet in a store
    at MASTER_PORT.
    """
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(measurement, "BUDGET_S", 0.0)

    def job(rank, action, flags):
        world = dist.get_world_size()
        port = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port += server.getsockname()[1]
        dist.broadcast(port, 0)
        dist.barrier()
        dist.destroy_process_group()  # the command joins by itself
        os.environ.update(MASTER_PORT=str(port.item()), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        arguments = parser().parse_args(["measure", "--sizes", "1K:4K", "--collectives", "all_reduce", *flags(rank)])
        return action(partial(command.measure_command, arguments), rank)

    return lambda world, action, flags: ranks(job, world, action, flags)


def error_of(measure_command, rank):
    """The error, which must come long before the other ranks' time-out."""
    start = perf_counter()
    with pytest.raises(Exception) as raised:
        measure_command()
    assert perf_counter() - start < 30
    return raised.type, str(raised.value)


@worlds
@pytest.mark.parametrize("out, message", [
    ("none/f.json", "cannot write none/f.json: .*"), (".", "cannot write [.]: it is a directory.*"),
])  # fmt: skip
def test_a_file_that_rank_0_cannot_write(launch, world, out, message):
    """Every rank raises the same error."""
    first, *others = launch(world, error_of, lambda rank: ["--out", out, "--device", "cpu"])
    assert all(other == first for other in others)
    assert first[0] is ValueError and re.fullmatch(rf"{message} \(rank 0\)", first[1]), first


@worlds
def test_other_ranks_need_no_directory(launch, world, tmp_path):
    """Only rank 0 writes, so a directory that is missing on another host is no error."""
    (tmp_path / "out").mkdir()
    flags = [["--out", str(tmp_path / "out" / "f.json")], ["--out", "none/f.json"]]
    launch(world, lambda measure_command, rank: measure_command(), lambda rank: [*flags[rank > 0], "--device", "cpu"])
    assert [curve.ranks for curve in Fabric.load(tmp_path / "out" / "f.json").curves] == [world]


@worlds
@pytest.mark.parametrize(
    "other", (["--sizes", "1K:8K"], ["--seconds", "9"], ["--collectives", "p2p"], ["--ranks", "2"])
)
def test_ranks_with_different_arguments(launch, world, other):
    """Every rank raises an error; otherwise they would wait for one another."""
    found = launch(world, error_of, lambda rank: ["--out", "f", "--device", "cpu", *(other if rank == 1 else [])])
    for kind, message in found:
        assert kind is ValueError and message.startswith("arguments differ across ranks: rank 1 got --"), message


@worlds
@pytest.mark.skipif(torch.cuda.is_available(), reason="finds a CUDA device")
@pytest.mark.parametrize("lonely", (True, False))
def test_ranks_without_a_cuda_device(launch, world, lonely):
    """Also if only the last rank asks for one: no rank waits for another with a different backend."""

    def flags(rank):
        return ["--out", "f.json", "--device", "cpu" if lonely and rank < world - 1 else "cuda"]

    first = world - 1 if lonely else 0
    message = f"--device cuda: no GPU for local rank {first}, torch finds 0 on this host (rank {first})"
    assert launch(world, error_of, flags) == [(ValueError, message)] * world


@worlds
def test_sizes_for_which_there_was_no_time(launch, world, tmp_path):
    """Rank 0 prints up to which size it measured."""

    def printed(measure_command, rank):
        with redirect_stderr(io.StringIO()) as err:
            measure_command()
        return err.getvalue()

    out = str(tmp_path / "f.json")
    first, *others = launch(world, printed, lambda rank: ["--out", out, "--device", "cpu", "--seconds", "1e-9"])
    assert first == f"sparsefusion measure: all_reduce on {world} ranks (eager) was measured up to 1 KB\n"
    assert not any(others) and Fabric.load(out).curve("all_reduce", world).nbytes == (1024,)


# Settings of NCCL


@worlds
@pytest.mark.parametrize("device", ("cpu", None))
@pytest.mark.skipif(torch.cuda.is_available(), reason="finds a CUDA device")
def test_settings_of_nccl_need_cuda(launch, world, device):
    flags = ["--out", "f.json", "--nccl", "Ring,LL128", *(["--device", device] if device else [])]
    message = "--nccl chooses NCCL's algorithms and protocols, which need CUDA; this rank measures on the CPU"
    assert launch(world, error_of, lambda rank: flags) == [(ValueError, message)] * world


def test_a_setting_is_measured_in_an_environment_of_its_own():
    """NCCL reads the variables once per process, so each setting needs a new one; this process keeps its environment."""
    for setting, variables in (("Ring", ("Ring", None)), ("LL128", (None, "LL128")), ("Tree LL", ("Tree", "LL"))):
        found = [in_own_process(environment(setting), os.getenv, name) for name in ("NCCL_ALGO", "NCCL_PROTO")]
        assert tuple(found) == variables
    assert "NCCL_ALGO" not in os.environ and "NCCL_PROTO" not in os.environ


@pytest.mark.parametrize("world, count", [pytest.param(2, 2, marks=pytest.mark.full), (3, 2)])
def test_processes_of_a_setting_meet_and_measure(launch, world, count):
    """Here with gloo, which ignores the setting. Ranks of a smaller group take part only if they belong to it."""

    def action(measure_command, rank):
        command._join(measure_command.args[0])
        return [command.measure_setting(s, count, [8, 1024], "cpu", "eager", 60.0) for s in ("Ring", "Ring LL")]

    first, second, *others = launch(world, action, lambda rank: ["--out", "f.json", "--device", "cpu"])
    assert first == second and others == [[(), ()]] * (world - count)
    for (curve,), setting in zip(first, ("Ring", "Ring LL"), strict=True):
        sizes = sorted([*curve.nbytes, *(size for size, _ in curve.dropped)])
        assert (curve.operation, curve.ranks, sizes) == (f"all_reduce {setting}", count, [8, 1024])


@pytest.mark.skipif(torch.cuda.is_available(), reason="finds a CUDA device")
def test_a_setting_that_cannot_be_measured_is_left_out(launch):
    """Here because there is no CUDA; rank 0 prints why, and the measurement goes on."""

    def action(measure_command, rank):
        command._join(measure_command.args[0])
        with redirect_stderr(io.StringIO()) as err:
            assert command.measure_setting("NVLS", 2, [8], "cuda:0", "graph", 60.0) == ()
        return err.getvalue()

    first, second = launch(2, action, lambda rank: ["--out", "f.json", "--device", "cpu"])
    assert (
        re.fullmatch("sparsefusion measure: left out all_reduce NVLS on 2 ranks \\(graph\\): .+\n", first)
        and not second
    )


@worlds
def test_a_file_that_cannot_be_written_in_the_end(launch, world, monkeypatch):
    """Every rank raises the same error, of one line."""

    def fail(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Fabric, "save", fail)
    found = launch(world, error_of, lambda rank: ["--out", "f.json", "--device", "cpu"])
    message = "the fabric could not be written: [Errno 28] No space left on device"
    assert found == [(Failure, message)] * world


@pytest.mark.parametrize("world", (pytest.param(3, marks=pytest.mark.full), 4))
def test_ranks_that_do_not_measure_may_wait_long(launch, world, monkeypatch, tmp_path):
    """They may wait for longer than the timeout of a message."""
    monkeypatch.setattr(command, "TIMEOUT", timedelta(seconds=3))

    def slow(*arguments, **keywords):
        sleep(4)
        return measure(*arguments, **keywords)

    def action(measure_command, rank):
        if rank < 2:
            monkeypatch.setattr(command, "measure", slow)
        measure_command()

    out = str(tmp_path / "f.json")
    launch(world, action, lambda rank: ["--out", out, "--device", "cpu", "--ranks", "2"])
    assert [curve.ranks for curve in Fabric.load(out).curves] == [2]


@worlds
def test_sizes_and_times_that_cannot_be_measured(ranks, world, exact_times):
    """Every rank raises an error, not only rank 0, which fits the curves."""

    def job(rank):
        errors = []
        for sizes, seconds in (([], 0.1), ([1024], float("inf"))):
            calls, _ = recorded_calls(all_reduce=seconds)
            with pytest.raises(ValueError) as raised:
                measure(dist.group.WORLD, calls, sizes)
            errors.append(str(raised.value))
        return errors

    start = f"all_reduce on {world} ranks: expected points with positive, finite sizes and times, got"
    for empty, infinite in ranks(job, world):
        assert empty == f"{start} no points" and infinite.startswith(f"{start} 1024 bytes in (inf")


@pytest.mark.parametrize("flags,message", [
    ([], "the following arguments are required: --out"),
    (["--out", "F", "--sizes", "4M:1K"], "argument --sizes: '4M:1K' begins above its end"),
    (["--out", "F", "--sizes", "1X:2K"], "argument --sizes: invalid size '1X': expected a number such as 4096, 64K or 16M"),
    (["--out", "F", "--sizes", "1K"], "argument --sizes: invalid size '': expected a number such as 4096, 64K or 16M"),
    (["--out", "F", "--collectives", "all_reduce,reduce"], "argument --collectives: unknown collective 'reduce'.*"),
    (["--out", "F", "--seconds", "0"], "argument --seconds: 0 must be positive"),
    (["--out", "F", "--ranks", "1"], "argument --ranks: '1' must be a number of ranks, at least 2"),
    (["--out", "F", "--ranks", "2,"], "argument --ranks: '' must be a number of ranks, at least 2"),
    (["--out", "F", "--nccl", "Rnig"], "argument --nccl: unknown setting of NCCL 'Rnig': expected one of Ring, .*"),
    (["--out", "F", "--nccl", "LL/Ring"], "argument --nccl: unknown setting of NCCL 'LL/Ring': expected .* or two as in .*"),
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
    settings = parser().parse_args(["measure", "--out", "F", "--nccl", "Ring,LL,Ring/LL,Ring"]).nccl
    assert settings == ["Ring", "LL", "Ring LL"]
    default = parser().parse_args(["measure", "--out", "F"])
    assert default.sizes == [1 << bits for bits in range(3, 25)] and default.seconds == 60
    assert tuple(default.collectives) == COLLECTIVES and default.ranks is None
