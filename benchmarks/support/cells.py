"""Benchmarks whose ranks are processes of their own: on this machine, or in network namespaces behind links of a given
rate (launch/netlab.sh; root). A benchmark is also the program of its ranks: FILE --cell OUT ARGUMENTS.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NETLAB = ROOT / "launch" / "netlab.sh"
CELL = "--cell"
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def cell_arguments() -> list[str] | None:
    """The arguments of this rank's cell, the file for rank 0's result first; None in the program that starts ranks."""
    return sys.argv[2:] if sys.argv[1:2] == [CELL] else None


def measure_cell(file, ranks: int, rate: str | None, *arguments, burst="128kb"):
    """What rank 0 of `ranks` wrote to its OUT, as JSON; rate: of the links (200mbit, 1gbit, none); None: no network."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        program = [Path(file).resolve(), CELL, out.name, *arguments]
        if rate is None:
            torchrun(ranks, *program, env=QUIET)
        else:
            lab = [NETLAB, "run", "--rate", rate, "--burst", burst, str(ranks), sys.executable]
            subprocess.run([*map(str, [*lab, *program])], check=True, env=os.environ | QUIET)
        return json.loads(Path(out.name).read_text())


def measured_cells(file, cells, **options) -> dict:
    """{cell: its result} of all cells, or of those whose numbers the command line gives; their programs get the number."""
    numbers = [int(number) for number in sys.argv[1:]] or range(len(cells))
    return {cells[n]: measure_cell(file, cells[n].ranks, cells[n].rate, n, **options) for n in numbers}


def torchrun(ranks: int, *program, env=None) -> None:
    """Run a Python program on ranks of this machine, from the repository's root."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--"]
    subprocess.run([*map(str, [*command, *program])], check=True, cwd=ROOT, env=os.environ | (env or {}))


def write_result(out: str, result) -> None:
    """Give a cell's result back; called by rank 0 only."""
    Path(out).write_text(json.dumps(result))
