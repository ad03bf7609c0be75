"""Training data from text and JSON lines: documents, tokens, the batch of each step, measures to compare a model with."""

import contextlib
import json
import os
import random
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

IGNORE_INDEX = -100


# Documents

JSON_LINES = (".jsonl", ".ndjson")
EXPECTED = "expected UTF-8 text or JSON lines (.jsonl)"
SUFFIXES = dict.fromkeys((".bin", ".idx"), "part of a Megatron indexed dataset")
MAGIC = {  # the first bytes of files
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh91AY": "compressed by bzip2",
    b"\xfd7zXZ\0": "compressed by xz",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"ARROW1\0\0": "Arrow",
    b"\xff\xff\xff\xff": "a stream of Arrow",
    b"MMIDIDX\0\0": "part of a Megatron indexed dataset",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "HDF5",
    b"%PDF-": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_documents(paths: Path | str | Iterable[Path | str], separator: str | None = None) -> list[str]:
    """The documents in files of UTF-8 text.

    Each file is a document. With `separator`, each line that is equal to it ends a document. In JSON lines (.jsonl, .ndjson,
    and files of other names whose first line is such an object) each line is an object, and its string `text` is a document.
    A directory stands for all files below it in sorted order, except those whose path has a name that begins with a dot.
    Documents of white space alone are dropped.

    ValueError, naming the file or directory, if one cannot be read, if a file is not UTF-8 or has another format, which is
    named if it is a known one, and if a line of JSON lines has no such string; and if no document is left.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    documents = [text for path in paths for file in _files(Path(path)) for text in _documents_of(file, separator)]
    if not documents:
        raise ValueError(f"no text in {', '.join(map(str, paths)) or 'an empty list of paths'}")
    return documents


def _files(path: Path) -> list[Path]:
    """The file itself, or the files below a directory; ValueError for a directory that cannot be read."""
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, subfolders, names in os.walk(path, onerror=_raise_unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    return sorted(file for file in found if file.is_file())


def _raise_unreadable(error: OSError) -> None:
    """`os.walk` leaves directories out unless this raises."""
    raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error


def _documents_of(path: Path, separator: str | None) -> Iterator[str]:
    """The documents of a file that are not white space alone."""
    text, suffix = _read_text(path), path.suffix.lower()
    if suffix in JSON_LINES or _is_record(text.lstrip().partition("\n")[0]):
        texts = _text_fields(path, text)
    elif suffix == ".json" and _holds_records(text):
        raise ValueError(f"{EXPECTED}, but {path} is one JSON value: write one object with `text` per line")
    else:
        texts = iter([text] if separator is None else _split_at_lines(text, separator))
    return (text for text in texts if text.strip())


def _text_fields(path: Path, lines: str) -> Iterator[str]:
    """The field `text` of each line. ValueError if a line is not an object with such a string."""
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"line {number} of {path} is not a JSON object with a string `text`")
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(f"line {number} of {path}: `text` has half of a surrogate pair, which is no character")
        yield text


def _is_record(line: str) -> bool:
    """Whether a line is a JSON object with the field `text`."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return isinstance(record, dict) and "text" in record
    return False


def _holds_records(text: str) -> bool:
    """Whether a text is one JSON value that is such an object, or an array of them, or an object with such an array."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        arrays = value.values() if isinstance(value, dict) else [value]
        inside = [array[0] for array in arrays if isinstance(array, list) and array]
        return any(isinstance(each, dict) and "text" in each for each in (value, *inside))
    return False


def _read_text(path: Path) -> str:
    """The text of a file, without a byte-order mark."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    kind = SUFFIXES.get(path.suffix.lower()) or next(
        (kind for magic, kind in MAGIC.items() if data.startswith(magic)), None
    )
    if kind is not None:
        raise ValueError(f"{EXPECTED}, but {path} is {kind}")
    if 0 in data:
        raise ValueError(f"{EXPECTED}, but {path} is binary: byte 0x00 at byte offset {data.index(0)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8: byte 0x{byte:02x} at byte offset {error.start}") from error


def _split_at_lines(text: str, line: str) -> list[str]:
    """The parts of `text` between the lines that are equal to `line`."""
    if "\n" in line or "\r" in line:
        raise ValueError(f"the document separator {line!r} is more than one line")
    return re.split(rf"^{re.escape(line)}(?:\r?\n|\r?\Z)", text, flags=re.MULTILINE)


def split_documents(documents: list[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents); `held_out` is the share of the bytes to hold out, between 0 and 1.

    Documents are visited in a random order that depends on `seed`, and each one that still fits into the share is held out;
    if none fits, the smallest is. Both lists keep the order of `documents`. ValueError unless each list can get one
    document.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"the held-out share is {held_out}, not between 0 and 1")
    if len(documents) < 2:
        raise ValueError(f"{len(documents)} document(s): at least 2 are needed for training and held-out text")
    sizes = [len(document.encode()) for document in documents]
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    chosen, bytes_left = set(), held_out * sum(sizes)
    for i in order:
        if sizes[i] <= bytes_left:
            chosen.add(i)
            bytes_left -= sizes[i]
    chosen = chosen or {min(order, key=lambda i: sizes[i])}
    train = [document for i, document in enumerate(documents) if i not in chosen]
    return train, [documents[i] for i in sorted(chosen)]


# Tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as one stream of tokens, in which every document is followed by the end-of-text id."""

    ids: torch.Tensor  # (tokens,), the smallest of uint8, int16 and int32 that holds every id
    text_bytes: int  # UTF-8 bytes of the documents: nats per byte = summed loss / text_bytes


def tokenize(documents: list[str], tokenizer: Any, end_of_text_id: int) -> Tokens:
    """The tokens of `documents` by a `tokenizers.Tokenizer`. Unlike `encode`, `encode_batch` lets other threads run."""
    parts = []
    for document in documents:
        (encoding,) = tokenizer.encode_batch([document], add_special_tokens=False)
        parts += [np.asarray(encoding.ids, np.int32), np.array([end_of_text_id], np.int32)]
    ids = torch.from_numpy(np.concatenate(parts))
    dtype = next(d for d in (torch.uint8, torch.int16, torch.int32) if ids.max() <= torch.iinfo(d).max)
    return Tokens(ids.to(dtype), sum(len(document.encode()) for document in documents))


class Batches:
    """Training batches as a function of (seed, step), so that resuming needs only the step.

    The stream is read as a ring. An epoch starts at a random token, divides the ring into windows of seq_length tokens that
    do not overlap, and takes them in random order. The last tokens, fewer than seq_length, are left out. A batch may contain
    windows of two epochs, and a window may contain the end of a document.
    """

    def __init__(self, stream: Tokens, seq_length: int, global_batch: int, seed: int):
        """ValueError if the stream is shorter than one sequence and the label after it."""
        self.ids, self.seq_length, self.global_batch, self.seed = stream.ids, seq_length, global_batch, seed
        if len(self.ids) <= seq_length:
            raise ValueError(
                f"the training data has {len(self.ids)} tokens, and one sequence of {seq_length} with its last label "
                f"needs {seq_length + 1}"
            )
        self.windows_per_epoch = len(self.ids) // seq_length
        self._starts: dict[int, torch.Tensor] = {}  # of the windows of the current epoch

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of this data-parallel rank, int64 (global_batch / ranks, seq_length); labels[i] = inputs[i + 1].

        Rank r of `ranks` gets the r-th contiguous part of the step's global batch, which is the same for every number of
        ranks. ValueError if the batch does not divide.
        """
        if self.global_batch % ranks:
            raise ValueError(
                f"a global batch of {self.global_batch} does not divide over {ranks} data-parallel ranks "
                f"({self.global_batch} % {ranks} = {self.global_batch % ranks})"
            )
        rows = self.global_batch // ranks
        first = step * self.global_batch + rank * rows
        starts = torch.stack([self._start(sample) for sample in range(first, first + rows)])
        indices = (starts[:, None] + torch.arange(self.seq_length + 1)) % len(self.ids)
        tokens = self.ids[indices].long()  # (rows, seq_length + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _start(self, sample: int) -> torch.Tensor:
        """The index in the stream at which window number `sample`, counted from step 0, begins."""
        epoch, index = divmod(sample, self.windows_per_epoch)
        if epoch not in self._starts:
            self._starts = {epoch: self._draw_starts(epoch)}
        return self._starts[epoch][index]

    def _draw_starts(self, epoch: int) -> torch.Tensor:
        """(windows_per_epoch,): the indices at which the windows of an epoch begin, in the order in which they are taken."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        offset = torch.randint(len(self.ids), (), generator=generator)
        return offset + self.seq_length * torch.randperm(self.windows_per_epoch, generator=generator)


def windows(stream: Tokens, seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole stream in order, for evaluation: (inputs, labels), both int64 (windows, seq_length).

    Every token but the first is a label exactly once. The end of the last window is filled with id 0 and label -100.
    ValueError if there is no token to predict.
    """
    tokens = len(stream.ids)
    if tokens < 2:
        raise ValueError(f"the held-out data has {tokens} token(s): at least 2 are needed to predict one")
    count = -(-(tokens - 1) // seq_length)
    inputs = torch.zeros(count * seq_length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    inputs[: tokens - 1] = stream.ids[:-1]
    labels[: tokens - 1] = stream.ids[1:]
    return inputs.view(count, seq_length), labels.view(count, seq_length)


# Measures of text


def bigram_nats_per_byte(train_texts: Iterable[str], held_out_texts: Collection[str]) -> float:
    """The loss of a bigram model over bytes on the held-out texts, in nats per byte: a baseline for trained models.

    As for a trained model, each text is followed by an end of text that is predicted too, so there are 257 symbols. With
    add-one smoothing: p(b | a) = (count(a, b) + 1) / (count(a) + 257). On the demo's text the best constant instead of 1
    would be 0.02 nats better.
    """
    counts = _bigram_counts(train_texts) + 1
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    held_out = _bigram_counts(held_out_texts)
    return -(held_out * log_p).sum().item() / sum(len(text.encode()) for text in held_out_texts)


def _bigram_counts(texts: Iterable[str]) -> torch.Tensor:
    """float64 (257, 257): how often symbol b follows symbol a; symbol 256 precedes the first text and follows each text."""
    end = torch.tensor([256], dtype=torch.int64)
    parts = [end]
    for text in texts:
        parts += [torch.tensor(list(text.encode()), dtype=torch.int64), end]
    symbols = torch.cat(parts)
    return torch.bincount(symbols[:-1] * 257 + symbols[1:], minlength=257 * 257).double().view(257, 257)


def ngrams(texts: Iterable[str], n: int) -> set[str]:
    """The character n-grams of the texts; none spans two texts."""
    return {text[i : i + n] for text in texts for i in range(len(text) - n + 1)}


def ngram_overlap(held_out: Collection[str], train: Iterable[str], n: int = 60) -> float:
    """The share, from 0 to 1, of the held-out texts' character n-grams that occur in a training text.

    An n-gram counts as often as it occurs in the held-out texts. 0 if they have none.
    """
    wanted = ngrams(held_out, n)
    shared: set[str] = set()
    for text in train:
        shared.update(gram for gram in (text[i : i + n] for i in range(len(text) - n + 1)) if gram in wanted)
    positions = [text[i : i + n] in shared for text in held_out for i in range(len(text) - n + 1)]
    return sum(positions) / len(positions) if positions else 0.0


def longest_shared(sample: str, train: Collection[str]) -> str:
    """The longest substring of `sample` that occurs in a training text; the first of several."""
    longest = ""
    for start in range(len(sample)):
        while start + len(longest) < len(sample):
            longer = sample[start : start + len(longest) + 1]
            if not any(longer in text for text in train):
                break
            longest = longer
    return longest
