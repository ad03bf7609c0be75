"""`make demo` from a fresh clone of HEAD, on two cores (about 4 min).

The claim: `make demo` takes at most 3 minutes, installation included, and at least 95 % of its model's replies to held-out
phrases are exact. pip uses its cache of packages, if there is one.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.support.tables import markdown, publish

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
WHOLE = "whole `make demo` s (installation included)"
HEADER = ["installation s", "training s", WHOLE, "exact replies"]


def run(command: list[str], directory: str | Path) -> tuple[float, str]:
    """Run a command in `directory`, print its output, and return (seconds, output)."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    print(f"$ {' '.join(command)}   # {seconds:.0f} s\n{done.stdout}", flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return seconds, done.stdout


def results(output: str) -> list[str]:
    """The seconds of training and the percentage of exact replies, as the demo prints them."""
    return [re.search(pattern, output)[1] for pattern in (r"trained in (\d+) s", r"([\d.]+)% of \d+ replies")]


def main() -> None:
    """Measure in a temporary clone and publish the table."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as directory:
        clone = Path(directory) / "clone"
        run(["git", "clone", "--quiet", str(ROOT), str(clone)], directory)
        installing, _ = run(["make", ".venv/library"], clone)
        running, output = run(["make", "demo"], clone)
    training, exact = results(output)
    publish("demo", markdown(HEADER, [[f"{installing:.0f}", training, f"{installing + running:.0f}", f"{exact}%"]]))


if __name__ == "__main__":
    main()
