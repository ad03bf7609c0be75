"""Training data. Oracles: brute force over small texts and streams, counting by hand, definitions."""

import bz2
import errno
import gzip
import importlib.util
import lzma
import math
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.launched import TINY, disks_work, small_disk
from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.train.batches import Batches, Tokens, tokenize, windows
from megatron_ssm.train.corpus import Corpus
from megatron_ssm.train.documents import read_documents, split_documents
from megatron_ssm.train.options import parse_options

settings.register_profile("patient", deadline=None)  # a slow machine is not an error
settings.load_profile("patient")


def stream_of(tokens):
    """A stream in which the token at index i is i."""
    return Tokens(torch.arange(tokens, dtype=torch.int32), tokens)


# Documents


def test_files_and_directories_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c.txt", ".hidden", "a/.git/x", "single"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"{name}\r\n".encode())
    (tmp_path / "empty").write_text(" \n")
    assert read_documents([tmp_path]) == ["a/c.txt\r\n", "a/z.txt\r\n", "b.txt\r\n", "single\r\n"]
    assert read_documents([tmp_path / "single", str(tmp_path / "a")]) == ["single\r\n", "a/c.txt\r\n", "a/z.txt\r\n"]
    assert read_documents(tmp_path / "single") == ["single\r\n"]


def test_separator_is_a_whole_line(tmp_path):
    (tmp_path / "f").write_bytes(b"--\none\n-- no\n--\n\n--\r\n two--\n--x\n--")
    assert read_documents([tmp_path / "f"], separator="--") == ["one\n-- no\n", " two--\n--x\n"]
    (tmp_path / "f").write_bytes(b"one\r\n--\r")
    assert read_documents([tmp_path / "f"], separator="--") == ["one\r\n"]
    (tmp_path / "g").write_text("one\nmore\n\ntwo\n\n\n\x0cthree\u2028\n")
    assert read_documents([tmp_path / "g"], separator="") == ["one\nmore\n", "two\n", "\x0cthree\u2028\n"]
    assert read_documents([tmp_path / "g"], separator="three") == ["one\nmore\n\ntwo\n\n\n\x0cthree\u2028\n"]
    assert read_documents([tmp_path / "g"], separator=".*") == ["one\nmore\n\ntwo\n\n\n\x0cthree\u2028\n"]
    with pytest.raises(ValueError, match="more than one line"):
        read_documents([tmp_path / "g"], separator="a\nb")


@given(lines=st.lists(st.sampled_from(["--", "a", " --", "--b", ""]), max_size=8))
def test_separator_against_a_loop_over_lines(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_text("a\n" + "".join(f"{line}\n" for line in lines))
    documents = ["a\n"]
    for line in lines:
        if line == "--":
            documents.append("")
        else:
            documents[-1] += f"{line}\n"
    assert read_documents([path], separator="--") == [document for document in documents if document.strip()]


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Its documents are not left out silently. A hidden one is not read at all."""
    for name in ("a/text", "closed/text", ".hidden/text"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    scan = os.scandir

    def refuse(path):
        if Path(path).name in ("closed", ".hidden"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert read_documents(tmp_path / "a") == ["a/text"]
    with pytest.raises(ValueError, match=f"^cannot read {tmp_path}/closed: Permission denied$"):
        read_documents(tmp_path)
    (tmp_path / "closed").rename(tmp_path / "open")
    assert read_documents(tmp_path) == ["a/text", "closed/text"]


def test_json_lines(tmp_path):
    """Each line's `text` is a document. Other objects of a .json file are text, as source code is."""
    lines = '{"text": "one\\n--\\n€", "meta": {"text": 1}}\n\n{"id": 3, "text": "\\ud83d\\ude00"}\r\n{"text": " "}\n'
    for name in ("a.jsonl", "b.ndjson", "c.json", "d.JSONL", "part-00000"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" * (name == "a.jsonl") + lines.encode())
        assert read_documents([tmp_path / name], separator="--") == ["one\n--\n€", "\U0001f600"]
    (tmp_path / "e.json").write_text(other := '{\n "name": "text"\n}\n')
    assert read_documents(tmp_path / "e.json") == [other]


@pytest.mark.parametrize(
    "lines, rule",
    [
        ('{"text": "a"}\n{"text": 3}', r"line 2 of \S*f.jsonl is not a JSON object with a string `text`$"),
        ('\n{"content": "a"}', r"line 2 of \S*f.jsonl is not a JSON object with a string `text`$"),
        ('["text"]', r"line 1 of \S*f.jsonl is not a JSON object"),
        ('{"text": "a"}\nfree text', r"line 2 of \S*f.jsonl is not JSON: "),
        ('{\n"text": "a"\n}', r"line 1 of \S*f.jsonl is not JSON"),
        ("[" * 10**5, r"line 1 of \S*f.jsonl is not JSON"),
        (r'{"text": "a\ud800"}', r"line 1 of \S*f.jsonl: `text` has half of a surrogate pair"),
        ('{"text": ""}\n', r"no text in \S*f.jsonl$"),
    ],
)
def test_errors_in_json_lines(tmp_path, lines, rule):
    (tmp_path / "f.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=rule):
        read_documents([tmp_path / "f.jsonl"])


@pytest.mark.parametrize(
    "name, data, kind",
    [
        ("text_document.bin", b"a\0b\0", "part of a Megatron indexed dataset"),
        ("text_document.idx", b"MMIDIDX\0\0\1", "part of a Megatron indexed dataset"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}'), "compressed by gzip"),
        ("a.bz2", bz2.compress(b"a"), "compressed by bzip2"),
        ("a.xz", lzma.compress(b"a"), "compressed by xz"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\0", "compressed by zstd"),
        ("a.parquet", b"PAR1\x15\x04", "Parquet"),
        ("a.arrow", b"ARROW1\0\0", "Arrow"),
        ("a.txt", "a".encode("utf-16"), "UTF-16"),
        ("a.tar", b"a" + bytes(511), "binary: byte 0x00 at byte offset 1"),
        ("a.json", b'[\n {"text": "a"}]', "one JSON value: write one object with `text` per line"),
        ("a.json", b'[{"meta": {"a": 1}, "text": "a"}]', "one JSON value: write one object with `text` per line"),
        ("A.JSON", b'{\n "text": "a"\n}', "one JSON value: write one object with `text` per line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time into its data
)
def test_other_formats_are_named(tmp_path, name, data, kind):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"^expected UTF-8 text or JSON lines \(.jsonl\), but \S*{name} is {kind}$"):
        read_documents(tmp_path)


def test_document_errors_name_the_file(tmp_path):
    (tmp_path / "latin").write_bytes("é".encode() * 5 + b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"latin is not UTF-8: byte 0xe9 at byte offset 13$"):
        read_documents([tmp_path])
    with pytest.raises(ValueError, match=r"cannot read \S*missing: No such file"):
        read_documents([tmp_path / "missing"])
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"no text in \S*none$"):
        read_documents([tmp_path / "none"])
    with pytest.raises(ValueError, match="no text"):
        read_documents([])


@given(st.lists(st.text(min_size=1), min_size=2, max_size=12), st.floats(0.01, 0.99), st.integers(0, 5))
def test_split_takes_whole_documents(documents, share, seed):
    documents = [f"{i} {document}" for i, document in enumerate(documents)]
    train, held_out = split_documents(documents, share, seed)
    assert train and held_out
    assert sorted(train + held_out, key=documents.index) == documents
    assert train == sorted(train, key=documents.index) and held_out == sorted(held_out, key=documents.index)
    assert split_documents(documents, share, seed) == (train, held_out)
    sizes = [len(document.encode()) for document in held_out]
    bytes_left = share * sum(len(document.encode()) for document in documents) - sum(sizes)
    if bytes_left < 0:
        assert sizes == [min(len(document.encode()) for document in documents)]
    else:
        assert all(len(document.encode()) > bytes_left for document in train)


def test_split_depends_on_the_seed():
    documents = [str(i) for i in range(10, 99)]
    assert len({tuple(split_documents(documents, 0.2, seed)[1]) for seed in range(8)}) == 8


def test_split_errors():
    with pytest.raises(ValueError, match=r"^1 document\(s\)"):
        split_documents(["one"], 0.1, 0)
    for share in (0.0, 1.0, 5.0, math.nan):
        with pytest.raises(ValueError, match="share"):
            split_documents(["one", "two"], share, 0)


# Tokens


def test_tokens(tmp_path):
    write_byte_tokenizer(tmp_path)
    tokens = tokenize(["a€", "b"], load_tokenizer(tmp_path), 256)
    assert tokens.ids.tolist() == [*"a€".encode(), 256, *b"b", 256]
    assert tokens.text_bytes == 5


def test_tokenizing_lets_other_threads_run(tmp_path):
    """Such as the one that shows other ranks that this rank runs. Python itself switches threads after 100 s here."""
    write_byte_tokenizer(tmp_path)
    rounds, stopped = [], threading.Event()

    def count():
        while not stopped.wait(0.001):
            rounds.append(len(rounds))

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    try:
        sys.setswitchinterval(100)
        thread.start()
        tokenizer = load_tokenizer(tmp_path)
        before = len(rounds)
        tokenizer.encode_batch(["word " * 100_000])
        assert len(rounds) > before
    finally:
        sys.setswitchinterval(interval)
        stopped.set()
        thread.join()


@pytest.mark.parametrize(
    "largest, dtype",
    [(255, torch.uint8), (256, torch.int16), (32767, torch.int16), (32768, torch.int32), (500_000, torch.int32)],
)
def test_tokens_use_the_smallest_type(tmp_path, largest, dtype):
    write_byte_tokenizer(tmp_path)
    tokens = tokenize(["a"], load_tokenizer(tmp_path), largest)
    assert tokens.ids.dtype == dtype and tokens.ids.tolist() == [97, largest]


# Batches

SHAPES = st.tuples(st.integers(2, 200), st.integers(1, 20), st.sampled_from([6, 12])).filter(lambda s: s[0] > s[1])


@given(SHAPES, st.integers(0, 3), st.integers(0, 50))
def test_ranks_share_the_batch_of_one_rank(shape, seed, step):
    tokens, seq_length, global_batch = shape
    batches = Batches(stream_of(tokens), seq_length, global_batch, seed)
    inputs, labels = batches.batch(step)
    assert inputs.shape == labels.shape == (global_batch, seq_length)
    assert inputs.dtype == labels.dtype == torch.int64
    for ranks in (1, 2, 3):
        parts = [batches.batch(step, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


@given(SHAPES, st.integers(0, 3))
def test_rows_are_consecutive_tokens_and_labels_are_the_next(shape, seed):
    tokens, seq_length, global_batch = shape
    inputs, labels = Batches(stream_of(tokens), seq_length, global_batch, seed).batch(1)
    assert torch.equal(labels, (inputs + 1) % tokens)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


@given(SHAPES, st.integers(0, 3), st.lists(st.integers(0, 30), max_size=5))
def test_resuming_needs_only_the_step(shape, seed, visited):
    tokens, seq_length, global_batch = shape
    used = Batches(stream_of(tokens), seq_length, global_batch, seed)
    for step in visited:
        resumed = Batches(stream_of(tokens), seq_length, global_batch, seed)
        assert all(map(torch.equal, used.batch(step), resumed.batch(step)))


@given(SHAPES, st.integers(0, 3))
def test_an_epoch_sees_every_token_once_but_for_the_remainder(shape, seed):
    tokens, seq_length, _ = shape
    batches = Batches(stream_of(tokens), seq_length, 1, seed)
    for epoch in range(3):
        first = epoch * batches.windows_per_epoch
        seen = Counter()
        for step in range(first, first + batches.windows_per_epoch):
            seen.update(batches.batch(step)[0].flatten().tolist())
        assert set(seen.values()) == {1}
        assert len(seen) == tokens - tokens % seq_length


def test_every_token_is_left_out_equally_often():
    batches = Batches(stream_of(10), 4, 2, 0)  # two windows, one batch, two tokens left out
    seen = Counter(token for epoch in range(1000) for token in batches.batch(epoch)[0].flatten().tolist())
    assert sorted(seen) == list(range(10)) and all(abs(count - 800) < 60 for count in seen.values())


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return tuple(Batches(stream_of(1000), 10, 100, seed).batch(epoch)[0][:, 0].tolist())

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_batch_errors():
    with pytest.raises(ValueError, match="has 16 tokens, .* 16 .* needs 17"):
        Batches(stream_of(16), 16, 2, 0)
    assert Batches(stream_of(17), 16, 2, 0).windows_per_epoch == 1
    with pytest.raises(ValueError, match=r"16 .* 3 data-parallel ranks \(16 % 3 = 1\)"):
        Batches(stream_of(17), 16, 16, 0).batch(0, rank=0, ranks=3)


@given(st.integers(2, 60), st.integers(1, 20))
def test_windows_predict_every_token_once(tokens, seq_length):
    stream = Tokens(torch.arange(100, 100 + tokens, dtype=torch.uint8), tokens)
    inputs, labels = windows(stream, seq_length)
    assert inputs.shape == labels.shape and inputs.shape[1] == seq_length
    assert inputs.dtype == labels.dtype == torch.int64
    predicted = labels != -100
    assert labels[predicted].tolist() == list(range(101, 100 + tokens))
    assert torch.equal(inputs[predicted] + 1, labels[predicted])
    assert (~predicted).sum() < seq_length and not inputs[~predicted].any()


def test_windows_need_two_tokens():
    with pytest.raises(ValueError, match=r"1 token\(s\)"):
        windows(stream_of(1), 4)


# The demo's corpus (examples/corpus.py)


@pytest.fixture(scope="module")
def corpus():
    path = Path(__file__).resolve().parents[3] / "examples" / "corpus.py"
    spec = importlib.util.spec_from_file_location("corpus", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_corpus_holds_out_text_that_training_does_not_repeat(corpus, tmp_path):
    train_paths, held_out_paths = corpus.write_corpus(tmp_path)
    train, held_out = read_documents([tmp_path / "train"]), read_documents([tmp_path / "held_out"])
    assert (len(train), len(held_out)) == (len(train_paths), len(held_out_paths))
    topics = read_documents([path for path in train_paths if path.name.startswith("topic-")])
    assert 20_000 <= sum(map(len, held_out)) and 400_000 <= sum(map(len, topics))
    assert sum(map(len, train)) > 1_000_000
    known = {text[i : i + 60] for text in train for i in range(len(text) - 59)}
    grams = [text[i : i + 60] for text in held_out for i in range(len(text) - 59)]
    assert sum(gram in known for gram in grams) / len(grams) < 0.02
    before = {path: path.read_bytes() for path in train_paths}
    only_topics, same_held_out = corpus.write_corpus(tmp_path, extra=False)
    assert sorted((tmp_path / "train").iterdir()) == only_topics and same_held_out == held_out_paths
    assert [path for path in before if path.name.startswith("topic-")] == only_topics
    assert all(before[path] == path.read_bytes() for path in only_topics)


def test_corpus_of_docstrings_with_nul(corpus, tmp_path, monkeypatch):
    """As in base64 of Python 3.14; the reader of documents would take the file for a binary one."""
    (tmp_path / "base64.py").write_text(f'"""{"A long text. " * 20}b"\\0" is NUL."""')
    monkeypatch.setattr(corpus, "LIBRARY", tmp_path)
    train_paths, _ = corpus.write_corpus(tmp_path / "corpus")
    (path,) = (path for path in train_paths if path.name == "docstrings-base64.txt")
    assert read_documents(path)[0].endswith('b"\\0" is NUL.\n')


def test_corpus_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["corpus.py", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match=r"/file: Not a directory$"):
        corpus.main()


def test_corpus_leaves_repetitions_of_held_out_topics_out_of_training(corpus, tmp_path, monkeypatch):
    topics = corpus._topics()
    altered = {name: text for name, text in topics.items() if name != "power"}
    altered["repeats import"] = "Changed. " + topics["import"]
    altered["quotes calls"] = topics["calls"][1000:1080]
    monkeypatch.setattr(corpus, "_topics", lambda: altered)
    train_paths, held_out_paths = corpus.write_corpus(tmp_path, extra=False)
    names = {path.name for path in train_paths}
    assert "topic-repeats import.txt" not in names and "topic-quotes calls.txt" in names
    assert "topic-import.txt" in {path.name for path in held_out_paths}
    assert "topic-power.txt" not in names | {path.name for path in held_out_paths}


def test_corpus_without_pydoc_data_is_one_clear_error(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match="carries no pydoc_data"):
        corpus.write_corpus(tmp_path)


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
def test_a_full_disk_leaves_no_part_of_a_tokenizer(tmp_path):
    """Of one that was read from files, which take more room than the disk has."""
    write_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("a text")
    data = ["--data", str(tmp_path / "text.txt"), "--tokenizer-model", str(tmp_path / "tokenizer")]
    corpus = Corpus(parse_options([*TINY, *data]))
    with small_disk(tmp_path / "disk", 4) as disk:
        with pytest.raises(OSError, match="No space left on device"):
            corpus.write_tokenizer(disk)
        assert os.listdir(disk) == []
    corpus.write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer/tokenizer.json").read_bytes()
