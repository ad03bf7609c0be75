"""Faults of real processes, links and files in a run. Oracles: an undisturbed run, exit codes, the rank that is at fault.

By default one case of each mechanism: a rank is killed, stopped or fails, the store of rank 0 ends or stops, torchrun
restarts, a signal, a full disk. With --full, others too, and with the engines of DeepSpeed and Megatron.
"""

import ctypes
import errno
import functools
import json
import logging
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from chosen import full
from safetensors.torch import load_file

import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from benchmarks.support.launched import (
    TINY,
    Fault,
    disks_work,
    inject,
    launched,
    lines,
    namespaces_work,
    small_disk,
    texts,
    write_text,
)
from commfabric.collectives.agreement import on_first
from commfabric.foundation import command_line
from megatron_ssm.checkpoints import disk
from megatron_ssm.checkpoints import training as checkpoint_writer
from megatron_ssm.checkpoints.disk import DirectoryLock
from megatron_ssm.checkpoints.folders import find_checkpoints, half_written, step_of
from megatron_ssm.checkpoints.shards import ShardReader
from megatron_ssm.checkpoints.training import Snapshot
from megatron_ssm.train import corpus, pretraining, saving
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.progress import Progress
from megatron_ssm.train.saving import BEGUN, BackgroundWriter
from megatron_ssm.train.trainer import SequenceLoss, Trainer
from ranks import run_agent

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two documents in text/."""
    monkeypatch.chdir(tmp_path)
    write_text()
    return tmp_path


@pytest.fixture
def flags_of(here, monkeypatch):
    """flags_of(engine): the flags of torch's engine, of DeepSpeed's with a stage of ZeRO, and of Megatron's."""

    def flags(engine):
        if engine == "torch":
            return []
        if engine == "megatron":
            return ["--engine", "megatron"]
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed").utils.logger.setLevel("ERROR")
        zero = {"stage": int(engine[-1]), "stage3_param_persistence_threshold": 0}
        Path("zero.json").write_text(json.dumps({"zero_optimization": zero}))
        return ["--engine", "deepspeed", "--deepspeed-config", "zero.json", "--params-dtype", "float32"]

    return flags


TENSOR = ["--tensor-model-parallel-size", "2"]
ZERO = ("zero-0", "zero-1", "zero-2")  # and zero-3, the only one by default


def train(world, *more, fault=None):
    """The exit codes of a run that ends by itself."""
    with launched(world, [*TINY, *more], fault) as run:
        return run.wait(*range(world), timeout=60)[0]


def losses(path="log.jsonl"):
    return [(line["step"], line["loss"]) for line in map(json.loads, Path(path).read_text().splitlines())]


def checkpoints():
    return [path.name for path in find_checkpoints("out/checkpoints")]


@functools.cache
def undisturbed(engine, world, *more):
    """(losses, weights) of a run in which nothing happens; all tests have the same text."""
    assert train(world, "--out", "straight", "--log", "straight.jsonl", *more) == [0] * world
    return torch.tensor(losses("straight.jsonl")), load_file("straight/model.safetensors")


def assert_as_undisturbed(engine, world, *more):
    """The log and the model are bitwise those of a run in which nothing happened."""
    expected, theirs = undisturbed(engine, world, *more)
    assert torch.equal(torch.tensor(losses()), expected)
    ours = load_file("out/model.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# Ranks that end, or hang


def survivors(world, fault, *more):
    """The one line of the ranks that are left when a fault has ended or stopped one of them. Then no rank is left.

    Another rank may say before that rank 0 has ended, which is not the cause.
    """
    others = [rank for rank in range(world) if rank != fault.rank]
    with launched(world, [*TINY, *more], fault) as run:
        assert run.wait(*others, fault.rank)[0] == [1] * len(others) + [-signal.SIGKILL]
    assert texts("err", world)[fault.rank] == []
    found = lines("err", world)
    (line,) = [each for each in found if "rank 0's store" not in each] or found
    return line


NAMED = r"rank {rank} of {world} \(process \d+ on \S+\) has ended, hangs or cannot be reached: "


@pytest.mark.parametrize(
    "engine, world, while_saving, more",
    [
        ("torch", 2, False, []),
        full("torch", 3, False, []),
        full("torch", 2, False, TENSOR),
        full("torch", 3, True, ["--async-save"]),
        full("zero-3", 2, True, []),
        *(full(engine, 2, True, []) for engine in ("torch", "megatron", *ZERO)),
        *(full(engine, 2, False, TENSOR) for engine in (*ZERO, "zero-3", "megatron")),
    ],
)
def test_a_killed_rank_is_named(flags_of, engine, world, while_saving, more):
    """Afterwards --resume auto continues from the last complete checkpoint, and removes what is half-written."""
    more = [*flags_of(engine), *more]
    line = survivors(world, Fault(1, 4, signal.SIGKILL, while_saving), *more)
    assert re.match(NAMED.format(rank=1, world=world) + "(?!there was no sign of life)", line)
    assert checkpoints() == ["step-000002"]
    assert train(world, "--resume", "auto", *more) == [0] * world
    assert half_written("out/checkpoints") == []
    assert_as_undisturbed(engine, world, *more)


def test_rank_0_is_killed(here):
    """The store in which the ranks met ends with it."""
    line = survivors(2, Fault(0, 4, signal.SIGKILL))
    assert re.match(r"rank 1 of 2: rank 0's store at 127.0.0.1:\d+ has ended: .", line)


@pytest.mark.full
@pytest.mark.parametrize("world, more", [(3, []), (4, TENSOR), (3, ["--async-save"])])
def test_a_rank_that_fails_alone_removes_nothing(here, monkeypatch, world, more):
    """Such as one whose connection is closed while rank 0 completes a checkpoint and renames its folder."""
    write, complete, describe = Snapshot.write, Snapshot._complete, checkpoint_writer.description_text
    os.mkfifo("has-left")
    os.mkfifo("has-ended")

    def on_rank_0(action, group):
        if os.environ["RANK"] == "2" and Path("out/checkpoints/.step-000004").exists() and action.__name__ != "begin":
            raise RuntimeError("the connection is closed")
        on_first(action, group)

    def written(self, group=None):
        try:
            write(self, group)
        except RuntimeError:
            if os.environ["RANK"] == "2":
                Path("has-left").write_text("yes")
                assert Path("has-ended").read_text() == "yes"
            raise

    def described(entries):
        if entries["step"] == 4:
            assert Path("has-left").read_text() == "yes"  # waits for rank 2
        return describe(entries)

    def completed(self, *arguments):
        try:
            complete(self, *arguments)
        finally:
            if self.step == 4:
                Path("has-ended").write_text("yes")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writer, "on_first", on_rank_0)
        patched.setattr(Snapshot, "write", written)
        patched.setattr(Snapshot, "_complete", completed)
        patched.setattr(checkpoint_writer, "description_text", described)
        assert train(world, *more) == [1] * world
    assert checkpoints() == ["step-000002", "step-000004"]
    assert train(world, "--resume", *more) == [0] * world
    assert_as_undisturbed("torch", world, *more)


def fail(trainer):
    raise RuntimeError("a bug")


def test_a_rank_that_fails_is_named(here):
    """It ends with its traceback; the other one says which rank has ended."""
    with launched(2, TINY, Fault(1, 4, fail)) as run:
        assert run.wait(0, 1)[0] == [1, 1]
    (line,), trace = texts("err", 2)
    assert re.match(NAMED.format(rank=1, world=2), line)
    assert trace[0] == "pretrain.py: rank 1 failed" and trace[-1] == "RuntimeError: a bug"


@pytest.mark.parametrize("world, tp, rank", [full(2, 1, 1), full(3, 1, 2), (2, 2, 1)])
def test_a_stopped_rank_is_named(here, world, tp, rank):
    line = survivors(world, Fault(rank, 3, signal.SIGSTOP), "--tensor-model-parallel-size", str(tp))
    assert re.fullmatch(NAMED.format(rank=rank, world=world) + "there was no sign of life for 5 s", line)


@pytest.mark.full
def test_rank_0_is_stopped(here):
    line = survivors(2, Fault(0, 3, signal.SIGSTOP))
    assert re.fullmatch(r"rank 1 of 2: rank 0's store at 127.0.0.1:\d+ has not answered for 5 s, so .*", line)


def on_rank(rank, kind, name, action, monkeypatch):
    """Let one rank do something when it calls a function."""
    function = getattr(kind, name)

    def wrapped(*arguments, **named):
        if os.environ["RANK"] == str(rank):
            action()
        return function(*arguments, **named)

    monkeypatch.setattr(kind, name, wrapped)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_while_it_reads(here, monkeypatch, world, number):
    fault = Fault(world - 1, 0, number)
    on_rank(world - 1, corpus._ByteTokenizer, "encode_batch", fault.strike, monkeypatch)
    line = survivors(world, fault, "--lost-rank-timeout", "1")
    assert re.match(NAMED.format(rank=world - 1, world=world), line)


@pytest.mark.full
def test_a_rank_that_writes_a_trace_is_not_lost(here, monkeypatch):
    """The profiler holds Python's global lock, so that no other thread runs."""
    on_rank(0, torch.profiler.profile, "export_chrome_trace", lambda: ctypes.PyDLL(None).usleep(3_000_000), monkeypatch)
    flags = "--profile trace --profile-step-start 2 --profile-step-end 2 --lost-rank-timeout 1"
    assert train(2, *flags.split()) == [0, 0], lines("err", 2)
    assert [path.name for path in Path("trace").iterdir()] == ["steps-2-2.json"]


# Signals


@pytest.mark.parametrize(
    "engine, world, signalled, number, while_saving, more",
    [
        ("torch", 2, 1, signal.SIGTERM, False, []),
        full("torch", 1, 0, signal.SIGTERM, True, []),
        full("torch", 2, 0, signal.SIGTERM, True, []),
        full("torch", 3, 1, signal.SIGUSR1, False, ["--async-save"]),
        full("zero-3", 2, 1, signal.SIGTERM, False, []),
        full("megatron", 2, 1, signal.SIGTERM, False, []),
        *(full(engine, 2, 1, signal.SIGTERM, True, []) for engine in (*ZERO, "zero-3", "megatron")),
        *(full(engine, 3, 1, signal.SIGTERM, False, []) for engine in ("torch", *ZERO, "zero-3", "megatron")),
    ],
)
def test_a_signal_ends_a_run_with_a_last_checkpoint(flags_of, engine, world, signalled, number, while_saving, more):
    """One rank gets it, in step 4 or while that step's checkpoint is written; all ranks leave after it with status 0."""
    more = [*flags_of(engine), *more]
    with launched(world, [*TINY, *more], Fault(signalled, 4, number, while_saving)) as run:
        codes, _ = run.wait(*range(world))
    assert codes == [0] * world and lines("err", world) == []
    assert f"leaving after step 4, on {number.name}; --resume continues" in texts("out", world)[0]
    assert checkpoints() == ["step-000002", "step-000004"] and not Path("out/config.json").exists()
    assert train(world, "--resume", *more) == [0] * world
    assert_as_undisturbed(engine, world, *more)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_a_signal_while_a_checkpoint_is_written_in_the_background(here, monkeypatch, world):
    """Training has gone on meanwhile: the checkpoint under way and one of the step that has ended are both complete."""
    struck, is_awaited = threading.Event(), threading.Event()
    whole_step, wait = Trainer.step, BackgroundWriter.wait

    def strike(_):
        os.kill(os.getpid(), signal.SIGTERM)
        struck.set()
        assert is_awaited.wait(30)  # it is under way until the next one waits for it

    def step(self, batches, number):
        assert number < 4 or os.environ["RANK"] != "1" or struck.wait(30)
        return whole_step(self, batches, number)

    def awaited(self):
        if struck.is_set():
            is_awaited.set()
        wait(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", step)
        patched.setattr(BackgroundWriter, "wait", awaited)
        with launched(world, [*TINY, "--async-save"], Fault(1, 4, strike, while_saving=True)) as run:
            codes, _ = run.wait(*range(world))
    assert codes == [0] * world and lines("err", world) == []
    assert "leaving after step 5, on SIGTERM; --resume continues" in texts("out", world)[0]
    assert checkpoints() == ["step-000004", "step-000005"] and not Path("out/config.json").exists()
    assert train(world, "--async-save", "--resume") == [0] * world
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize(
    "engine, world, step, last",
    [("torch", 2, 3, 3), full("torch", 1, 4, 4), full("zero-3", 2, 3, 3), full("torch", 2, 6, 0)],
)
def test_a_signal_during_an_evaluation(flags_of, monkeypatch, engine, world, step, last):
    """It is abandoned after the batch, and the step's checkpoint is written; at its end, the run still writes the model."""
    more = [*flags_of(engine), "--valid-data-path", "text/a", "--eval-interval", str(step)]
    expected = undisturbed(engine, world, *more)
    forward = SequenceLoss.forward

    def interrupted(self, *batch):
        if not torch.is_grad_enabled() and os.environ["RANK"] == str(world - 1):
            with Path("windows").open("a") as file:
                file.write("window\n")
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *batch)

    monkeypatch.setattr(SequenceLoss, "forward", interrupted)
    assert train(world, *more) == [0] * world and lines("err", world) == []
    assert Path("windows").read_text() == "window\n"
    said = texts("out", world)[0]
    assert f"step {step:>5}/6  held-out not evaluated because of a signal" in said
    assert any(line.startswith("leaving after step") for line in said) == bool(last)
    assert checkpoints()[-1] == f"step-{step:06d}" and Path("out/config.json").exists() == (not last)
    monkeypatch.setattr(SequenceLoss, "forward", forward)
    assert train(world, *more, "--resume") == [0] * world
    ours = load_file("out/model.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected[1].items())


# The log


EVALUATED = ["--eval-interval", "2"]


def evaluations(path="log.jsonl"):
    return [
        (line["step"], line.get("held_out_nats_per_byte"))
        for line in map(json.loads, Path(path).read_text().splitlines())
    ]


@pytest.mark.full
@pytest.mark.parametrize("world, step", [(3, 6), (2, 4), (2, 6), (3, 4)])
def test_a_rank_is_killed_during_an_evaluation(here, monkeypatch, world, step):
    """The run that continues repeats the step and its evaluation, also after the last step: its log lacks neither."""
    assert train(world, *EVALUATED, "--out", "straight", "--log", "straight.jsonl") == [0] * world
    done = []

    def strike():
        done.append(2)
        if sum(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        on_rank(world - 1, Trainer, "evaluate", strike, patched)
        assert train(world, *EVALUATED) == [*[1] * (world - 1), -signal.SIGKILL]
    assert train(world, *EVALUATED, "--resume", "auto") == [0] * world
    assert evaluations() == evaluations("straight.jsonl")
    assert [number for number, nats in evaluations() if nats is not None] == [2, 4, 6]


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_log_that_cannot_be_written_for_a_while(here, monkeypatch, world):
    """The run that continues repeats the step whose line is missing."""
    write_line = Progress._write_line

    def full_at_step_4(self, line):
        if line["step"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_line(self, line)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "_write_line", full_at_step_4)
        assert train(world) == [1] * world
    assert lines("err", world) == ["pretrain.py: cannot write to --log log.jsonl: No space left on device"]
    assert train(world, "--resume") == [0] * world
    assert_as_undisturbed("torch", world)


# Steps that are not finite


def spoil_gradient(trainer):
    """Make one gradient of this rank infinite in the next backward pass."""
    parameter = trainer.model.layers[0].mixer.D
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.inf)[1])


@pytest.mark.full
@pytest.mark.parametrize("world, tp", [(2, 1), (2, 2), (3, 1)])
def test_a_step_that_is_not_finite_is_skipped_and_said(here, world, tp):
    with launched(world, [*TINY, "--tensor-model-parallel-size", str(tp)], Fault(world - 1, 3, spoil_gradient)) as run:
        codes, _ = run.wait(*range(world))
    assert codes == [0] * world and lines("err", world) == []
    assert any(
        re.fullmatch(r"step 3: loss \S+, gradient norm (inf|nan): skipped", line) for line in texts("out", world)[0]
    )
    logged = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "skipped" in line] == [3] and logged[2]["grad_norm"] is None
    assert all(math.isfinite(line["loss"]) for line in logged if line["step"] != 3)
    shutil.copytree("out", "straight")
    shutil.rmtree("out/checkpoints/step-000006")
    assert train(world, "--tensor-model-parallel-size", str(tp), "--resume") == [0] * world
    ours, theirs = (load_file(f"{out}/model.safetensors") for out in ("out", "straight"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# Disks


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    "engine, world, more",
    [
        ("torch", 2, []),
        full("torch", 2, ["--async-save"]),
        full("zero-3", 2, []),
        full("megatron", 2, []),
        *(full(engine, 3, ["--async-save"]) for engine in (*ZERO, "zero-3", "megatron")),
    ],
)
def test_a_full_disk_ends_a_run(flags_of, engine, world, more):
    """All ranks end with the same line, and what is complete stays."""
    more = [*flags_of(engine), *more, "--hidden-size", "128", "--save-interval", "1", "--keep", "9"]
    with small_disk("out", 8000):
        assert train(world, *more) == [1] * world
        (line,) = lines("err", world)
        *_, last = find_checkpoints("out/checkpoints")
        assert 1 < (step := step_of(last) + 1) < 6
        assert line == f"pretrain.py: cannot write out/checkpoints/step-{step:06d}: No space left on device"
        assert half_written("out/checkpoints") == []


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("streams", [(1,), (1, 2)])
def test_a_full_disk_under_what_rank_0_prints(here, world, streams):
    """A line on stderr says so, if it is not the same file; training goes on."""

    def redirect(trainer):
        for stream in streams:
            os.dup2(os.open("/dev/full", os.O_WRONLY), stream)

    assert train(world, fault=Fault(0, 4, redirect)) == [0] * world
    said = "cannot write to stdout: No space left on device; the run goes on without it"
    assert lines("err", world) == ([said] if streams == (1,) else [])
    assert [line.split()[1] for line in texts("out", world)[0] if line.startswith("step ")] == ["1/6", "2/6", "3/6"]
    assert_as_undisturbed("torch", world)


def folder_bytes(folder):
    """The bytes of the files in a folder and below."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


WIDE = ["--hidden-size", "128", "--save-interval", "0"]
COMPLETE = "the checkpoint of step 6 is complete: once the disk can be written, start again with --resume"


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("engine", [full("torch"), full("zero-3")])
def test_a_full_disk_when_the_model_is_written(flags_of, engine):
    """One line for all ranks, no part of the model, and --resume writes it once there is room."""
    more = [*flags_of(engine), *WIDE]
    assert train(2, *more, "--out", "straight") == [0, 0]
    checkpoint, model = folder_bytes("straight/checkpoints"), Path("straight/model.safetensors").stat().st_size
    with small_disk("out", int(checkpoint + 0.5 * model) // 1000):
        assert train(2, *more) == [1, 1]
        (line,) = lines("err", 2)
        assert re.fullmatch(rf"pretrain\.py: cannot save to out: .*No space left on device.*; {COMPLETE}", line), line
        assert os.listdir("out") == ["checkpoints"]
        shutil.copytree("out/checkpoints", "elsewhere/checkpoints")
    assert train(2, *more, "--out", "elsewhere", "--resume") == [0, 0]
    ours, theirs = (load_file(f"{out}/model.safetensors") for out in ("elsewhere", "straight"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.full
@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
def test_a_full_disk_when_adapters_are_written(here):
    assert train(2, *WIDE, "--out", "base") == [0, 0]
    lora = [*WIDE, "--init-from", "base", "--lora-rank", "4"]
    assert train(2, *lora, "--out", "straight") == [0, 0]
    with small_disk("out", folder_bytes("straight/checkpoints") // 1000):  # 1024 bytes each: a little more than those
        assert train(2, *lora) == [1, 1]
        (line,) = lines("err", 2)
        assert re.fullmatch(rf"pretrain\.py: cannot save to out: .*No space left on device.*; {COMPLETE}", line), line


@pytest.mark.full
@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("world, engine", [(2, "zero-3"), (3, "zero-1"), *((2, engine) for engine in ZERO)])
def test_a_full_disk_when_deepspeeds_checkpoint_is_written(flags_of, world, engine):
    """The one of before stays, and nothing of the new one."""
    more = [*flags_of(engine), *WIDE, "--save-deepspeed"]
    assert train(world, *more, "--out", "straight") == [0] * world
    checkpoint, own = folder_bytes("straight/checkpoints"), folder_bytes("straight/deepspeed")
    with small_disk("out", int(checkpoint + 0.5 * own) // 1000):
        Path("out/deepspeed").mkdir()
        Path("out/deepspeed/latest").write_text("before")
        assert train(world, *more) == [1] * world
        (line,) = lines("err", world)
        full = r"pretrain\.py: cannot write out/deepspeed: No space left on device( \(rank \d\))?"
        assert re.fullmatch(rf"{full}; {COMPLETE}", line), line
        assert sorted(os.listdir("out")) == ["checkpoints", "deepspeed"]
        assert os.listdir("out/deepspeed") == ["latest"]


def flip_bit(path, place):
    """Change one bit of a file; place: from 0 to 1."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


def replace_in(path, old, new):
    """Replace a text in a file."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "a bit of a shard": lambda path: flip_bit(max(path.glob("*.distcp")), 0.6),
    "a truncated shard": lambda path: os.truncate(max(path.glob("*.distcp")), 1000),
    "a bit of the metadata": lambda path: flip_bit(path / ".metadata", 0.5),
    "a digit of the description": lambda path: replace_in(path / "training.json", '_steps": 5', '_steps": 7'),
    "no description": lambda path: (path / "training.json").write_text(""),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "engine, world", [("torch", 1), *((engine, 2) for engine in ("torch", "megatron", "zero-3", *ZERO))]
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(flags_of, engine, world):
    """--resume auto says so, keeps the damaged one under another name, and ends as if nothing had happened."""
    flags = [*flags_of(engine), "--train-iters", "7"]
    more = [*flags, "--save-interval", "1", "--keep", "9"]
    assert train(world, *more, "--exit-interval", "6") == [0] * world
    for damage, path in zip(DAMAGES.values(), find_checkpoints("out/checkpoints")[1:], strict=True):
        damage(path)
    assert train(world, *more, "--resume") == [2] * world
    (line,) = lines("err", world)
    assert "out/checkpoints/step-000006/training.json is damaged" in line
    assert train(world, *more, "--resume", "auto") == [0] * world
    said = [line for line in lines("out", world) if "instead" in line]
    assert len(said) == 5 and all("is damaged" in line for line in said)
    for step, line in zip((6, 5, 4, 3, 2), said, strict=True):
        name = f"out/checkpoints/step-{step:06d}"
        assert f"{name}.damaged; resuming out/checkpoints/step-{step - 1:06d} instead" in line
        assert Path(f"{name}.damaged").is_dir()
    assert re.search(r"__\d_0\.distcp, bytes \d+ to \d+, has the CRC-32 \w{8}, not \w{8}; ", said[4])
    assert checkpoints() == [f"step-{step:06d}" for step in range(1, 8)]
    assert_as_undisturbed(engine, world, *flags)


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2))
def test_a_checkpoint_under_the_name_of_another_step(here, world):
    """--resume auto treats it as damaged. The one before must be of a run with the same settings."""
    assert train(world, "--exit-interval", "4") == [0] * world
    copy = shutil.copytree("out/checkpoints/step-000004", "out/checkpoints/step-000005")
    said = f"{copy} is damaged or of another model: {copy}/training.json is damaged: it records step 4, not step 5"
    assert train(world, "--resume", "auto", "--seed", "77") == [2] * world
    (line,) = lines("err", world)
    other = "cannot resume from out/checkpoints/step-000004: it has seed=1234, this run 77"
    assert said in line and line.endswith(other)
    Path(copy).rename("out/checkpoints/step-000009")  # after the last step of this run
    copy, said = (text.replace("step-000005", "step-000009").replace("step 5", "step 9") for text in (str(copy), said))
    assert train(world, "--resume", "auto") == [0] * world
    resumed = f"{said}; it is kept as {copy}.damaged; resuming out/checkpoints/step-000004 instead"
    assert resumed in lines("out", world) and Path(f"{copy}.damaged").is_dir()
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_a_checkpoint_without_a_description_is_ignored_and_said(here, world):
    assert train(world, "--exit-interval", "4") == [0] * world
    Path("out/checkpoints/step-000004/training.json").unlink()
    assert train(world, "--resume", "auto") == [0] * world
    said = "out/checkpoints/step-000004 has no training.json, so it is not a complete checkpoint; it is ignored"
    assert lines("out", world).count(said) == 1
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
@pytest.mark.parametrize("file", ("training.json", full(".metadata")))
def test_a_disk_that_cannot_be_read_ends_a_run(here, monkeypatch, world, file):
    """The newest checkpoint may be intact, so the run does not take the one before."""
    monkeypatch.setattr(disk, "WAITS", (0.1,))
    assert train(world, "--exit-interval", "4") == [0] * world
    (folder,) = Path("out/checkpoints").glob("*4")
    shutil.move(folder / file, "good")
    (folder / file).symlink_to("/proc/self/mem")  # its first bytes are not mapped: EIO
    assert train(world, "--resume", "auto") == [1] * world
    (line,) = lines("err", world)
    assert re.fullmatch(rf"pretrain\.py: cannot read {folder}\S*: Input/output error \(tried 2 times\)", line)
    shutil.move("good", folder / file)
    assert train(world, "--resume", "auto") == [0] * world
    assert any(line.endswith(f"resuming {folder}") for line in texts("out", world)[0])
    assert_as_undisturbed("torch", world)


@pytest.mark.full
def test_no_checkpoint_is_intact(here):
    """Then --resume auto does not begin anew."""
    assert train(1, "--exit-interval", "2") == [0]
    (path,) = find_checkpoints("out/checkpoints")
    flip_bit(path / "__0_0.distcp", 0.5)
    assert train(1, "--resume", "auto") == [2]
    (line,) = lines("err", 1)
    assert "CRC-32" in line and line.endswith(
        ": nothing to resume: out/checkpoints holds no checkpoint from before step 2"
    )
    assert checkpoints() == ["step-000002"]


@pytest.mark.full
def test_a_lack_of_memory_renames_no_checkpoint(here, monkeypatch):
    """It may be intact, so --resume auto ends with the cause."""

    def fail(*_):
        raise MemoryError

    assert train(1, "--exit-interval", "2") == [0]
    with monkeypatch.context() as patched:
        patched.setattr(ShardReader, "_slice_file", fail)
        assert train(1, "--resume", "auto") == [1]
    assert lines("err", 1) == ["pretrain.py: cannot read out/checkpoints/step-000002: MemoryError"]
    assert checkpoints() == ["step-000002"]


# Devices


@pytest.mark.full
@pytest.mark.parametrize(
    "world, device, ranks_with_cuda, gpus, message",
    [
        (2, "cuda", "0", 8, "--device cuda: torch finds no CUDA device (rank 1)"),
        (3, "cuda", "012", 2, "--device cuda: no GPU for local rank 2, torch finds 2 on this host (rank 2)"),
        (2, "", "1", 8, "arguments differ across ranks: rank 1 got device='cuda', rank 0 got device='cpu'"),
    ],
)
def test_devices_that_differ_between_ranks(here, monkeypatch, world, device, ranks_with_cuda, gpus, message):
    """Every rank ends at once with the same error, which rank 0 prints."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get("RANK", "none") in ranks_with_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert train(world, "--device", device) == [2] * world
    assert lines("err", world) == [f"pretrain.py: {message}"]


# Links


@pytest.mark.full
@pytest.mark.skipif(not namespaces_work(), reason="a network link that goes down needs root, ip and tc")
def test_a_link_that_goes_down(here):
    """That of rank 1: rank 0 names it, and rank 1, which cannot tell who is left, names the store that it cannot reach."""
    lab = f"faults-{os.getpid()}"
    netlab = [ROOT / "launch" / "netlab.sh"]
    environment = os.environ | {"NETLAB": lab}
    cut = ["ip", "netns", "exec", f"{lab}-bridge", "ip", "link", "set", "port1", "down"]
    subprocess.run([*netlab, "up", "2", "none"], env=environment, check=True, capture_output=True)
    try:
        fault = Fault(0, 3, lambda trainer: subprocess.run(cut, check=True))
        with launched(2, TINY, fault, lab=lab) as run:
            codes, seconds = run.wait(0, 1)
        assert codes == [1, 1]
        (ours,), (theirs,) = texts("err", 2)
        assert re.fullmatch(NAMED.format(rank=1, world=2) + "there was no sign of life for 5 s", ours)
        assert re.fullmatch(r"rank 1 of 2: rank 0's store at 10.77.0.1:\d+ has not answered for 5 s, so .*", theirs)
    finally:
        subprocess.run([*netlab, "down"], env=environment, check=True)


# Restarts


def restarted(folder, world, *more, step=4, number=signal.SIGKILL, **settings):
    """What the ranks print of a run in which rank 1 kills or stops itself once, and torchrun starts all again.

    step: in which it does so (0: before the first one, while it reads the text; -1: before it meets the others). settings:
    of torchrun.
    """

    def run():
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            fault = Fault(1, step, number)
            if step < 0:
                fault.strike()
            if step:
                inject(fault)
            else:
                corpus._ByteTokenizer.encode_batch = lambda *_, **__: fault.strike()
        options = parse_options([*TINY, *more])
        sys.exit(command_line.run("pretrain.py", lambda: pretraining.pretrain(options)))

    assert run_agent(run, world, folder, restarts=1, **settings), texts("err", world)
    if step > 0:  # before, torchrun may end the others first
        (line,) = lines("err", world)
        assert re.match(NAMED.format(rank=1, world=world), line)
    return "\n".join(lines("out", world))


@pytest.fixture
def agent_log(here):
    """The file with what torchrun's agent says of its ranks."""
    logger, handler = logging.getLogger("torch.multiprocessing.spawn"), logging.FileHandler("agent")
    logger.addHandler(handler)
    yield here / "agent"
    logger.removeHandler(handler)
    handler.close()


OWN = "torchrun has restarted the ranks: they continue from their own checkpoints"


@pytest.mark.parametrize(
    "world, number, resume",
    [
        (2, signal.SIGKILL, []),
        full(2, signal.SIGKILL, ["--resume", "auto"]),
        full(3, signal.SIGSTOP, ["--resume", "auto"]),
        full(2, signal.SIGSTOP, []),
        full(3, signal.SIGKILL, ["--resume", "auto"]),
    ],
)
def test_torchrun_restarts_a_run_that_continues_by_itself(here, agent_log, world, number, resume):
    """All ranks begin again after step 2, and end as if nothing had happened. torchrun itself has to kill none."""
    said = restarted(here, world, *resume, number=number)
    assert "forcefully exiting via SIGKILL" not in agent_log.read_text()
    assert "writing out" in said and "resuming out/checkpoints/step-000002" in said
    assert (OWN in said) == (not resume)
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 1])
def test_torchrun_restarts_a_run_that_had_not_begun(here, step):
    """It saved no checkpoint, and takes none of the run before it in the same folder."""
    assert train(2) == [0, 0]
    said = restarted(here, 2, step=step)
    assert "resuming" not in said and OWN not in said
    assert_as_undisturbed("torch", 2)


@pytest.mark.full
def test_torchrun_restarts_a_run_that_continues_from_a_folder(flags_of):
    """From its own checkpoint of step 4, and not from DeepSpeed's of step 2 once more."""
    zero = flags_of("zero-1")
    assert train(2, *zero, "--save-deepspeed", "--exit-interval", "2", "--out", "before") == [0, 0]
    folder = ["--resume", "before/deepspeed", *zero]
    said = restarted(Path.cwd(), 2, *folder, step=5)
    assert said.count("resuming before/deepspeed") == 1 and said.count("resuming out/checkpoints/step-000004") == 1
    assert OWN in said
    assert train(2, *folder, "--out", "straight") == [0, 0]
    ours, theirs = (load_file(f"{out}/model.safetensors") for out in ("out", "straight"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_torchrun_without_an_id_restarts_a_run(here, world):
    """All such runs have the id "none". A rank that ends before the others have met does not make the run continue an
    earlier one; a rank that ends later does make it continue itself.
    """
    assert OWN in restarted(here, world, run_id="none")
    first = (here / "out/checkpoints" / BEGUN).read_text()
    for path in here.glob("*-[012]"):
        path.unlink()
    said = restarted(here, world, step=-1, run_id="none")
    assert OWN not in said and "resuming" not in said and "overwriting out" in said
    assert len(first.splitlines()) == 1 and first != (here / "out/checkpoints" / BEGUN).read_text()
    assert_as_undisturbed("torch", world)


@pytest.mark.parametrize("world", [1, full(2)])
@pytest.mark.parametrize(
    "before, now", [("job_1", "job_2"), full("job_1", "other_2"), full("none_1", "none_1"), ("none_1", "none_2")]
)
def test_a_restart_that_torchrun_does_not_count(here, monkeypatch, world, before, now):
    """When nodes join or leave, it starts all ranks again under the same id. Runs without an id are all called "none";
    the folders of torchrun's logs tell them apart.
    """
    for run, more in ((before, ["--exit-interval", "4"]), (now, [])):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run.partition("_")[0])
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/logs/{run}/attempt_0/1/error.json")
        assert train(world, *more) == [0] * world
    is_own = before == now or before.startswith("job") and now.startswith("job")
    assert (OWN in lines("out", world)) == is_own == (not Path("out/checkpoints.old").exists())
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_a_restart_on_other_nodes(here, monkeypatch, world):
    """Each node has its own torchrun. One that remains is enough to recognize a run without an id."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    def on_nodes(*nodes):
        with monkeypatch.context() as patched:
            patched.setattr(saving, "logs_of_torchrun", lambda: f"torchrun on {nodes[int(os.environ['RANK'])]}")
            assert train(world, "--exit-interval", "2") == [0] * world, lines("err", world)
        return OWN in lines("out", world), Path("out/checkpoints", BEGUN).read_text().splitlines()

    first, second = ["a", "b", "c"][:world], ["d", "a", "e"][:world]
    assert on_nodes(*first) == (False, [f"torchrun on {node}" for node in first])
    assert on_nodes(*second) == (True, [f"torchrun on {node}" for node in sorted(second)])
    assert on_nodes(*["f", "g", "h"][:world])[0] is False


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("before, now", [("job", "other"), ("job", "job")])
def test_rank_0_alone_reads_and_removes_the_mark_of_a_run(here, monkeypatch, world, before, now):
    """For the other ranks, it may vanish between two of their calls."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", before)
    assert train(world, "--exit-interval", "4") == [0] * world
    is_file, read_text = Path.is_file, Path.read_text

    def is_seen(path):
        return is_file(path) or (path.name == BEGUN and os.environ["RANK"] != "0")

    def read(path, *arguments, **named):
        if path.name == BEGUN and os.environ["RANK"] != "0":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return read_text(path, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", is_seen)
        patched.setattr(Path, "read_text", read)
        patched.setenv("TORCHELASTIC_RUN_ID", now)
        assert train(world) == [0] * world, lines("err", world)
    assert (OWN in lines("out", world)) == (before == now)
    assert Path("out/checkpoints", BEGUN).read_text() == now


# Two runs in one directory


@pytest.mark.parametrize("world", [2, full(3)])
def test_a_second_run_in_the_same_directory(here, monkeypatch, world):
    """It ends at once with one line, and the first one ends as if nothing had happened."""
    os.mkfifo("has-begun")
    os.mkfifo("has-ended")
    begun = os.open("has-begun", os.O_RDONLY | os.O_NONBLOCK)

    def wait(trainer):
        Path("has-begun").write_text("yes")
        assert Path("has-ended").read_text() == "yes"

    with launched(world, TINY, Fault(0, 3, wait)) as run:
        assert select.select([begun], [], [], 60)[0]
        Path("second").mkdir()
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("second")
            assert train(world, "--data", f"{here}/text", "--out", f"{here}/out") == [1] * world
            line = f"pretrain.py: cannot begin in --out {here}/out: another run is writing to {here}/out"
            assert lines("err", world) == [line]
        Path("has-ended").write_text("yes")
        assert run.wait(*range(world))[0] == [0] * world
    assert_as_undisturbed("torch", world)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_restart_while_the_lock_of_a_lost_rank_0_remains(here, monkeypatch, world):
    """The file system may notice the loss of its machine later. The run goes on; another one does not begin, nor when
    torchrun restarts its ranks because of that.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert train(world, "--exit-interval", "4") == [0] * world
    lock = DirectoryLock(Path("out"))
    for run, restarts, code in (("other", 0, 1), ("other", 1, 1), ("job", 1, 0)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        assert train(world) == [code] * world
    lock.release()
    assert_as_undisturbed("torch", world)
