"""Inputs and outputs that fail, or differ, on one rank of a training run. Oracle: every rank raises the same error."""

import os
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

import tiny
from commfabric.foundation.command_line import Failure
from megatron_ssm.model.model import Model
from megatron_ssm.train import run_inputs
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pending_gradients import PendingFile, read_pending
from megatron_ssm.train.pretraining import pretrain
from megatron_ssm.train.progress import Progress
from megatron_ssm.train.run_inputs import read_on_all_ranks
from megatron_ssm.train.trainer import Trainer
from serving import attempt

TINY = """--num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 6 --train-iters 2 --log-interval 1 --device cpu --out out""".split()


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A working directory with two documents in text/."""
    monkeypatch.chdir(tmp_path)
    words = random.Random(0)
    Path("text").mkdir()
    for name in "ab":
        Path("text", name).write_text(" ".join(words.choice(("the", "state", "space")) for _ in range(60)))


def errors(ranks, world_size, arguments_of_rank):
    """Each rank's error message (None: no error) of a run with the arguments that `arguments_of_rank(rank)` adds."""

    def run(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        try:
            pretrain(parse_options(["--data", "text", *TINY, *arguments_of_rank(rank)]))
        except (ValueError, FileNotFoundError, Failure) as error:
            return str(error)
        return None

    return ranks(run, world_size)


def latin():
    Path("latin").write_bytes(b"caf\xe9")


def empty_folder():
    Path("empty").mkdir()


def nothing():
    pass


@pytest.mark.parametrize(
    "prepare, arguments, message",
    [
        (nothing, ["--data", "none"], "cannot read none: No such file or directory"),
        (latin, ["--data", "latin"], "latin is not UTF-8: byte 0xe9 at byte offset 3"),
        (empty_folder, ["--valid-data-path", "empty"], "no text in empty"),
        (nothing, ["--tokenizer-model", "none"], "no tokenizer: none/tokenizer.json does not exist"),
        (nothing, ["--log", "text"], "cannot write to --log text: Is a directory"),
        (nothing, ["--out", "text/a"], "cannot write to --out text/a: File exists"),
        (nothing, ["--resume"], "nothing to resume: out/checkpoints holds no checkpoint"),
    ],
)
def test_what_one_rank_cannot_read_or_write(ranks, text, prepare, arguments, message, world_size=2):
    prepare()
    last = world_size - 1
    found = errors(ranks, world_size, lambda rank: arguments if rank == last else [])
    assert found == [f"{message} (rank {last})"] * world_size


def other_text():
    Path("other").mkdir()
    for name in "ab":
        Path("other", name).write_text(Path("text", name).read_text().replace("state", "spate"))


def other_held_out_text():
    """Texts of one and of nine windows."""
    Path("short").write_text("a" * 17)
    Path("long").write_text("a" * 150)


@pytest.mark.parametrize(
    "prepare, first, last",
    [
        (other_text, [], ["--data", "other"]),
        (other_held_out_text, ["--valid-data-path", "short"], ["--valid-data-path", "long"]),
        (nothing, ["--eval-interval", "0"], ["--eval-interval", "1"]),
        (nothing, ["--lr", "1e-3"], ["--lr", "1e-2"]),
    ],
)
def test_inputs_that_differ_between_ranks(ranks, text, prepare, first, last, world_size=2):
    prepare()
    found = errors(ranks, world_size, lambda rank: last if rank == world_size - 1 else first)
    assert len(set(found)) == 1 and f"arguments differ across ranks: rank {world_size - 1} got " in found[0]


class Cuda(str):
    """The name of the CPU for torch, and a CUDA device for what asks for its type."""

    type = "cuda"


def test_optimizers_that_differ_between_ranks(ranks, text, monkeypatch, world_size=2):
    """One rank has no FusedAdam installed. It matters only where FusedAdam is used."""
    last = world_size - 1

    def run(rank):
        name = "torch" if rank == last else "transformer-engine 2.0"
        monkeypatch.setattr(run_inputs, "adamw_on_cuda", lambda dtype: (name, ""))
        options = parse_options(["--data", "text", *TINY])
        devices = Cuda("cpu"), torch.device("cpu")
        return [attempt(read_on_all_ranks, options, device) for device in devices]

    for differs, same in ranks(run, world_size):
        assert differs[0] == "ValueError" and same is None
        assert f"rank {last} got optimizer='torch', rank 0 got optimizer='transformer-engine 2.0'" in differs[1]


@pytest.mark.parametrize("tensor, world_size", [(3, 3), (2, 4)])
def test_errors_of_all_ranks_are_raised_as_they_are(ranks, text, tensor, world_size):
    flags = ["--tensor-model-parallel-size", str(tensor), "--mamba-head-dim", "32", "--global-batch-size", "4"]
    message = f"1 heads do not divide over {tensor} tensor-parallel ranks (1 % {tensor} = 1)"
    assert errors(ranks, world_size, lambda rank: flags) == [message] * world_size


@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.full)))
def test_sequences_too_short_for_the_context_ranks_keep_old_checkpoints(ranks, text, world_size):
    assert errors(ranks, world_size, lambda rank: ["--global-batch-size", "4"]) == [None] * world_size
    flags = ["--context-parallel-size", str(world_size), "--seq-length", str(4 * world_size)]
    message = f"{4 * world_size} tokens over {world_size} context ranks make blocks of 2, shorter than"
    for error in errors(ranks, world_size, lambda rank: flags):
        assert message in error
    assert os.listdir("out/checkpoints") == ["step-000002"]


@pytest.mark.parametrize("name", ["out/checkpoints", "out/checkpoints/global_step1", "out/checkpoints.old", "link"])
def test_a_folder_of_deepspeeds_that_the_run_would_rename(ranks, text, name, world_size=2):
    """It is refused before anything is written, so the second start of the run still finds it."""
    Path("link").symlink_to("out/checkpoints")
    folder = Path(name.replace("link", "out/checkpoints"))
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").touch()
    place = "out/checkpoints.old" if name.endswith("old") else "out/checkpoints"
    message = f"--resume {name} is in {place}, which this run renames or removes; move it elsewhere"
    assert errors(ranks, world_size, lambda rank: ["--resume", name]) == [message] * world_size


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_log_that_rank_0_cannot_write(ranks, text, world_size=2):
    """/dev/full can be opened, but not written to."""
    found = errors(ranks, world_size, lambda rank: ["--log", "/dev/full"])
    assert found == ["cannot write to --log /dev/full: No space left on device"] * world_size


def test_a_tokenizer_that_rank_0_cannot_write(ranks, text, world_size=2):
    Path("out/tokenizer_config.json").mkdir(parents=True)
    found = errors(ranks, world_size, lambda rank: [])
    assert len(set(found)) == 1 and found[0].startswith("cannot write the tokenizer to out: ")


@pytest.mark.parametrize(
    "line", ['{"step": "x"}', '{"step": null}', '{"step": 1, "lo', "[" * 100_000, '{"step": "\xff']
)
def test_a_resumed_run_drops_damaged_lines_of_the_log(text, line):
    def run(*more):
        pretrain(parse_options(["--data", "text", *TINY, "--log", "log", *more]))

    run("--exit-interval", "1")
    with open("log", "a", encoding="latin-1") as log:
        log.write(line + "\n")
    run("--resume")
    lines = Path("log").read_text().splitlines()
    assert len(lines) == 2 and '"step": 1,' in lines[0] and '"step": 2,' in lines[1]


def test_a_resumed_run_that_ends_at_once_keeps_the_log(text):
    """The lines of earlier steps are in the file before this run has logged a step."""
    options = parse_options(["--data", "text", *TINY, "--log", "log", "--exit-interval", "1"])
    pretrain(options)
    before = Path("log").read_text()
    progress = Progress(options)
    progress.begin(1, samples=4)
    assert before.startswith('{"step": 1,') and Path("log").read_text() == before
    progress.close()


def test_the_model_is_closed_if_training_fails(text, monkeypatch):
    """Its ranks' shared memory and its CUDA graphs are released before the process groups are destroyed."""
    calls = []

    def fail(*_):
        raise Failure("stop")

    monkeypatch.setattr(Trainer, "step", fail)
    monkeypatch.setattr(Model, "close", lambda self: calls.append("close"))
    monkeypatch.setattr("megatron_ssm.train.pretraining.shut_down", lambda: calls.append("shut down"))
    with pytest.raises(Failure, match="^stop$"):
        pretrain(parse_options(["--data", "text", *TINY]))
    assert calls == ["close", "shut down"]


def test_an_empty_tokenizer(text):
    Path("empty").mkdir()
    Tokenizer(models.BPE()).save("empty/tokenizer.json")
    with pytest.raises(ValueError, match="^empty names no eos_token in tokenizer_config.json"):
        pretrain(parse_options(["--data", "text", *TINY, "--tokenizer-model", "empty"]))


def test_gradients_saved_on_another_gpu(ranks, text, monkeypatch, world_size=2):
    """A file of residuals from a rank with CUDA names its GPU; a rank without that GPU reads the file all the same."""

    def on_gpu(rank):
        trainer = tiny.trainer_on(1, trainer_options)
        tiny.curve(trainer, 9)  # the first steps are dense, and are profiled
        assert trainer.fusion.state_dict()["residuals"]
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: f"cuda:{rank}")
            PendingFile.of(trainer).write(Path("out"))

    trainer_options = tiny.options(gradient_mode="layerwise", gradient_density=0.05, global_batch_size=2 * world_size)
    Path("out").mkdir()
    ranks(on_gpu, world_size)
    assert len(list(Path("out").glob("pending-*.pt"))) == world_size
    ranks(lambda rank: read_pending(Path("out"), tiny.trainer_on(1, trainer_options)), world_size)
    read_pending(Path("out"), tiny.trainer(trainer_options))
