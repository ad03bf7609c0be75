"""`megatron-ssm prepare`: tokenizes text into a Megatron indexed dataset, PREFIX.bin and PREFIX.idx.

In: JSON lines, Parquet, datasets of Hugging Face, or plain text; a tokenizer. Out: the tokens of all documents, each
followed by the end-of-text id, in the format of Megatron's `IndexedDataset`, and PREFIX.json, which says how they were made.

Documents are read and written as a stream, so memory does not grow with the text. Tokens are appended to PREFIX.bin.partial.
A journal beside it records how many of them are complete; a command that was interrupted continues from there.
"""

import gzip
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from megatron_ssm.engine.special_tokens import special_tokens
from megatron_ssm.engine.text import BYTE_END_OF_TEXT_ID, END_OF_TEXT, load_tokenizer

from .documents import JSON_LINES, files_of, read_documents, text_of_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096  # the most that are tokenized at once
JOURNAL_TOKENS = 1 << 24  # tokens between two records in the journal
MAGIC, INDEX_VERSION = b"MMIDIDX\0\0", 1  # the beginning of a file .idx, as Megatron writes it
TYPE_CODES = {np.uint16: 8, np.int32: 4}  # Megatron's numbers of dtypes
UINT16_VOCABULARY = 65_500  # larger vocabularies are int32, as in Megatron


def end_of_text_id_of(tokenizer: "Tokenizer", folder: Path) -> int:
    """The id of the end-of-text token: the eos_token of the tokenizer's configuration, otherwise one of the usual names."""
    names = [END_OF_TEXT, "</s>"]
    own = special_tokens(folder).get("eos_token")
    for name in names if own is None else [own, *names]:
        if (token_id := tokenizer.token_to_id(name)) is not None:
            return token_id
    raise ValueError(f"{folder} names no eos_token in tokenizer_config.json, and has none of {', '.join(names)}")


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, and the values that PREFIX.json records about it. tokenizer: None for UTF-8 bytes."""

    tokenizer: Any
    vocab_size: int
    end_of_text_id: int
    digest: str

    @classmethod
    def of(cls, source: str) -> "TokenizerInfo":
        """Load a tokenizer. source: "byte", a directory with a tokenizer.json, or that file. ValueError or OSError for
        anything else.
        """
        if source == "byte":
            return cls(None, BYTE_END_OF_TEXT_ID + 1, BYTE_END_OF_TEXT_ID, "byte")
        folder = Path(source).parent if Path(source).name == "tokenizer.json" else Path(source)
        tokenizer = load_tokenizer(folder)
        vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        return cls(tokenizer, vocab_size, end_of_text_id_of(tokenizer, folder), digest)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without special tokens."""
        if self.tokenizer is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encodings]


@dataclass
class DatasetSize:
    """The size of a dataset. text_bytes: the number of UTF-8 bytes of its documents."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    tokenizer: str = "byte",
    column: str = "text",
    separator: str | None = None,
    dataset: str | None = None,
    split: str = "train",
    shows_progress: bool = False,
) -> DatasetSize:
    """Tokenize documents into OUT.bin and OUT.idx, and return what they hold.

    Args:
        inputs: Files, or directories that stand for all files below them: JSON lines (.jsonl, .ndjson; also with .gz),
            Parquet (.parquet) and UTF-8 text, of which each file is a document.
        out: The path of the result without its suffix.
        tokenizer: "byte", a directory with a tokenizer.json, or such a file.
        column: The field of each JSON line, or the column of each row, that contains the text.
        separator: In files of text, each line that is equal to it ends a document.
        dataset: A directory written by `datasets.save_to_disk`, or the name of a dataset on the Hugging Face hub.
        split: The split of `dataset`.
        shows_progress: Draw a bar on stderr.

    Raises:
        ValueError: An input or the tokenizer is not what it should be; the message names the file and the line. What was
            written before stays for the next call.
        OSError: A file cannot be read or written.
    """
    from tqdm import tqdm

    source, out = TokenizerInfo.of(tokenizer), Path(out)
    files = _described(inputs)
    recipe = {"inputs": files, "dataset": dataset and [dataset, split], "column": column} | {
        "separator": separator, "tokenizer": source.digest, "end_of_text_id": source.end_of_text_id,
    }  # fmt: skip
    rows = _texts(inputs, column, separator) if dataset is None else _rows_of(dataset, split, column)
    texts = ((text, size) for text, size in rows if text.strip())  # without documents of white space only
    total = None if dataset else sum(size for _, size, _ in files)
    progress_bar = tqdm(total=total, unit="B", unit_scale=True, disable=not shows_progress, desc="tokenizing")
    with _Writer(out, recipe, source) as writer, progress_bar as bar:
        _tokenize(texts, source, writer, bar)
    return writer.prepared


def _tokenize(texts: Iterable[tuple[str, int]], source: TokenizerInfo, writer: "_Writer", bar: Any) -> None:
    """Append all documents but those that are written already. Reads and writes while other threads tokenize."""
    texts = iter(texts)
    for _, size in islice(texts, writer.prepared.documents):
        bar.update(size)
    with ThreadPoolExecutor(1) as pool:
        tokenized_batch = None
        for batch in _batches(texts):
            running = pool.submit(source.encode, [text for text, _ in batch])
            if tokenized_batch is not None:
                writer.append(*tokenized_batch)
            tokenized_batch = [text for text, _ in batch], running.result()
            bar.update(sum(size for _, size in batch))
        if tokenized_batch is not None:
            writer.append(*tokenized_batch)


def _batches(texts: Iterator[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    characters = 0
    for pair in texts:
        batch.append(pair)
        characters += len(pair[0])
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends documents to OUT.bin.partial; when the block ends without an error, they become OUT.bin and OUT.idx."""

    def __init__(self, out: Path, recipe: dict, source: TokenizerInfo):
        self._out, self._recipe, self._end = out, recipe, source.end_of_text_id
        self._source = source
        self._dtype = np.dtype(np.uint16 if source.vocab_size < UINT16_VOCABULARY else np.int32)
        self.prepared = DatasetSize()
        self._recorded = 0  # tokens

    def _path(self, suffix: str) -> Path:
        return self._out.with_name(self._out.name + suffix)

    def __enter__(self) -> "_Writer":
        self._out.parent.mkdir(parents=True, exist_ok=True)
        journal = self._path(".journal.json")
        if journal.exists():
            journal_entries = json.loads(journal.read_text())
            if journal_entries["recipe"] == self._recipe:
                self.prepared = DatasetSize(**journal_entries["prepared"])
        self._recorded = self.prepared.tokens
        self._bin = self._open(".bin.partial", self.prepared.tokens * self._dtype.itemsize)
        self._lengths = self._open(".lengths.partial", self.prepared.documents * 4)
        return self

    def _open(self, suffix: str, size: int) -> IO[bytes]:
        """A partial file, cut at what the journal has recorded."""
        path = self._path(suffix)
        path.touch()
        os.truncate(path, size)
        return open(path, "ab")

    def append(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> None:
        """Append documents."""
        end = np.array([self._end])
        tokens = np.concatenate([part for each in ids for part in (each, end)]).astype(self._dtype)
        lengths = np.array([len(each) + 1 for each in ids], np.int32)
        self._bin.write(tokens.tobytes())
        self._lengths.write(lengths.tobytes())
        self.prepared.documents += len(ids)
        self.prepared.tokens += len(tokens)
        self.prepared.text_bytes += sum(len(text.encode()) for text in texts)
        if self.prepared.tokens - self._recorded >= JOURNAL_TOKENS:
            self._record()

    def _record(self) -> None:
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        temporary = self._path(".journal.json.partial")
        temporary.write_text(json.dumps({"recipe": self._recipe, "prepared": asdict(self.prepared)}))
        temporary.replace(self._path(".journal.json"))
        self._recorded = self.prepared.tokens

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._record()
        self._bin.close()
        self._lengths.close()
        if kind is None:
            if not self.prepared.documents:
                raise ValueError("no text in the inputs")
            self._finish()

    def _finish(self) -> None:
        lengths = np.fromfile(self._path(".lengths.partial"), np.int32)
        index = self._path(".idx.partial")
        with open(index, "wb") as file:
            write_index(file, lengths, self._dtype)
        made = asdict(self.prepared) | {
            "tokenizer": self._source.digest, "vocab_size": self._source.vocab_size, "end_of_text_id": self._end,
        }  # fmt: skip
        self._path(".json").write_text(json.dumps(made, indent=1) + "\n")
        self._path(".idx").unlink(missing_ok=True)  # of an earlier dataset
        self._path(".bin.partial").replace(self._path(".bin"))
        index.replace(self._path(".idx"))  # last: a dataset is complete if it has an index
        for suffix in (".journal.json", ".lengths.partial"):
            self._path(suffix).unlink(missing_ok=True)


def write_index(file: IO[bytes], lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the index of a dataset in which each document is one sequence, as Megatron's `IndexedDatasetBuilder` does."""
    file.write(MAGIC + struct.pack("<QBQQ", INDEX_VERSION, TYPE_CODES[dtype.type], len(lengths), len(lengths) + 1))
    ends = lengths.astype(np.int64).cumsum()
    file.write(lengths.astype(np.int32).tobytes())
    file.write(((ends - lengths) * dtype.itemsize).tobytes())
    file.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


# Documents


def _described(inputs: Sequence[str | Path]) -> list[list]:
    """[[path, bytes, time of the last change]] of all input files."""
    files = [file for path in inputs for file in files_of(Path(path))]
    return [[str(file.absolute()), status.st_size, status.st_mtime_ns] for file in files for status in (file.stat(),)]


def _texts(inputs: Sequence[str | Path], column: str, separator: str | None) -> Iterator[tuple[str, int]]:
    """Pairs (document, its approximate size in the file in bytes) of all inputs."""
    for path in inputs:
        for file in files_of(Path(path)):
            suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
            if suffixes[-1:] == [".parquet"]:
                found = _parquet_texts(file, column)
            elif suffixes[-1:] == [".gz"] or set(suffixes[-1:]) & set(JSON_LINES):
                found = _json_texts(file, column)
            else:
                found = ((text, len(text)) for text in read_documents(file, separator))
            yield from found


def _json_texts(path: Path, column: str) -> Iterator[tuple[str, int]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield text_of_line(path, number, line, column), len(line)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is cut off or is not gzip: {error}") from None


def _parquet_texts(path: Path, column: str) -> Iterator[tuple[str, int]]:
    """The documents of a Parquet file, read in batches of rows."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file, or is cut off: {error}") from None
    if column not in file.schema_arrow.names:
        raise ValueError(f"{path} has no column {column!r}: it has {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(columns=[column]):
        for text in batch.column(0).to_pylist():
            yield _text_and_size(text, str(path), column)


def _rows_of(dataset: str, split: str, column: str) -> Iterator[tuple[str, int]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"--dataset {dataset} needs the package datasets: pip install datasets") from None
    if Path(dataset).is_dir():
        found = datasets.load_from_disk(dataset)
        rows = found[split] if isinstance(found, datasets.DatasetDict) else found
    else:
        rows = datasets.load_dataset(dataset, split=split, streaming=True)
    for row in rows:
        yield _text_and_size(row.get(column), dataset, column)


def _text_and_size(text: object, where: str, column: str) -> tuple[str, int]:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {column!r} is {type(text).__name__} in some row, and must be a string")
    return text, len(text)
