"""Faults of real processes, links and files in a run. Oracles: an undisturbed run, exit codes, the rank that is at fault."""

import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from benchmarks.support.launched import TINY, Fault, inject, launched, lines, namespaces_work, texts, write_text
from megatron_ssm.checkpoints.folders import find_checkpoints, half_written
from megatron_ssm.training.options import parse_options
from megatron_ssm.training.pretraining import pretrain
from ranks import run_agent
from sparsefusion.foundation import command_line

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two documents in text/."""
    monkeypatch.chdir(tmp_path)
    write_text()
    return tmp_path


def train(world, *more, fault=None):
    """(exit codes, seconds since the fault) of a run that ends by itself."""
    with launched(world, [*TINY, *more], fault) as run:
        return run.wait(*range(world))


def losses(path="log.jsonl"):
    return [(line["step"], line["loss"]) for line in map(json.loads, Path(path).read_text().splitlines())]


def checkpoints():
    return [path.name for path in find_checkpoints("out/checkpoints")]


@functools.cache
def undisturbed(world, *more):
    """(losses, weights) of a run in which nothing happens; all tests have the same text."""
    assert train(world, "--out", "straight", "--log", "straight.jsonl", *more)[0] == [0] * world
    return torch.tensor(losses("straight.jsonl")), load_file("straight/model.safetensors")


def assert_as_undisturbed(world, *more):
    """The log and the model are those of a run in which nothing happened.

    They are bitwise equal on two ranks. On more, DDP's first step after a start sums in another order than later steps.
    """
    expected, theirs = undisturbed(world, *more)
    limit = 0 if world == 2 else 1e-10
    assert torch.tensor(losses()).sub(expected).abs().max() <= limit
    ours = load_file("out/model.safetensors")
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= limit


# Ranks that end, or hang


def survivors(world, fault, *more):
    """The one line of the ranks that are left when a fault has ended or stopped one of them, and the seconds it took."""
    others = [rank for rank in range(world) if rank != fault.rank]
    with launched(world, [*TINY, *more], fault) as run:
        codes, seconds = run.wait(*others)
        assert codes == [1] * len(others)
    assert texts("err", world)[fault.rank] == []
    (line,) = [line for line in lines("err", world)]
    return line, seconds


NAMED = r"rank {rank} of {world} \(process \d+ on \S+\) has ended, hangs or cannot be reached: "


@pytest.mark.parametrize(
    "world, while_saving, more",
    [
        pytest.param(2, False, [], marks=pytest.mark.full),
        pytest.param(3, False, [], marks=pytest.mark.full),
        (2, False, ["--tensor-model-parallel-size", "2"]),
        (2, True, []),
        (3, True, ["--async-save"]),
    ],
)
def test_a_killed_rank_is_named(here, world, while_saving, more):
    """Afterwards --resume auto continues from the last complete checkpoint, and removes what is half-written."""
    line, _ = survivors(world, Fault(1, 4, signal.SIGKILL, while_saving), *more)
    assert re.match(NAMED.format(rank=1, world=world) + "(?!there was no sign of life)", line)
    assert checkpoints() == ["step-000002"]
    assert train(world, "--resume", "auto", *more)[0] == [0] * world
    assert half_written("out/checkpoints") == []
    assert_as_undisturbed(world, *more)


def test_rank_0_is_killed(here):
    """The store in which the ranks met ends with it."""
    line, _ = survivors(2, Fault(0, 4, signal.SIGKILL))
    assert re.match(r"rank 1 of 2: rank 0's store at 127.0.0.1:\d+ has ended: .", line)


def fail(trainer):
    raise RuntimeError("a bug")


def test_a_rank_that_fails_is_named(here):
    """It ends with its traceback; the other one says which rank has ended."""
    with launched(2, TINY, Fault(1, 4, fail)) as run:
        assert run.wait(0, 1)[0] == [1, 1]
    (line,), trace = texts("err", 2)
    assert re.match(NAMED.format(rank=1, world=2), line)
    assert trace[0] == "pretrain.py: rank 1 failed" and trace[-1] == "RuntimeError: a bug"


@pytest.mark.parametrize("world, tp, rank", [(2, 1, 1), (3, 1, 2), (2, 2, 1)])
def test_a_stopped_rank_is_named(here, world, tp, rank):
    line, _ = survivors(world, Fault(rank, 3, signal.SIGSTOP), "--tensor-model-parallel-size", str(tp))
    assert re.fullmatch(NAMED.format(rank=rank, world=world) + "there was no sign of life for 2.5 s", line)


def test_rank_0_is_stopped(here):
    line, _ = survivors(2, Fault(0, 3, signal.SIGSTOP))
    assert re.fullmatch(r"rank 1 of 2: rank 0's store at 127.0.0.1:\d+ has not answered for 2.5 s: so .*", line)


# Signals


@pytest.mark.parametrize(
    "world, signalled, number, while_saving, more",
    [
        (1, 0, signal.SIGTERM, True, []),
        (2, 1, signal.SIGTERM, False, []),
        pytest.param(2, 0, signal.SIGTERM, True, [], marks=pytest.mark.full),
        (3, 1, signal.SIGUSR1, False, ["--async-save"]),
    ],
)
def test_a_signal_ends_a_run_with_a_last_checkpoint(here, world, signalled, number, while_saving, more):
    """One rank gets it, in step 4 or while that step's checkpoint is written; all ranks leave after it with status 0."""
    with launched(world, [*TINY, *more], Fault(signalled, 4, number, while_saving)) as run:
        codes, _ = run.wait(*range(world))
    assert codes == [0] * world and lines("err", world) == []
    assert f"leaving after step 4, on {number.name}; --resume continues" in texts("out", world)[0]
    assert checkpoints() == ["step-000002", "step-000004"] and not Path("out/config.json").exists()
    assert train(world, "--resume", *more)[0] == [0] * world
    assert_as_undisturbed(world, *more)


# Steps that are not finite


def spoil_gradient(trainer):
    """Make one gradient of this rank infinite in the next backward pass."""
    parameter = trainer.model.layers[0].mixer.D
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.inf)[1])


@pytest.mark.parametrize("world, tp", [pytest.param(2, 1, marks=pytest.mark.full), (2, 2), (3, 1)])
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
    assert train(world, "--tensor-model-parallel-size", str(tp), "--resume")[0] == [0] * world
    ours, theirs = (load_file(f"{out}/model.safetensors") for out in ("out", "straight"))
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= (0 if world == 2 else 1e-10)


# Disks


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
@pytest.mark.parametrize("more", ([], ["--async-save"]))
def test_a_full_disk_ends_a_run(here, world, more):
    """All ranks end with the same cause, and what is complete stays."""
    Path("out").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", "out"]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        codes, _ = train(world, "--hidden-size", "32", "--keep", "9", "--save-interval", "1", *more)
        assert codes == [1] * world
        (line,) = lines("err", world)
        step = len(checkpoints()) + 1
        assert 1 < step < 6
        full = r"the disk is full \(No space left on device\): the checkpoint needs 0\.\d MB, and 0\.\d MB were free"
        assert re.fullmatch(rf"pretrain\.py: cannot write out/checkpoints/step-{step:06d}: {full}", line)
        assert half_written("out/checkpoints") == []
    finally:
        subprocess.run(["umount", "out"], check=True)


def flip_bit(path, place):
    """Change one bit of a file; place: from 0 to 1."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit of a shard": lambda path: flip_bit(max(path.glob("*.distcp")), 0.6),
    "a truncated shard": lambda path: os.truncate(max(path.glob("*.distcp")), 1000),
    "a bit of the metadata": lambda path: flip_bit(path / ".metadata", 0.5),
    "no description": lambda path: (path / "training.json").write_text(""),
}


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_a_damaged_checkpoint_falls_back_to_the_one_before(here, world):
    """--resume auto says so, keeps the damaged one under another name, and ends as if nothing had happened."""
    assert train(world, "--exit-interval", "5", "--save-interval", "1", "--keep", "9")[0] == [0] * world
    for damage, path in zip(DAMAGES.values(), find_checkpoints("out/checkpoints")[1:], strict=True):
        damage(path)
    assert train(world, "--resume")[0] == [2] * world
    (line,) = lines("err", world)
    assert "out/checkpoints/step-000005/training.json is not a checkpoint's" in line
    assert train(world, "--resume", "auto", "--save-interval", "1", "--keep", "9")[0] == [0] * world
    said = [line for line in lines("out", world) if "instead" in line]
    assert len(said) == 4 and all("is damaged" in line for line in said)
    for step, line in zip((5, 4, 3, 2), said, strict=True):
        name = f"out/checkpoints/step-{step:06d}"
        assert f"{name}.damaged; resuming out/checkpoints/step-{step - 1:06d} instead" in line
        assert Path(f"{name}.damaged").is_dir()
    assert re.search(r"__\d_0\.distcp, bytes \d+ to \d+, has the CRC-32 \w{8}, not \w{8}; ", said[3])
    assert checkpoints() == [f"step-{step:06d}" for step in range(1, 7)]
    assert_as_undisturbed(world)


def test_no_checkpoint_is_intact(here):
    """Then --resume auto does not begin anew."""
    assert train(1, "--exit-interval", "2")[0] == [0]
    (path,) = find_checkpoints("out/checkpoints")
    flip_bit(path / "__0_0.distcp", 0.5)
    assert train(1, "--resume", "auto")[0] == [2]
    (line,) = lines("err", 1)
    assert "CRC-32" in line and line.endswith(
        ": nothing to resume: out/checkpoints holds no checkpoint from before step 2"
    )
    assert checkpoints() == ["step-000002"]


# Links


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
        assert re.fullmatch(NAMED.format(rank=1, world=2) + "there was no sign of life for 2.5 s", ours)
        assert re.fullmatch(r"rank 1 of 2: rank 0's store at 10.77.0.1:\d+ has not answered for 2.5 s: so .*", theirs)
    finally:
        subprocess.run([*netlab, "down"], env=environment, check=True)


# Restarts


def test_torchrun_restarts_a_run_that_continues_by_itself(here):
    """Rank 1 kills itself once in step 4. Both ranks begin again after step 2, and end as if nothing had happened."""

    def run():
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            inject(Fault(1, 4, signal.SIGKILL))
        sys.exit(command_line.run("pretrain.py", lambda: pretrain(parse_options([*TINY, "--resume", "auto"]))))

    assert run_agent(run, 2, here, restarts=1), texts("err", 2)
    said = "\n".join(lines("out", 2))
    assert "writing out" in said and "resuming out/checkpoints/step-000002" in said
    (line,) = lines("err", 2)
    assert re.match(NAMED.format(rank=1, world=2), line)
    assert_as_undisturbed(2)
