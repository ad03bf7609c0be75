"""Benchmarks whose ranks are processes in network namespaces, behind links of a given rate (launch/netlab.sh; root)."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NETLAB = Path(__file__).resolve().parent.parent / "launch" / "netlab.sh"
CELL = "--cell"  # a benchmark called with it is one rank of a cell: FILE --cell OUT ARGUMENTS


def cell_arguments() -> list[str] | None:
    """The arguments of this rank's cell, the file for rank 0's result first; None in the program that starts ranks."""
    return sys.argv[2:] if sys.argv[1:2] == [CELL] else None


def measure_cell(file, ranks: int, rate: str, *arguments, burst="128kb"):
    """What rank 0 of `ranks` wrote to its OUT, as JSON; the links let `rate` (200mbit, 1gbit, none) through both ways."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        lab = [NETLAB, "run", "--rate", rate, "--burst", burst, str(ranks)]
        program = [sys.executable, Path(file).resolve(), CELL, out.name, *map(str, arguments)]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run([*lab, *program], check=True, env=os.environ | quiet)
        return json.loads(Path(out.name).read_text())


def write_result(out: str, result) -> None:
    """Give a cell's result back; called by rank 0 only."""
    Path(out).write_text(json.dumps(result))
