"""Global batches that grow, and that change when a run resumes. Oracles: Megatron's calculator; a run that reads each
sample at once.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest

import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from megatron_ssm.train.batches import Batches, BatchSizes
from megatron_ssm.train.options import Options, parse_options
from megatron_ssm.train.pretraining import pretrain

TINY = """--data text --out out --log log.jsonl --num-layers 1 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4
    --seq-length 16 --micro-batch-size 1 --log-interval 1 --params-dtype float64 --device cpu --save-interval 0""".split()


def sizes_of(words, full, samples):
    return BatchSizes.of(Options(rampup_batch_size=tuple(words.split()), global_batch_size=full, train_samples=samples))


@pytest.mark.parametrize(("words", "full"), [("2 2 30", 8), ("16 8 300", 64), ("4 4 7", 32), ("1 3 100", 13)])
def test_sizes_are_megatrons(words, full):
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    sizes, samples = sizes_of(words, full, 1000), 0
    theirs = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 0, *map(int, words.split()))
    for step in range(60):
        theirs.update(samples, False, False)
        assert sizes.of_step(step) == (samples, theirs.get_current_global_batch_size()), step
        later = BatchSizes.of(
            Options(rampup_batch_size=tuple(words.split()), global_batch_size=full, train_samples=1000), step, samples
        )
        samples += theirs.get_current_global_batch_size()
        assert later.of_step(step + 1) == sizes.of_step(step + 1) and sizes.last_step(samples) == step + 1
        assert sizes.last_step(samples - 1) == step and later.last_step(samples) == step + 1


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("the state of a space " * 40)
    return tmp_path


@pytest.fixture
def read(monkeypatch):
    """The numbers of the samples that a run has read on this rank."""
    numbers, samples = [], Batches.samples

    def noting(self, first, count):
        numbers.extend(range(first, first + count))
        return samples(self, first, count)

    monkeypatch.setattr(Batches, "samples", noting)
    return numbers


def test_run_with_a_ramp(here, read):
    """Its second part prints to a stream of text without bytes, as in a notebook."""
    words = "--global-batch-size 6 --rampup-batch-size 2 2 9 --train-samples 30".split()
    pretrain(parse_options([*TINY, *words, "--exit-interval", "3"]))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pretrain(parse_options([*TINY, *words, "--resume"]))
    assert "--train-samples 30: the last 2 are left out (global batch 6)" in printed.getvalue()
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    taken = [2, 4, 6, 10, 16, 22, 28]  # 2, 2, 2: below 4.5 samples; 4: below 9; then 6
    assert [line["tokens"] // 16 for line in lines] == taken
    assert read == list(range(28))


def resumed(rank, words):
    pretrain(parse_options([*TINY, *words, "--resume"]))


def test_another_global_batch_on_more_ranks(here, ranks, read):
    words = ["--train-samples", "40", "--lr-decay-style", "constant"]
    pretrain(parse_options([*TINY, *words, "--global-batch-size", "4", "--exit-interval", "3"]))
    assert read == list(range(12))
    ranks(resumed, 2, [*words, "--global-batch-size", "6"])
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["tokens"] // 16 for line in lines] == [4, 8, 12, 18, 24, 30, 36]
    assert Path("out", "checkpoints", "step-000007").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rampup-batch-size 2 2", "is not START INCREMENT SAMPLES"),
        ("--rampup-batch-size 3 2 9 --train-samples 30", "must be START plus a multiple of INCREMENT"),
        ("--rampup-batch-size 2 2 9", "needs --train-samples"),
    ],
)
def test_wrong_ramps(capsys, words, message):
    with pytest.raises(SystemExit):
        parse_options([*TINY, "--global-batch-size", "6", *words.split()])
    assert message in capsys.readouterr().err


def test_ramp_that_does_not_divide():
    ramp = Options(rampup_batch_size=("2", "2", "9"), global_batch_size=8, micro_batch_size=2, train_samples=30)
    assert ramp.accumulation(1) == 4
    with pytest.raises(ValueError, match="START of --rampup-batch-size 2 is not a multiple"):
        ramp.accumulation(2)
