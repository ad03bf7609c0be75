"""Flags that people bring from Megatron's scripts."""

from pathlib import Path

import pytest

from megatron_ssm.training import megatron_flags
from megatron_ssm.training.options import parse_options

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "training-flags.md"
LEAST = ["--data", "text", "--save", "OUT", "--global-batch-size", "8"]


def test_flags_that_work():
    words = "--train-samples 800 --lr-warmup-fraction 0.1 --lr-decay-samples 400 --tensorboard-dir T --load OUT"
    options = parse_options([*LEAST, *words.split(), "--recompute-granularity", "full", "--wandb-project", "W"])
    assert (options.out, options.tensorboard, options.wandb, options.resume) == ("OUT", "T", "W", "auto")
    assert (options.train_iters, options.lr_decay_iters, options.lr_warmup_iters) == (100, 50, 5)
    assert options.recompute_activations
    assert parse_options([*LEAST, "--lr-warmup-samples", "16"]).lr_warmup_iters == 2


@pytest.mark.parametrize(("name", "values"), megatron_flags.ANYWAY.items())
def test_flags_without_effect(name, values):
    assert parse_options([*LEAST, name, *["1"] * values]) == parse_options(LEAST)


@pytest.mark.parametrize(
    ("words", "message"),
    [(f"{name} 1", f"{name} is not there: {reason}") for name, reason in megatron_flags.NOT_THERE.items()]
    + [
        ("--train-samples 7", "--train-samples 7 is not a positive multiple of the global batch, 8"),
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


def test_page_is_the_table():
    assert megatron_flags.table() in PAGE.read_text()
