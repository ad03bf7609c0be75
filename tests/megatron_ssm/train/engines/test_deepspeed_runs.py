"""Whole runs of examples/pretrain.py in a DeepSpeed engine, and under its launcher. Oracle: the run with torch's engine."""

import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.cpp_extension import _get_build_directory

import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from benchmarks.support.launched import reserved_port
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain

ROOT = Path(__file__).resolve().parents[4]
SCRIPT, LAUNCHER = ROOT / "examples" / "pretrain.py", ROOT / "launch" / "deepspeed.sh"
TINY = """--num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 4 --log-interval 1 --device cpu --data text""".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with three documents in text/, and a configuration for each stage of ZeRO."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed").utils.logger.setLevel("ERROR")
    words = random.Random(0)
    Path("text").mkdir()
    for name in "abc":
        Path("text", name).write_text(" ".join(words.choice(("the", "state", "space")) for _ in range(100)))
    for stage in range(4):
        zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
        Path(f"zero-{stage}.json").write_text(json.dumps({"zero_optimization": zero}))


def flags(stage):
    """The engine's flags: `stage` of ZeRO, or torch."""
    return [] if stage == "torch" else ["--engine", "deepspeed", "--deepspeed-config", f"zero-{stage}.json"]


def train(ranks, count, out, stage, *more):
    """A run on forked ranks."""

    def run(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        pretrain(parse_options([*TINY, "--out", out, "--log", f"{out}.jsonl", *flags(stage), *more]))

    ranks(run, count)


def losses(out):
    return [json.loads(line)["loss"] for line in Path(f"{out}.jsonl").read_text().splitlines()]


def weights(out):
    return load_file(Path(out, "model.safetensors"))


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stages", [("torch", 3, 1), pytest.param((2, "torch", 0), marks=pytest.mark.full)])
def test_a_run_goes_on_in_other_engines(ranks, tp, dp, stages):
    """The losses and the model are those of a run with torch's engine; --resume starts where the engine before stopped."""
    for step, stage in enumerate(stages, 1):
        leave = [] if step == 3 else ["--exit-interval", str(step), "--async-save"]
        resume = ["--resume"] if step > 1 else []
        train(ranks, tp * dp, "out", stage, "--tensor-model-parallel-size", str(tp), *leave, *resume)
    train(ranks, tp * dp, "alone", "torch", "--tensor-model-parallel-size", str(tp))
    assert losses("out") == pytest.approx(losses("alone"), abs=1e-5) and len(losses("out")) == 4
    for name, tensor in weights("alone").items():
        assert (weights("out")[name] - tensor).abs().max() <= 1e-4  # of a learning rate of 3e-3


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2)])
@pytest.mark.parametrize("stage", [0, 1])
def test_sparse_gradients_are_resumed(ranks, tp, dp, stage):
    """Bitwise, with the gradients that have not been sent. Torch's engine takes these too, and so do dense runs."""
    sparse = ["--gradient-mode", "layerwise", "--gradient-density", "0.05", "--train-iters", "9"]
    sparse += ["--tensor-model-parallel-size", str(tp)]
    train(ranks, tp * dp, "straight", stage, *sparse)
    train(ranks, tp * dp, "out", stage, *sparse, "--exit-interval", "7")
    assert len([*Path("out").glob("checkpoints/*7/pending-tensor-*.pt")]) == tp * dp
    shutil.copytree("out", "elsewhere")
    train(ranks, tp * dp, "out", stage, *sparse, "--resume")
    for name, tensor in weights("straight").items():
        assert torch.equal(weights("out")[name], tensor)
    last, dense = {}, ["--gradient-mode", "dense"]
    for engine, more in (("torch", []), ("torch", dense), (2 * stage, dense)):
        shutil.copytree("elsewhere", "again")
        train(ranks, tp * dp, "again", engine, *sparse, "--resume", *more)
        last[engine, bool(more)] = losses("again")[-1]
        shutil.rmtree("again")
    assert last["torch", False] == pytest.approx(losses("straight")[-1], abs=0.2)
    assert last["torch", True] == pytest.approx(last[2 * stage, True], abs=1e-5)
    assert last["torch", True] != pytest.approx(losses("straight")[-1], abs=1e-4)


def test_configurations_that_differ_between_ranks(ranks, world=2):
    """The file may lie elsewhere on each machine; what is in it is compared before anything is made."""

    def run(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        stage = 2 if rank == world - 1 else 1
        with pytest.raises(ValueError) as error:
            pretrain(parse_options([*TINY, "--global-batch-size", "6", "--out", "out", *flags(stage)]))
        return str(error.value)

    found = ranks(run, world)
    assert len(set(found)) == 1 and f"arguments differ across ranks: rank {world - 1} got " in found[0]


def old_version():
    sys.modules["deepspeed"].__version__ = "0.19.0"


def another_accelerator():
    sys.modules["deepspeed"].accelerator.get_accelerator = lambda: SimpleNamespace(device_name=lambda: "cuda")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (old_version, r"--engine deepspeed needs DeepSpeed \S+ or later, not 0.19.0"),
        (another_accelerator, r"DeepSpeed works on cuda \(DS_ACCELERATOR\), the model is on cpu"),
    ],
)
def test_a_deepspeed_that_one_rank_cannot_use(ranks, spoil, message, world=2):
    """All ranks end with its error, before they make anything."""

    def run(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        if rank == world - 1:
            spoil()
        with pytest.raises(ValueError) as error:
            pretrain(parse_options([*TINY, "--global-batch-size", "6", "--out", "out", *flags(1)]))
        return str(error.value)

    found = ranks(run, world, timeout=30)
    assert len(set(found)) == 1 and re.fullmatch(rf"{message} \(rank {world - 1}\)", found[0])


# Under launchers


def launched(monkeypatch, *command):
    """A command's result, and that it neither took the lock of a killed build of DeepSpeed's extension nor waited for it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(Path("extensions").resolve()))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    lock = Path(_get_build_directory("deepspeed_shm_comm", False), "lock")
    lock.touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert [path for path in Path("extensions").resolve().rglob("*") if path.is_file()] == [lock]
    return done


def under_deepspeed(monkeypatch, *arguments):
    """The result of the script with these arguments on two ranks of DeepSpeed's launcher."""
    with reserved_port() as port:
        command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(port), SCRIPT]
        return launched(monkeypatch, *command, *arguments)


@pytest.mark.full
def test_under_the_deepspeed_launcher(monkeypatch):
    """Two tensor-parallel ranks, with ZeRO 2."""
    more = ["--out", "out", "--log", "out.jsonl", "--tensor-model-parallel-size", "2"]
    done = under_deepspeed(monkeypatch, *TINY, *flags(2), *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 tensor x 1 data-parallel ranks" in done.stdout and "saved out\n" in done.stdout
    pretrain(parse_options([*TINY, "--out", "alone", "--log", "alone.jsonl"]))
    assert losses("out") == pytest.approx(losses("alone"), abs=1e-5)


def terminated(signal_number, is_ready, *options):
    """The exit code of launch/deepspeed.sh, and what it prints, after a signal once `is_ready(line)` of a line of stdout."""
    process = subprocess.Popen([LAUNCHER, "2", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = [next(line for line in process.stdout if is_ready(line))]
        process.send_signal(signal_number)
        said += process.communicate(timeout=100)[0].splitlines()
        return process.returncode, said
    finally:
        process.kill()


@pytest.fixture
def orphans_stay():
    """Orphans become this process's children, as in a container whose first process does not collect them."""
    prctl, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None).prctl, 36
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_script_passes_signals_on(monkeypatch, orphans_stay, number):
    """It waits for the ranks, while the launcher ends at once; here both are small scripts."""
    rank = f"""import signal, sys
signal.signal({int(number)}, lambda *_: sys.exit("rank has saved"))
print("ready", flush=True)
signal.pause()
"""
    Path("bin").mkdir()
    Path("bin/rank.py").write_text(rank)
    Path("bin/deepspeed").write_text(f"#!/bin/bash\n{sys.executable} bin/rank.py &\nwait\n")
    Path("bin/deepspeed").chmod(0o755)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    code, said = terminated(number, lambda line: line == "ready\n")
    assert (code, said) == (128 + number, ["ready\n", "rank has saved"])


def test_the_script_passes_on_a_signal_that_comes_at_once(monkeypatch):
    """Just after it has started the launcher, whose number it does not know yet."""
    Path("bin").mkdir()
    Path("bin/deepspeed").write_text("#!/bin/bash\nexec sleep 60\n")
    Path("bin/deepspeed").chmod(0o755)
    Path("signals").write_text("trap '[[ $BASH_COMMAND != launcher=*! ]] || kill -TERM $$' DEBUG\n")
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    monkeypatch.setenv("BASH_ENV", "signals")  # bash reads it before the script
    done = subprocess.run([LAUNCHER, "2"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


@pytest.mark.full
def test_a_signal_under_the_deepspeed_launcher(monkeypatch):
    """All ranks write a last checkpoint before the script ends."""
    more = ["--out", "out", "--train-iters", "100000", "--save-interval", "0", *flags(2)]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    code, said = terminated(signal.SIGTERM, lambda line: line.startswith("step "), *TINY, *more)
    assert code == 128 + signal.SIGTERM
    assert any(re.match("leaving after step .*, on SIGTERM", line) for line in said), said
    assert len([*Path("out/checkpoints").glob("step-*/training.json")]) == 1


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "alone"])
def test_without_the_deepspeed_launcher(monkeypatch, launcher):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    run = run if launcher == "torchrun" else [sys.executable]
    done = launched(monkeypatch, *run, SCRIPT, *TINY, "--out", "out", "--log", "out.jsonl", *flags(3))
    assert (done.returncode, done.stderr) == (0, "")
    pretrain(parse_options([*TINY, "--out", "alone", "--log", "alone.jsonl"]))
    assert losses("out") == pytest.approx(losses("alone"), abs=1e-5)


@pytest.mark.full
def test_an_error_under_the_deepspeed_launcher(monkeypatch):
    """One line, and the exit code 2."""
    Path("zero-1.json").write_text('{"train_batch_size": 5}')
    done = under_deepspeed(monkeypatch, *TINY, "--out", "out", *flags(1))
    assert done.returncode == 2
    line = "pretrain.py: zero-1.json: train_batch_size 5 contradicts --global-batch-size 4\n"
    assert line in done.stderr and "Traceback" not in done.stderr
