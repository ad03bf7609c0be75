"""Flags that people bring from Megatron's scripts. Oracle: Megatron-Core, where it computes what a flag says."""

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from docs.generated import filled
from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.initialization import MEGATRON, initialize
from megatron_ssm.train import megatron_flags
from megatron_ssm.train.options import GROUPS, Options, parse_options, table
from megatron_ssm.train.prepare import prepare
from megatron_ssm.train.pretraining import pretrain

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "training-flags.md"
LEAST = ["--data", "text", "--save", "OUT", "--global-batch-size", "8"]
DECAY = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")


def test_flags_that_work():
    words = "--train-samples 800 --lr-warmup-fraction 0.1 --lr-decay-samples 400 --tensorboard-dir T --load OUT"
    options = parse_options([*LEAST, *words.split(), "--recompute-granularity", "full", "--wandb-project", "W"])
    assert (options.out, options.tensorboard, options.wandb, options.resume) == ("OUT", "T", "W", "auto")
    assert (options.full_steps, options.lr_decay_iters, options.lr_warmup_iters) == (100, 50, 5)
    assert options.recompute_activations
    assert parse_options([*LEAST, "--lr-warmup-samples", "16"]).lr_warmup_iters == 2


@pytest.mark.parametrize(("name", "values"), [(name, count) for name, (count, _) in megatron_flags.ANYWAY.items()])
def test_flags_without_effect(capsys, name, values):
    assert parse_options([*LEAST, name, *["1"] * values]) == parse_options(LEAST)
    assert capsys.readouterr().out == f"ignored: {name} (no effect here)\n"


@pytest.mark.parametrize(("name", "only"), [(name, only) for name, (only, _) in megatron_flags.ONLY.items()])
def test_flags_with_one_value(name, only):
    assert parse_options([*LEAST, name, *only.split()]) == parse_options(LEAST)


@pytest.mark.parametrize("layers", [1, 5, 12, 48])
@pytest.mark.parametrize("ratios", [(0.08, 0.5), (0.25, 0.0), (0.0, 0.4), (0.3, 0.7), (0.1, 0.15)])
def test_blocks_by_ratios(layers, ratios):
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    assert megatron_flags.pattern(layers, *ratios) == "".join(allocate_layers(layers, *ratios))


# The options of Megatron-LM's examples/mamba/train.sh, with other sizes and paths. "sp" is any tokenizer's folder.
TRAIN_SH = """
       --tensor-model-parallel-size 1
       --sequence-parallel
       --pipeline-model-parallel-size 1
       --use-distributed-optimizer
       --overlap-param-gather
       --overlap-grad-reduce
       --untie-embeddings-and-output-weights
       --init-method-std 0.02
       --position-embedding-type none
       --num-layers 6
       --hidden-size 64
       --num-attention-heads 16
       --group-query-attention
       --num-query-groups 8
       --hybrid-attention-ratio 0.2
       --hybrid-mlp-ratio 0.4
       --seq-length 32
       --max-position-embeddings 32
       --train-samples 34
       --lr-warmup-samples 9
       --lr-decay-samples 25
       --save checkpoints
       --load checkpoints
       --data-path data
       --data-cache-path data-cache
       --split 90,10,0
       --tokenizer-type GPTSentencePieceTokenizer
       --tokenizer-model byte
       --distributed-backend nccl
       --micro-batch-size 4
       --global-batch-size 8
       --lr 2.5e-3
       --min-lr 2.5e-5
       --lr-decay-style cosine
       --weight-decay 0.1
       --clip-grad 1.0
       --attention-dropout 0.0
       --hidden-dropout 0.0
       --disable-bias-linear
       --normalization RMSNorm
       --adam-beta1 0.9
       --adam-beta2 0.95
       --log-interval 10
       --save-interval 2000
       --eval-interval 2000
       --eval-iters 1
       --bf16
       --use-mcore-models
       --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
       --no-create-attention-mask-in-dataloader
       --tensorboard-dir tensorboard""".split()


def test_megatrons_script_trains(tmp_path, monkeypatch, capsys):
    """Oracle of the layers: Megatron's allocation."""
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": "a state space model " * length}) + "\n" for length in range(1, 40)]
    Path("text.jsonl").write_text("".join(lines))
    prepare(["text.jsonl"], "data")
    pretrain(parse_options([*TRAIN_SH, "--device", "cpu"]))
    said = capsys.readouterr().out
    assert "ignored: --use-distributed-optimizer (--engine torch divides nothing on CPUs)" in said
    assert "step     4/4" in said and "held-out" in said  # 34 samples are 4 steps, as in Megatron
    assert Path("tensorboard").is_dir() and (tmp_path / "checkpoints" / "checkpoints" / "step-000004").is_dir()
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    expected = [kinds[letter] for letter in allocate_layers(6, 0.2, 0.4)]
    assert json.loads(Path("checkpoints", "config.json").read_text())["layers_block_type"] == expected


def test_initialization_with_megatrons_deviation():
    run = parse_options(
        [*LEAST, "--hybrid-override-pattern", "M-*-", "--hidden-size", "64", "--init-method-std", "0.1"]
    )
    config = families.from_dict(run.new_config(257, 256))
    model = initialize(build(replace(config, draws={**config.draws, **MEGATRON}, draws_std=run.init_method_std)))
    assert torch.equal(model.norm_f.weight, torch.ones(64))
    for name, expected in {"in_proj": 0.1, ".up": 0.1, "out_proj": 0.05, "down_proj": 0.05, "embeddings": 0.1}.items():
        found = [p.std().item() for path, p in model.named_parameters() if name in path and p.dim() == 2]
        assert found and found == pytest.approx([expected] * len(found), rel=0.1), name
    taps = [p for path, p in model.named_parameters() if "conv.weight" in path]
    assert taps and all(p.abs().max() <= 0.5 for p in taps)  # as torch's convolutions with 4 taps


def test_vocabulary_is_padded():
    run = parse_options([*LEAST, "--make-vocab-size-divisible-by", "64", "--tensor-model-parallel-size", "2"])
    assert run.new_config(257, 256)["vocab_size"] == 384


def test_growing_weight_decay():
    """Oracle: Megatron's OptimizerParamScheduler."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    for style in ("linear", "cosine"):
        words = f"--weight-decay-incr-style {style} --start-weight-decay 0 --end-weight-decay 0.3 --train-iters 6"
        run = tiny.options(**{k: getattr(parse_options([*LEAST, *words.split()]), k) for k in DECAY}, train_iters=6)
        trainer = tiny.trainer(run)
        theirs = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[]), 0.0, 1.0, 0.0, 0, 6, "constant", 0.0, 0.3, 6, style
        )
        for step in range(6):
            trainer.step(tiny.batches(run), step)
            decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
            assert decays == pytest.approx([theirs.get_wd(), 0.0])
            theirs.step(1)


def test_run_leaves_when_its_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--mock-data --out out --device cpu --seq-length 16 --global-batch-size 8 --micro-batch-size 8"
    pretrain(parse_options([*words.split(), "--train-iters", "3", "--exit-duration-in-mins", "1e-9"]))
    said = capsys.readouterr().out
    assert "leaving after step 1, as --exit-duration-in-mins says" in said and "mock data" in said
    pretrain(parse_options([*words.split(), "--train-iters", "3", "--resume"]))
    assert Path("out", "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(f"{name} 1", f"{name} is not there: {reason}") for name, reason in megatron_flags.NOT_THERE.items()]
    + [
        ("--lr-warmup-samples -1", "--lr-warmup-samples -1 must be at least 0"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2 is not there: there are no pipelines"),
        ("--hybrid-mlp-ratio 1.5", "--hybrid-mlp-ratio must be at least 0"),
        ("--weight-decay-incr-style linear", "linear and cosine need an end above 0"),
        ("--start-weight-decay 0.1", "constant needs neither"),
        ("--mock-data", "--mock-data takes the place of --data"),
        ("--data-path p", "--data and --data-path each name the text to train on"),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0 must be"),
        ("--recompute-granularity selective", "selective is not there"),
        ("--load OTHER", "--load OTHER is not --out"),
        ("--sead 1", "unknown argument --sead\n"),
        ("--hidden-sise 1", "did you mean --hidden-size?"),
    ],
)
def test_flags_that_are_refused(capsys, words, message):
    with pytest.raises(SystemExit):
        parse_options([*LEAST, *words.split()])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_text_of_the_command_line_replaces_that_of_the_file(tmp_path):
    """Weights of a blend are numbers in YAML."""
    file = tmp_path / "run.yaml"
    file.write_text("data-path: [0.3, a, 1, b]\nsave-interval: 7")
    words = ["--config", str(file), "--out", "OUT"]
    assert parse_options(words).data_path == ("0.3", "a", "1", "b")
    mock = parse_options([*words, "--mock-data"])
    assert (mock.mock_data, mock.data_path, mock.save_interval) == (True, (), 7)


def test_page_is_the_tables():
    page = filled(PAGE.read_text())
    assert megatron_flags.table() in page and table() in page


def test_each_option_has_a_group(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n{title}:\n" in said for title in GROUPS.values())
    assert next(iter(fields(Options))).name in GROUPS


def test_checkpoints_of_megatron_are_named(tmp_path, capsys, monkeypatch):
    """Oracle: the files that megatron-core writes."""
    from megatron.core import dist_checkpointing

    from megatron_ssm.parallel.groups import join_alone, shut_down

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    join_alone()
    (tmp_path / "iter_0000002").mkdir()
    dist_checkpointing.save({"step": 2}, str(tmp_path / "iter_0000002"))
    shut_down()
    for folder in (tmp_path, tmp_path / "iter_0000002"):
        with pytest.raises(SystemExit):
            parse_options([*LEAST, "--load", str(folder)])
        assert "is a torch_dist checkpoint of Megatron" in capsys.readouterr().err
