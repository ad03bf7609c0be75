"""Interleaved timing, and tables that are written into the pages of docs/, between their markers."""

import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs"


def interleaved(
    functions: dict[str, Callable[[], object]], repetitions: int = 10, in_a_row: int = 0
) -> dict[str, float]:
    """{name: median seconds} of {name: function}. The functions take turns.

    in_a_row: 0: in a turn a function runs once, and the first turn is not counted. Otherwise each turn is one run that is
    not counted and this many that are, so that it makes no difference what ran before and changed the processor's caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(math.ceil(repetitions / in_a_row) if in_a_row else repetitions + 1):
        for name, function in functions.items():
            for run in range(in_a_row + 1):
                start = time.perf_counter()
                function()
                if run or (turn and not in_a_row):
                    seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def published(name: str) -> list[list[str]]:
    """The header and the rows of a table in docs/; an empty list if it has not been measured."""
    marker = f"<!-- {name} -->\n"
    text = next(text for page in DOCUMENTATION.rglob("*.md") if marker in (text := page.read_text(encoding="utf-8")))
    lines = text.split(marker)[1].split("<!-- end -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[:1] + rows[2:]


def print_or_publish(name: str, table: str) -> None:
    """Publish a table; or only print it, if the command line has chosen some of its rows."""
    if sys.argv[1:]:
        print(table)
    else:
        publish(name, table)


def publish(name: str, table: str) -> None:
    """Print the table and write it into the page of docs/ that has the lines `<!-- NAME -->` and `<!-- end -->`.

    It replaces what was between these lines. ValueError: no page has them.
    """
    print(table)
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n)(?:(?!<!-- ).)*(<!-- end -->)", flags=re.DOTALL)
    for page in sorted(DOCUMENTATION.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if pattern.search(text):
            page.write_text(pattern.sub(lambda m: m[1] + table + "\n" + m[2], text), encoding="utf-8")
            return
    raise ValueError(
        f"no page of docs/ has a table {name!r}: add the lines `<!-- {name} -->` and `<!-- end -->` to one"
    )
