"""`megatron-ssm prepare`. Oracle: megatron-core's IndexedDatasetBuilder, given the tokens of each document."""

import gzip
import json

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ssm.cli.main import main
from megatron_ssm.train import prepare as module
from megatron_ssm.train.prepare import prepare

TEXTS = ["one text", "zwei Wörter €", "", " \n", "a\nthird, of two lines", "x" * 300]


def write_lines(path, texts=TEXTS, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def bpe(tmp_path):
    """A folder with a small BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    (tmp_path / "bpe").mkdir()
    tokenizer.save(str(tmp_path / "bpe" / "tokenizer.json"))
    return tmp_path / "bpe"


def megatrons_files(folder, documents, vocab_size):
    """(the bytes of .bin, those of .idx) that megatron-core writes for lists of tokens."""
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(folder / "theirs.idx"))
    return (folder / "theirs.bin").read_bytes(), (folder / "theirs.idx").read_bytes()


def files_of(prefix):
    return prefix.with_name(prefix.name + ".bin").read_bytes(), prefix.with_name(prefix.name + ".idx").read_bytes()


def documents_in_bytes(texts=TEXTS):
    return [[*text.encode(), 256] for text in texts if text.strip()]


def test_bytes_are_those_of_megatrons_builder(tmp_path, bpe):
    source = write_lines(tmp_path / "a.jsonl", column="content")
    made = prepare([source], tmp_path / "ours", str(bpe), column="content")
    tokenizer = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [[*tokenizer.encode(text).ids, end] for text in TEXTS if text.strip()]
    assert files_of(tmp_path / "ours") == megatrons_files(tmp_path, documents, tokenizer.get_vocab_size())
    assert (made.documents, made.tokens) == (4, sum(map(len, documents)))
    kept = sorted(path.name for path in tmp_path.glob("ours*"))
    assert kept == ["ours.bin", "ours.idx", "ours.json"]


def test_ids_of_large_vocabularies_are_int32(tmp_path):
    with open(tmp_path / "ours.idx", "wb") as file:
        module.write_index(file, np.array([2, 1], np.int32), np.dtype(np.int32))
    assert (tmp_path / "ours.idx").read_bytes() == megatrons_files(tmp_path, [[70_000, 1], [5]], 70_001)[1]


def test_kinds_of_files_are_read_alike(tmp_path):
    """JSON lines, also compressed, and text with a separator."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "1.jsonl")
    (folder / "2.jsonl.gz").write_bytes(gzip.compress((folder / "1.jsonl").read_bytes()))
    (folder / "3.txt").write_text("first\n--\nsecond\n")
    prepare([folder], tmp_path / "ours", separator="--")
    documents = 2 * documents_in_bytes() + documents_in_bytes(["first\n", "second\n"])
    assert files_of(tmp_path / "ours") == megatrons_files(tmp_path, documents, 257)


def test_parquet_files_and_datasets(tmp_path):
    """Where pyarrow and datasets are installed, which they need not be."""
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, first = (datasets.Dataset.from_dict({"id": [7] * n, "body": TEXTS[:n]}) for n in (len(TEXTS), 1))
    (tmp_path / "in").mkdir()
    parquet.write_table(rows.data.table, tmp_path / "in" / "part.parquet")
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows, test=first).save_to_disk(tmp_path / "splits")
    prepare([tmp_path / "in"], tmp_path / "parquet", column="body")
    prepare([], tmp_path / "one", dataset=str(tmp_path / "rows"), column="body")
    prepare([], tmp_path / "split", dataset=str(tmp_path / "splits"), split="test", column="body")
    theirs = megatrons_files(tmp_path, documents_in_bytes(), 257)
    assert files_of(tmp_path / "parquet") == theirs == files_of(tmp_path / "one")
    assert files_of(tmp_path / "split") == megatrons_files(tmp_path, documents_in_bytes(TEXTS[:1]), 257)
    with pytest.raises(ValueError, match="has no column 'text': it has id, body"):
        prepare([tmp_path / "in"], tmp_path / "other")


def test_a_command_that_failed_continues(tmp_path, monkeypatch):
    """Documents before the journal's last entry are not tokenized again; the result is the same."""
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 1)
    monkeypatch.setattr(module, "JOURNAL_TOKENS", 1)
    source = write_lines(tmp_path / "a.jsonl")
    encode, encoded = module.TokenizerInfo.encode, []

    def failing(self, texts):
        encoded.extend(texts)
        if len(encoded) == 3:
            raise OSError("the disk")
        return encode(self, texts)

    monkeypatch.setattr(module.TokenizerInfo, "encode", failing)
    with pytest.raises(OSError, match="the disk"):
        prepare([source], tmp_path / "ours")
    assert not (tmp_path / "ours.idx").exists()
    with open(tmp_path / "ours.bin.partial", "ab") as file:
        file.write(b"cut off")  # written after the journal's entry
    prepare([source], tmp_path / "ours")
    assert files_of(tmp_path / "ours") == megatrons_files(tmp_path, documents_in_bytes(), 257)
    assert encoded.count("one text") == 1


def test_another_recipe_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "JOURNAL_TOKENS", 1)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "kept"}\nnot json\n')
    with pytest.raises(ValueError, match=r"line 2 of .*bad\.jsonl is not JSON"):
        prepare([bad], tmp_path / "ours")
    prepare([write_lines(tmp_path / "a.jsonl")], tmp_path / "ours")
    assert files_of(tmp_path / "ours") == megatrons_files(tmp_path, documents_in_bytes(), 257)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "line 2 of"),
        ("a.jsonl", b'{"other": "a"}\n', "a string `text`"),
        ("a.jsonl", b'{"text": "\xff"}\n', "is not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "is cut off or is not gzip"),
        ("a.jsonl.gz", b"no gzip", "is cut off or is not gzip"),
        ("a.idx", b"MMIDIDX\0\0", "part of a Megatron indexed dataset"),
        ("a.txt", b" ", "no text in"),
        ("a.jsonl", b"", "no text in"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert main(["prepare", "--input", str(tmp_path / name), "--out", str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "ours.idx").exists()


def test_command_line(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl")
    assert main(["prepare", "--input", str(source), "--out", str(tmp_path / "new" / "ours"), "--workers", "1"]) == 0
    assert "4 documents" in capsys.readouterr().out
    assert files_of(tmp_path / "new" / "ours") == megatrons_files(tmp_path, documents_in_bytes(), 257)
    with pytest.raises(SystemExit):
        main(["prepare", "--out", str(tmp_path / "ours")])
    assert "needs --input or --dataset" in capsys.readouterr().err
