"""The demo's text: English technical prose that is part of every CPython, so that nothing is downloaded.

python examples/corpus.py DIRECTORY writes DIRECTORY/train/*.txt and DIRECTORY/held_out/*.txt and prints how large they are.

It consists of the texts of `help("topic")` (pydoc_data: 79 topics, about 465 KB) and the docstrings of the standard library.
Many topics repeat others almost verbatim, so a random held-out split would measure memorization. The held-out topics below
repeat no other topic (measured on Python 3.10 to 3.13), and texts that repeat them are left out of the training text.
"""

import argparse
import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT = ("binary", "calls", "dict", "import", "objects", "power", "raise", "subscriptions")
NGRAM = 60
# A topic with more than this share of the held-out 60-grams is left out of the training text. A docstring must have none.
TOPIC_LIMIT = 0.01

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
DOCSTRING_BYTES = 2_000_000
SHORTEST_DOCSTRING = 100  # characters; shorter docstrings are hardly prose
# Modules that are tests, tables, or not documented for users.
EXCLUDED_MODULES = {"antigravity", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "this",
            "turtledemo"}  # fmt: skip


def write_corpus(directory: str | Path, extra: bool = True) -> tuple[list[Path], list[Path]]:
    """Write the corpus below `directory`; return (train_paths, held_out_paths), sorted lists of Path.

    There is one file for each topic (train/topic-NAME.txt, held_out/topic-NAME.txt), and with `extra` one for each module of
    the standard library (train/docstrings-NAME.txt). Files of an earlier call are removed. The same Python version writes
    the same bytes. FileNotFoundError if this Python has no pydoc_data.
    """
    topics = _topics()
    for name in ("train", "held_out"):
        (Path(directory) / name).mkdir(parents=True, exist_ok=True)  # before the work, so that an error comes at once
    held_out = {name: topics[name] for name in HELD_OUT if name in topics}
    held_out_ngrams = _ngrams(held_out.values())
    train = {
        f"topic-{name}": text
        for name, text in topics.items()
        if name not in held_out and _count_shared(text, held_out_ngrams) <= TOPIC_LIMIT * len(held_out_ngrams)
    }
    if extra:
        train |= {f"docstrings-{name}": text for name, text in _docstrings(held_out_ngrams).items()}
    held_out_files = {f"topic-{name}": text for name, text in held_out.items()}
    return _write(Path(directory) / "train", train), _write(Path(directory) / "held_out", held_out_files)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            f"{sys.executable} carries no pydoc_data, the demo's text; on Debian and Ubuntu it comes with the packages "
            "python3 and libpython3-stdlib (python3-minimal lacks it)"
        ) from error
    return topics


def _count_shared(text: str, held_out_ngrams: set[str]) -> int:
    """The number of held-out 60-grams that occur in the text."""
    return len(held_out_ngrams & _ngrams([text]))


def _ngrams(texts: Iterable[str]) -> set[str]:
    """The 60-grams of characters of the texts; none spans two texts."""
    return {text[i : i + NGRAM] for text in texts for i in range(len(text) - NGRAM + 1)}


def _docstrings(held_out_ngrams: set[str]) -> dict[str, str]:
    """{name: docstrings as one text} of the public modules and packages of the standard library.

    Modules are in alphabetical order. Each docstring is kept where it first occurs. There are at most DOCSTRING_BYTES.
    """
    texts, seen, bytes_left = {}, set(), DOCSTRING_BYTES
    for name, files in documented_modules():
        found = [text for file in files for text in _docstrings_of(file)]
        new = [text for text in dict.fromkeys(found) if text not in seen and not _count_shared(text, held_out_ngrams)]
        seen.update(new)
        text = "\n\n\n".join(new) + "\n"
        bytes_left -= len(text.encode())
        if bytes_left < 0:
            break
        if new:
            texts[name] = text
    return texts


def documented_modules() -> Iterator[tuple[str, list[Path]]]:
    """(name, its Python files) of the public modules and packages of the standard library, in alphabetical order."""
    for name in sorted(sys.stdlib_module_names):
        if not name.startswith("_") and name not in EXCLUDED_MODULES:
            files = (LIBRARY / f"{name}.py", *sorted((LIBRARY / name).rglob("*.py")))
            yield name, [file for file in files if file.is_file() and _is_documented(file)]


def _is_documented(file: Path) -> bool:
    return EXCLUDED_MODULES.isdisjoint(file.relative_to(LIBRARY).parts)


def _docstrings_of(file: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, documented))
    docstrings = (ast.get_docstring(node) for node in nodes)
    return [text for text in docstrings if text and len(text) >= SHORTEST_DOCSTRING]


def _write(directory: Path, texts: dict[str, str]) -> list[Path]:
    for pattern in ("topic-*.txt", "docstrings-*.txt"):
        for stale in directory.glob(pattern):
            stale.unlink()
    for name, text in texts.items():
        text = text.replace("\0", "\\0")  # read_documents takes a file with a NUL for a binary one
        (directory / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
    return sorted(directory / f"{name}.txt" for name in texts)


def main() -> None:
    """Write the files and print how large they are."""
    parser = argparse.ArgumentParser(description="Write the text files and print how large they are.")
    parser.add_argument("directory")
    directory = parser.parse_args().directory
    try:
        train_paths, held_out_paths = write_corpus(directory)
    except OSError as error:
        sys.exit(f"{directory}: {error.strerror or error}")
    for kind, paths in (("training text", train_paths), ("held out", held_out_paths)):
        print(f"{kind}: {len(paths)} files, {sum(path.stat().st_size for path in paths):,} bytes")


if __name__ == "__main__":
    main()
