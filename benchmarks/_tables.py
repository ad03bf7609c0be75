"""What the benchmarks share: interleaved timing, and tables that go into README.md between their markers."""

import re
import statistics
import time
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def interleaved(contestants: dict, repetitions: int = 10) -> dict[str, float]:
    """Median seconds of each contestant (name: function without arguments), run in turn, after one run to warm up."""
    seconds = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, function in contestants.items():
            start = time.perf_counter()
            function()
            if repetition:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(name: str, table: str) -> None:
    """Print the table and put it into README.md between `<!-- NAME -->` and `<!-- end -->`."""
    print(table)
    text = README.read_text(encoding="utf-8")
    pattern = rf"(<!-- {re.escape(name)} -->\n)(?:(?!<!-- ).)*(<!-- end -->)"
    if not re.search(pattern, text, flags=re.DOTALL):
        raise ValueError(f"README.md has no table {name!r}")
    README.write_text(re.sub(pattern, lambda m: m[1] + table + "\n" + m[2], text, flags=re.DOTALL), encoding="utf-8")
