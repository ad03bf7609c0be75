"""LoRA by examples/pretrain.py's options. Oracles: the run on one rank, and transformers with PEFT's adapters."""

import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
from chosen import by_default
from safetensors.torch import load_file

import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from hf import save_hf
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

RUN = """--data text --init-from start --tokenizer-model byte --seq-length 16 --micro-batch-size 1 --global-batch-size 4
    --train-iters 4 --log-interval 1 --params-dtype float64 --device cpu --lr 1e-2 --clip-grad 0.1
    --lora-rank 2 --lora-targets in_proj q_proj""".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a text and a small Zamba2."""
    monkeypatch.chdir(tmp_path)
    words, theirs = random.Random(0), save_hf("start", "zamba2", vocab_size=260, num_hidden_layers=3)
    Path("text").mkdir()
    Path("text", "a").write_text(" ".join(words.choice(("the", "state", "space")) for _ in range(200)))
    return theirs


def train(ranks, world, *more):
    """Run on `world` ranks, half of which are tensor-parallel if there are four."""
    options = parse_options([*RUN, "--tensor-model-parallel-size", str(min(world, 2)), *more])

    def run(rank):
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(world))
        pretrain(options)

    ranks(run, world, timeout=120)


def losses(path):
    return [json.loads(line)["loss"] for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_adapters_are_trained_saved_and_resumed(ranks, world, here):
    train(ranks, 1, "--out", "one", "--log", "one.jsonl")
    train(ranks, world, "--out", "out", "--log", "log.jsonl", "--save-interval", "2", "--exit-interval", "2")
    train(ranks, world, "--out", "out", "--log", "log.jsonl", "--resume")
    assert losses("log.jsonl") == pytest.approx(losses("one.jsonl"), rel=1e-9)
    assert losses("one.jsonl")[-1] < losses("one.jsonl")[0]
    ours, expected = (load_file(f"{name}/adapter_model.safetensors") for name in ("out", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-9)
    assert not Path("out", "model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(here, "out")
    found = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert found.keys() == expected.keys() and all(p.any() for p in found.values())


def names(folder):
    return {path.name for path in Path(folder).iterdir() if path.is_file()}


@pytest.mark.parametrize("world", (1, pytest.param(2, marks=pytest.mark.full)))
def test_files_of_the_other_kind_are_removed(ranks, world, here):
    """Beside adapter_config.json, transformers would read model.safetensors with the adapters of the earlier run."""
    whole, adapters = {"config.json", "model.safetensors"}, {"adapter_config.json", "adapter_model.safetensors"}
    run = ("--train-iters", "1", "--out")
    train(ranks, world, *run, "out")
    assert names("out") >= adapters and not names("out") & whole
    train(ranks, world, *run, "out", "--lora-rank", "0")
    assert names("out") >= whole and not names("out") & adapters
    loaded, info = type(here).from_pretrained("out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    train(ranks, world, *run, "out")
    assert names("out") >= adapters and not names("out") & whole
    train(ranks, world, *run, "start")  # the base model remains beside its adapters
    assert names("start") >= adapters | whole


@pytest.mark.full
@pytest.mark.parametrize("stage", by_default((3,), (0, 1, 2, 3)))
@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_adapters_in_deepspeed(ranks, world, stage, here, monkeypatch):
    """In float32, as torch's engine does it; ZeRO divides the adapters over two replicas of one or two ranks."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed").utils.logger.setLevel("ERROR")
    Path("zero.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    fp32 = ("--params-dtype", "float32", "--tensor-model-parallel-size", str(world // 2))
    train(ranks, 1, "--out", "one", "--log", "one.jsonl", *fp32[:2])
    train(
        ranks,
        world,
        "--out",
        "out",
        "--log",
        "log.jsonl",
        *fp32,
        "--engine",
        "deepspeed",
        "--deepspeed-config",
        "zero.json",
    )
    assert losses("log.jsonl") == pytest.approx(losses("one.jsonl"), rel=1e-5)
    assert load_file("out/adapter_model.safetensors").keys() == load_file("one/adapter_model.safetensors").keys()


@pytest.mark.parametrize("arguments, message", [
    (["--init-from", ""], "--lora-rank 2 needs a model to adapt: --init-from"),
    (["--lora-alpha", "0"], "--lora-alpha 0.0 must be positive and finite"),
    (["--lora-alpha", "inf"], "--lora-alpha inf must be positive and finite"),
    (["--lora-targets", "w1"], "LoRA targets w1: a zamba2 model has the linear layers down_proj, gate_up_proj, in_proj"),
])  # fmt: skip
def test_wrong_options(here, arguments, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        pretrain(parse_options([*RUN, "--out", "out", *arguments]))
    assert message in str(error.value) + capsys.readouterr().err


def test_the_help_says_that_targets_are_names(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--lora-targets NAME [NAME ...]" in text and "--data PATH [PATH ...]" in text
