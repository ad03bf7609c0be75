"""What people watch. Oracles: torch's FLOP counter, TensorBoard's reader, the run's own log, a trace in JSON."""

import importlib.util
import json
import math
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from benchmarks.support.launched import TINY, Fault, disks_work, fill_disk, launched, lines, small_disk, write_text
from commfabric.foundation.command_line import run
from megatron_ssm import families
from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.shards import ShardWriter
from megatron_ssm.model.adapters import add_lora
from megatron_ssm.model.flops import forward_flops, known_peak, matrix_elements, training_flops
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain
from megatron_ssm.train.saving import BackgroundWriter

MODELS = {
    "mamba": dict(model_type="mamba"),
    "falcon_mamba": dict(model_type="falcon_mamba", untie_embeddings_and_output_weights=True),
    "mamba2": dict(mamba_num_groups=2),
    "zamba": tiny.ZAMBA,
    "zamba2": dict(tiny.ZAMBA2, num_layers=3, shared_blocks=2),
    "zamba2 untied": tiny.ZAMBA2_UNTIED,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text()


# Floating-point operations


@pytest.mark.parametrize("model", MODELS)
def test_the_matrix_products_are_those_that_torch_counts(model):
    """Products with matrices, in forward and backward; the scan's and attention's own are counted by other operators."""
    trainer = tiny.trainer(tiny.options(**MODELS[model]))
    inputs, labels = tiny.batches(trainer.options).batch(0)
    counted = []
    with FlopCounterMode(display=False) as counter:
        loss = trainer.loss(inputs, labels)
    counted.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counted.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    products = 2 * matrix_elements(trainer.model.config) * inputs.numel()
    assert counted == [products, 2 * products]


@pytest.mark.parametrize("targets", [("in_proj",), ("in_proj", "out_proj")])
def test_the_products_of_a_step_with_adapters(targets):
    """Frozen matrices have no gradients of weights. Torch computes no gradient of the first layer's input."""
    trainer = tiny.trainer(tiny.options(mamba_num_groups=2))
    model, (inputs, labels) = trainer.model, tiny.batches(trainer.options).batch(0)
    add_lora(model, 2, 4.0, targets)
    with FlopCounterMode(display=False) as counter:
        trainer.loss(inputs, labels).backward()
    found = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    parameters = dict(model.named_parameters())
    adapters = sum(p.numel() for name, p in parameters.items() if ".lora." in name)
    first = sum(p.numel() for name, p in parameters.items() if name.startswith("layers.0.mixer.in_proj.weight"))
    first += sum(p.numel() for name, p in parameters.items() if name.startswith("layers.0.mixer.lora.in_proj.down"))
    config = model.config
    rest = 3 * (forward_flops(config, 12) - 2 * matrix_elements(config))
    assert found == (training_flops(config, 12, adapters) - rest - 2 * first) * inputs.numel()


def test_attention_against_torch():
    """The rest of the formula for a hybrid: the scan's 7 operations, and products that torch counts."""
    config = tiny.trainer(tiny.options(**tiny.ZAMBA2)).model.config
    attended, mixer, seq = config.attentions[0], config.recurrences[0], 12
    q = torch.zeros(1, attended.heads, seq, attended.head_dim)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    attention = len(config.attentions) * counter.get_total_flops() / seq
    scan = 7 * config.num_layers * mixer.heads * mixer.head_dim * mixer.state
    assert forward_flops(config, seq) == 2 * matrix_elements(config) + scan + attention


def test_the_published_model_needs_about_6_per_parameter():
    """Kaplan's rule, for a model whose sequences are short."""
    config = families.read(Path(__file__).resolve().parents[3] / "examples" / "configs" / "mamba2-2.7b.json")
    assert training_flops(config, 2048) == pytest.approx(6 * 2.7e9, rel=0.1)


def test_known_gpus():
    assert known_peak("NVIDIA H100 80GB HBM3") == 989 and known_peak("NVIDIA H100 PCIe") == 756
    assert known_peak("NVIDIA A100-SXM4-80GB") == 312 and known_peak("Radeon") is None


# In a run


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_everything_at_once(here, world, monkeypatch):
    """TensorBoard and Weights & Biases get the numbers of the log; the trace has the products of two steps."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = "--tensorboard board --wandb tests --peak-tflops 0.001 --profile trace --profile-step-start 2"
    with launched(world, [*TINY, *flags.split(), "--profile-step-end", "3"]) as run:
        assert run.wait(*range(world), timeout=60)[0] == [0] * world, lines("err", world)
    log = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert len(log) == 6
    config = families.read("out")
    for line in log:
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * training_flops(config, 16) / (1e9 * world))
    assert sum("% MFU" in line for line in lines("out", world)) == 6

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("board").Reload()
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [line["step"] for line in log]
        assert [scalar.value for scalar in scalars] == pytest.approx([line[name] for line in log], rel=1e-6)

    (offline,) = Path("out/wandb").glob("offline-run-*/*.wandb")
    assert b"grad_norm" in offline.read_bytes() and b"mfu" in offline.read_bytes()

    (trace,) = Path("trace").iterdir()
    assert trace.name == "steps-2-3.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2 and "aten::mm" in names


@pytest.mark.full
@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_a_run_that_continues(here, world, monkeypatch):
    """TensorBoard shows no step that was lost. Weights & Biases gets the same run, and another one if a run begins anew."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for more, fault in (([], Fault(0, 4, signal.SIGKILL)), (["--resume"], None), (["--exit-interval", "4"], None)):
        with launched(world, [*TINY, "--tensorboard", "board", "--wandb", "tests", *more], fault) as run:
            codes, _ = run.wait(*range(world), timeout=60)
        assert fault or codes == [0] * world, lines("err", world)
        ids.append(Path("out/wandb/run-id").read_text())
        log = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
        scalars = EventAccumulator("board").Reload().Scalars("loss")
        assert [scalar.step for scalar in scalars] == [line["step"] for line in log]
        assert [scalar.value for scalar in scalars] == pytest.approx([line["loss"] for line in log], rel=1e-6)
    assert ids[0] == ids[1] != ids[2]
    assert [len([*Path("out/wandb").glob(f"offline-run-*-{name}")]) for name in ids] == [2, 2, 1]


class Watched:
    """In place of a run of Weights & Biases: what it is told, and whether the model is written when it is to finish."""

    id = "watched"

    def __init__(self, fails=False):
        self.fails, self.logged, self.axes, self.has_model, self.settings = fails, [], [], None, None

    def begin(self, **named):
        self.settings = named.get("settings")
        return self

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, values):
        if self.fails:
            raise ConnectionError("no network")
        self.logged.append(values)

    def finish(self):
        self.has_model = Path("out/model.safetensors").is_file()
        if self.fails:
            raise TimeoutError("no network")


@pytest.mark.parametrize("fails", [False, True])
def test_weights_and_biases_does_not_end_a_run(here, monkeypatch, capsys, fails):
    """It finishes, within a minute, after the model is written. Its errors are printed."""
    wandb = pytest.importorskip("wandb")
    watched = Watched(fails)
    monkeypatch.setattr(wandb, "init", watched.begin)
    monkeypatch.delenv("WANDB_FINISH_TIMEOUT", raising=False)
    pretrain(tiny_options("--wandb", "tests", "--log-interval", "3"))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--wandb")]
    lines = [f"logs nothing of step {step}: no network" for step in (1, 3, 6)] + ["cannot finish: no network"]
    assert said == ([f"--wandb: Weights & Biases {line}" for line in lines] if fails else [])
    assert watched.has_model and watched.settings.finish_timeout == 60
    assert [values["tokens"] for values in watched.logged] == ([] if fails else [96, 288, 576])


def test_weights_and_biases_gets_steps_that_are_repeated(here, monkeypatch):
    """A run that continues from an earlier step logs them again. Their number is the axis of all curves."""
    wandb = pytest.importorskip("wandb")
    watched = Watched()
    monkeypatch.setattr(wandb, "init", watched.begin)
    pretrain(tiny_options("--wandb", "tests", "--exit-interval", "4"))
    shutil.rmtree("out/checkpoints/step-000004")
    pretrain(tiny_options("--wandb", "tests", "--resume"))
    assert [values["step"] for values in watched.logged] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert watched.axes == [("*", "step")] * 2


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_a_run_that_cannot_begin_keeps_what_earlier_runs_have_written(here, monkeypatch, world):
    """Their checkpoints, those that were set aside, the log, and curves. One line names the variable that is wrong."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ("1", "2"):
        pretrain(tiny_options("--train-iters", steps, "--tensorboard", "board"))
    monkeypatch.setenv("WANDB_MODE", "wrong")
    log = Path("log.jsonl").read_text()
    with launched(world, [*TINY, "--wandb", "tests", "--tensorboard", "board"]) as run:
        assert run.wait(*range(world), timeout=60)[0] == [1] * world
    (line,) = lines("err", world)
    said = "pretrain.py: cannot write to --wandb: Weights & Biases: WANDB_MODE='wrong': Input should be 'online', "
    assert line.startswith(said)
    names = [path.name for folder in ("checkpoints", "checkpoints.old") for path in find_checkpoints(f"out/{folder}")]
    assert names == ["step-000002", "step-000001"] and Path("log.jsonl").read_text() == log
    assert [scalar.step for scalar in EventAccumulator("board").Reload().Scalars("loss")] == [1, 2]


def test_no_peak_no_utilization(here, capsys):
    pretrain(tiny_options())
    assert "MFU" not in capsys.readouterr().out and "mfu" not in Path("log.jsonl").read_text()


def tiny_options(*more):
    return parse_options([*TINY, *more])


@pytest.mark.parametrize("name", ("tensorboard", "wandb"))
def test_a_missing_package(here, capsys, monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None if wanted == name else find(wanted))
    options = replace(tiny_options(), **{name: "somewhere"})
    assert run("pretrain.py", lambda: pretrain(options)) == 2
    line = f"pretrain.py: --{name} needs the package {name}: pip install {name}\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", ["profile", "tensorboard"])
def test_a_folder_that_cannot_be_written(here, capsys, name):
    """It is an error before anything is computed."""
    Path("folder").write_text("")
    options = replace(tiny_options("--profile-step-start", "1"), **{name: "folder"})
    assert run("pretrain.py", lambda: pretrain(options)) == 2
    assert capsys.readouterr().err == f"pretrain.py: cannot write to --{name} folder: File exists\n"


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
@pytest.mark.parametrize("name", [pytest.param("tensorboard", marks=pytest.mark.full), "profile"])
def test_a_full_disk_under_what_is_watched(here, world, name):
    """One line names the option, and TensorBoard's thread prints nothing. An earlier trace stays, and no part of this."""
    pytest.importorskip("tensorboard")

    def fill(trainer):
        Path("watched/steps-3-12.json").write_text("{}")
        fill_disk(folder="watched")

    arguments = [*TINY, f"--{name}", "watched", "--profile-step-start", "3", "--train-iters", "40"]
    with small_disk("watched", 100), launched(world, arguments, Fault(0, 2, fill)) as run:
        assert run.wait(*range(world))[0] == [1] * world
        said = [line for line in lines("err", world) if not line.startswith(("USDT:", "ERROR:"))]  # of torch's profiler
        assert said == [f"pretrain.py: cannot write to --{name} watched: No space left on device"]
        if name == "profile":
            assert Path("watched/steps-3-12.json").read_text() == "{}" and len([*Path("watched").iterdir()]) == 2


def test_an_evaluation_that_is_not_finite(here):
    """It is null in the log, which stays JSON. Parameters that are not finite are not saved at the end."""

    def spoil(trainer):
        trainer.model.layers[0].mixer.D.data.fill_(math.nan)

    with launched(1, [*TINY, "--eval-interval", "3"], Fault(0, 3, spoil)) as run:
        assert run.wait(0)[0] == [1]
    assert lines("err", 1)[0].startswith("pretrain.py: step 6: parameters are not finite")

    def refuse(name):
        raise ValueError(name)

    log = [json.loads(line, parse_constant=refuse) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["held_out_nats_per_byte"] for line in log if "held_out_nats_per_byte" in line] == [None, None]


@pytest.mark.parametrize("last, written", [(3, []), (5, ["steps-5-5.json"])])
def test_a_run_that_continues_after_the_first_step_of_a_trace(here, capsys, last, written):
    """The trace has the steps that are left; if there are none, a line says so."""
    flags = ["--profile", "trace", "--profile-step-start", "2", "--profile-step-end", str(last)]
    pretrain(tiny_options("--exit-interval", "4"))
    capsys.readouterr()
    pretrain(tiny_options("--resume", *flags))
    said = "--profile writes no trace: --profile-step-end 3 is not after step 4, from which the run continues\n"
    assert (said in capsys.readouterr().out) == (not written)
    assert [path.name for path in Path("trace").iterdir()] == written


def test_the_last_checkpoint_is_complete_before_the_trace_is_written(here, monkeypatch):
    """A launcher may kill the ranks while they write the trace, whose name says which steps it has."""
    is_awaited, write_data, wait = threading.Event(), ShardWriter.write_data, BackgroundWriter.wait
    export, found = torch.profiler.profile.export_chrome_trace, []
    monkeypatch.setattr(
        ShardWriter, "write_data", lambda self, *plan: is_awaited.wait(30) and write_data(self, *plan)
    )  # as on a slow disk: not before the run waits for it

    def awaited(self):
        if self._under_way is not None:
            is_awaited.set()
        wait(self)

    def exported(self, path):
        found.extend(path.name for path in find_checkpoints("out/checkpoints"))
        export(self, path)

    monkeypatch.setattr(BackgroundWriter, "wait", awaited)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", exported)
    flags = "--async-save --save-interval 0 --exit-interval 3 --profile trace --profile-step-start 2"
    pretrain(tiny_options(*flags.split(), "--profile-step-end", "5"))
    assert found == ["step-000003"] and [path.name for path in Path("trace").iterdir()] == ["steps-2-3.json"]


def test_cuda_where_there_is_none(here, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    assert run("pretrain.py", lambda: pretrain(tiny_options("--device", "cuda"))) == 2
    assert capsys.readouterr().err == "pretrain.py: --device cuda: torch finds no CUDA device\n"


def test_a_trace_of_no_steps():
    with pytest.raises(ValueError, match="^--profile-step-end 3 is before --profile-step-start 10$"):
        replace(tiny_options(), profile="trace", profile_step_end=3)
