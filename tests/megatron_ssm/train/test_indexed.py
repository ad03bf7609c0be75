"""Training from Megatron's indexed datasets. Oracle: Megatron's order, computed here from its definition."""

import json
import math
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ssm.train.indexed import Blend, IndexedBatches
from megatron_ssm.train.options import Options, parse_options
from megatron_ssm.train.prepare import prepare

SEQ, BATCH, SEED = 8, 4, 7
CORPUS = SimpleNamespace(vocab_size=257, end_of_text_id=256, bytes_of=len)
needs_helper = pytest.mark.skipif(
    not find_spec("megatron.core.datasets.helpers_cpp"), reason="megatron-core was installed without its C++ helper"
)


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def dataset(folder, name, documents):
    """(the prefix, the tokens of each document) of a new dataset with random texts of many lengths."""
    random = np.random.default_rng(len(name))
    texts = ["".join(map(chr, random.integers(97, 123, random.integers(1, 30)))) for _ in range(documents)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / f"{name}.jsonl"], folder / name)
    return str(folder / name), [[*text.encode(), 256] for text in texts]


def one_dataset(documents, samples):
    """The samples that Megatron draws from documents: whole epochs are shuffled, the last alone if most of it is left."""
    random = np.random.RandomState(SEED)
    tokens = sum(map(len, documents))
    epochs = next(n for n in range(1, 1000) if n * tokens >= samples * SEQ + 1)
    before = ((epochs - 1) * tokens - 1) // SEQ
    is_apart = epochs > 1 and samples - before < int(0.8 * ((tokens - 1) // SEQ))
    order = []
    for part in [epochs - 1, 1] if is_apart else [epochs]:
        numbers = np.tile(np.arange(len(documents), dtype=np.int32), part)
        random.shuffle(numbers)
        order += numbers.tolist()
    stream = [token for number in order for token in documents[number]]
    total = (len(stream) - 1) // SEQ
    shuffled = []
    for start, end in [(0, before), (before, total)] if is_apart else [(0, total)]:
        numbers = np.arange(start, end, dtype=np.uint32)
        random.shuffle(numbers)
        shuffled += numbers.tolist()
    return [stream[i * SEQ : i * SEQ + SEQ + 1] for i in shuffled]


def blended(parts, weights, samples):
    """Megatron's blend: each sample is the next of the dataset that lags most behind its weight."""
    weights = np.array(weights) / sum(weights)
    drawn = [one_dataset(p, math.ceil(math.ceil(samples * w) * 1.005)) for p, w in zip(parts, weights, strict=True)]
    taken, order = [0] * len(parts), []
    for i in range(samples):
        which = int(np.argmax([w * max(i, 1) - n for w, n in zip(weights, taken, strict=True)]))
        order.append(drawn[which][taken[which]])
        taken[which] += 1
    return order


def batches_of(folder, samples, **more):
    options = Options(out=str(folder / "out"), seq_length=SEQ, global_batch_size=BATCH, seed=SEED, **more)
    batches = IndexedBatches(options, CORPUS, samples)
    return batches, batches.open()


def read(batches, steps, ranks):
    """All samples of these steps, from the parts of `ranks` data-parallel ranks."""
    rows = BATCH // ranks
    parts = [batches.samples(step * BATCH + rank * rows, rows) for step in steps for rank in range(ranks)]
    return [torch.cat([row, label[-1:]]).tolist() for pair in parts for row, label in zip(*pair, strict=True)]


@needs_helper
def test_two_epochs_of_a_split_in_megatrons_order(tmp_path):
    prefix, documents = dataset(tmp_path, "a", 60)
    train, held_out = documents[:48], documents[48:57]
    for epochs in (0.9, 1.3, 1.95):  # the last one: of the second epoch, nearly all
        samples = int(epochs * sum(map(len, train)) / SEQ) // BATCH * BATCH
        batches, valid = batches_of(tmp_path, samples, data_path=(prefix,), split="80,15,5", eval_iters=2)
        expected = one_dataset(train, samples)[:samples]
        steps = range(samples // BATCH)
        for ranks in (1, 2, 4):
            assert read(batches, steps, ranks) == expected
        middle = len(steps) // 2
        assert read(batches, steps[:middle], 4) + read(batches, steps[middle:], 2) == expected
        assert valid.inputs.tolist() == [each[:-1] for each in one_dataset(held_out, 2 * BATCH)[: 2 * BATCH]]


@needs_helper
def test_blend_in_megatrons_order(tmp_path):
    (a, first), (b, second) = dataset(tmp_path, "a", 40), dataset(tmp_path, "bb", 90)
    samples = 160
    batches, valid = batches_of(tmp_path, samples, train_data_path=("0.3", a, "0.7", b), valid_data_path=(a,))
    expected = blended([first, second], [0.3, 0.7], samples)
    for ranks in (1, 2, 4):
        assert read(batches, range(samples // BATCH), ranks) == expected
    assert valid.text_bytes > 0
    assert read(batches, [samples // BATCH], 1) == expected[:BATCH]  # a run that is longer than planned


def test_words_of_blends():
    assert Blend.of(("a", "b")) == Blend(["a", "b"], None)
    assert Blend.of(("0.5", "a", "2", "b")) == Blend(["a", "b"], [0.5, 2.0])
    for words in (("0.5", "a", "b"), ("1", "a", "-1", "b"), ("1", "2", "b")):
        with pytest.raises(ValueError, match="WEIGHT PREFIX"):
            Blend.of(words)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.with_suffix(".bin").write_bytes(b"12"), "has 2 bytes"),
        (lambda p: p.with_suffix(".bin").unlink(), "cannot read"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"text"), "is not the index"),
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-5]), "is cut off"),
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:20]), "is cut off"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    prefix, _ = dataset(tmp_path, "a", 20)
    damage(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        batches_of(tmp_path, 8, data_path=(prefix,))


def test_too_little_data_and_wrong_splits(tmp_path):
    prefix, _ = dataset(tmp_path, "a", 1)
    with pytest.raises(ValueError, match="one sequence needs"):
        batches_of(tmp_path, 8, data_path=(prefix,), split="0,1")
    for split in ("", "a", "0,0", "1,-1,1", "1,1,1,1"):
        with pytest.raises(ValueError, match="--split"):
            batches_of(tmp_path, 8, data_path=(prefix,), split=split)


def test_some_data_is_required(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--out", "out"])
    assert "--data is required" in capsys.readouterr().err
