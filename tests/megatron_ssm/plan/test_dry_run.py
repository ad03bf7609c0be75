"""`pretrain.py --dry-run`. Oracles: the sizes of a model that is built, and the messages of a real step, counted."""

import json
import runpy
from pathlib import Path

import pytest

import tiny  # noqa: F401  (imports Megatron once)
from commfabric.fabric.curve import Curve
from commfabric.foundation.command_line import Failure
from megatron_ssm.plan import dry_run as module
from megatron_ssm.plan.dry_run import dry_run
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain
from sparsefusion import Fabric

TINY = """--data text --out out --num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16
    --micro-batch-size 1 --global-batch-size 8 --train-iters 4""".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("the state of a space " * 40)


def test_layout_memory_and_messages(capsys):
    dry_run(
        parse_options([*TINY, "--dry-run", "8", "--tensor-model-parallel-size", "2", "--context-parallel-size", "2"])
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dry run:" and lines[-1] == "nothing was trained"
    assert "  ranks: 2 tensor x 2 context x 2 data-parallel" in lines
    assert "    replica 0: ranks 0-1 | 2-3" in lines and "    replica 1: ranks 4-5 | 6-7" in lines
    for name in (
        "memory: ",
        "for tensor-parallel sums",
        "for states of context ranks",
        "for sums of gradients",
        "disk: ",
    ):
        assert any(name in line for line in lines), name
    assert not any(Path("out", "checkpoints").iterdir())


def test_bytes_of_gradients(capsys):
    dry_run(parse_options([*TINY, "--dry-run", "4"]))
    said = capsys.readouterr().out
    size = int(said.split(" parameters")[0].split(", ")[-1].replace(",", ""))
    (line,) = (line for line in said.splitlines() if "sums of gradients" in line)
    assert float(line.split(": ")[1].split()[0]) == pytest.approx(4 * size / 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dry-run 1", "  messages of a rank in a step: none"),
        ("--dry-run 2 --gradient-mode auto", "    without the savings of --gradient-mode auto"),
        ("--dry-run 2 --engine fsdp", "    without the parameters that the engine gathers"),
    ],
)
def test_messages_that_are_not_counted(capsys, words, line):
    dry_run(parse_options([*TINY, *words.split()]))
    assert line in capsys.readouterr().out.splitlines()


def timed(capsys, *words):
    """What a dry run on 2 ranks says of its time."""
    Fabric((Curve.fit("all_reduce", 2, [(1, 1e-3), (2**20, 2e-3)]),)).save("fabric.json")
    dry_run(parse_options([*TINY, "--dry-run", "2", "--dry-run-fabric", "fabric.json", *words]))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  time: "))
    return line


def test_time_counts_the_recomputation(capsys):
    plain, again = (
        float(timed(capsys, "--dry-run-device", "h100", *words).split()[1])
        for words in ((), ["--recompute-activations"])
    )
    assert 1.05 * plain < again < 1.5 * plain


def test_no_time_where_memory_is_short(capsys):
    device = dict(name="small", memory_gb=1e-6, tflops=1, bandwidth_gb_s=1)
    Path("small.json").write_text(json.dumps(device))
    assert timed(capsys, "--dry-run-device", "small.json").startswith("  time: none on small: needs ")


def test_a_fabric_without_curves():
    Path("fabric.json").write_text(json.dumps({"description": {}, "curves": []}))
    with pytest.raises(ValueError, match=r"fabric\.json"):
        dry_run(parse_options([*TINY, "--dry-run", "2", "--dry-run-fabric", "fabric.json"]))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--dry-run 3", "--global-batch-size 8 is not a multiple"),
        ("--dry-run 4 --tensor-model-parallel-size 3", "4 ranks do not divide"),
        ("--dry-run --data nothing", "nothing"),
        ("--dry-run --tokenizer-model nothing", "nothing"),
    ],
)
def test_wrong_inputs(words, error):
    with pytest.raises((ValueError, OSError), match=error):
        dry_run(parse_options([*TINY, *words.split()]))


def test_full_disk(monkeypatch):
    monkeypatch.setattr(module, "STATES", 1e15)
    with pytest.raises(Failure, match="GB free"):
        dry_run(parse_options([*TINY, "--dry-run"]))


def test_adapters_need_less_than_a_disk_for_the_model(monkeypatch, capsys):
    pretrain(parse_options([*TINY, "--out", "whole"]))
    monkeypatch.setattr(module, "STATES", 1e15)
    dry_run(parse_options([*TINY, "--dry-run", "2", "--init-from", "whole", "--lora-rank", "2"]))
    said = capsys.readouterr().out
    assert "    without the savings of --lora-rank 2" in said and "less with --lora-rank\n" in said


def test_the_script_trains_nothing(monkeypatch, capsys):
    script = Path(__file__).resolve().parents[3] / "examples" / "pretrain.py"
    monkeypatch.setattr("sys.argv", [str(script), *TINY, "--dry-run"])
    assert runpy.run_path(str(script))["main"]() == 0
    assert "nothing was trained" in capsys.readouterr().out and not Path("out", "config.json").exists()
