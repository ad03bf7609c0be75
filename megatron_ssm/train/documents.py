"""Documents of text and JSON lines: reading them from files, and holding some of them out."""

import contextlib
import json
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_ssm.checkpoints.disk import in_one_line

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

    Args:
        paths: Files and directories.
        separator: A line that ends a document.

    Raises:
        ValueError: A file or directory, which is named, cannot be read; a file is not UTF-8, or has another format, which
            is named if it is a known one; a line of JSON lines has no such string; no document is left.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    documents = [text for path in paths for file in files_of(Path(path)) for text in _documents_of(file, separator)]
    if not documents:
        raise ValueError(f"no text in {', '.join(map(str, paths)) or 'an empty list of paths'}")
    return documents


def files_of(path: Path) -> list[Path]:
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
    texts: Iterable[str]
    if suffix in JSON_LINES or _is_record(text.lstrip().partition("\n")[0]):
        lines = enumerate(text.split("\n"), start=1)
        texts = (text_of_line(path, number, line) for number, line in lines if line.strip())
    elif suffix == ".json" and _holds_records(text):
        raise ValueError(f"{EXPECTED}, but {path} is one JSON value: write one object with `text` per line")
    else:
        texts = [text] if separator is None else _split_at_lines(text, separator)
    return (text for text in texts if text.strip())


def text_of_line(path: Path, number: int, line: str | bytes, column: str = "text") -> str:
    """The string `column` of the object on a line of JSON lines; ValueError, with path and number, if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"line {number} of {path} is not a JSON object with a string `{column}`")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(f"line {number} of {path}: `{column}` has half of a surrogate pair")
    return text


def _is_record(line: str) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return isinstance(record, dict) and "text" in record
    return False


def _holds_records(text: str) -> bool:
    """Return True if a text is one JSON value: such an object, an array of them, or an object with such an array."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        arrays = value.values() if isinstance(value, dict) else [value]
        inside = [array[0] for array in arrays if isinstance(array, list) and array]
        return any(isinstance(each, dict) and "text" in each for each in (value, *inside))
    return False


def _read_text(path: Path) -> str:
    with in_one_line(f"cannot read {path}", ValueError):
        data = path.read_bytes()
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
    if "\n" in line or "\r" in line:
        raise ValueError(f"the document separator {line!r} is more than one line")
    return re.split(rf"^{re.escape(line)}(?:\r?\n|\r?\Z)", text, flags=re.MULTILINE)


def split_documents(documents: list[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents).

    Documents are visited in a random order that depends on `seed`, and each one that still fits into the share is held out;
    if none fits, the smallest is. Both lists keep the order of `documents`. held_out: the share of the bytes, between 0 and
    1. ValueError for fewer than two documents, or a share out of range.
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
