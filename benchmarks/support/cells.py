"""Cells of benchmarks: one setting, measured on newly started ranks.

The ranks run on this machine, or in network namespaces behind links of a given rate (launch/netlab.sh, which needs
root). A benchmark's file is also the program of its ranks: FILE --cell OUT ARGUMENTS.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NETLAB = ROOT / "launch" / "netlab.sh"
CELL = "--cell"
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}  # the last: of torchrun


def cell_arguments() -> list[str] | None:
    """On a rank: the arguments of its cell, of which the first is the file for the result. Else None."""
    return sys.argv[2:] if sys.argv[1:2] == [CELL] else None


def measure_cell(
    file: str | Path, ranks: int, rate: str | None, *arguments: object, burst: str = "128kb", per_node: int = 1
) -> Any:
    """Run `file` on `ranks` ranks and return the result of rank 0.

    rate: of the links (200mbit, 1gbit, none); None: the ranks share this machine. burst: what an idle link lets through at
    once. per_node: so many consecutive ranks share one link, and have no limit among themselves. arguments: passed on to
    the ranks. CalledProcessError: a rank failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        program = [Path(file).resolve(), CELL, out.name, *arguments]
        if rate is None:
            torchrun(ranks, *program, env=QUIET)
        else:
            lab = [NETLAB, "run", "--rate", rate, "--burst", burst, ranks // per_node]
            command = [sys.executable, *program] if per_node == 1 else _on_nodes(per_node, program)
            subprocess.run([*map(str, [*lab, *command])], check=True, cwd=ROOT, env=os.environ | QUIET)
        return json.loads(Path(out.name).read_text())


def _on_nodes(per_node: int, program: Sequence[object]) -> list[object]:
    """A command that starts `per_node` ranks of a program in each namespace of the lab, as torchrun does on each node."""
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node {per_node} --nnodes $WORLD_SIZE"
    address = "--node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    return ["bash", "-c", f'exec {torchrun} {address} "$@"', "torchrun", *program]


def measured_cells(file: str | Path, cells: Sequence[Any], **options: Any) -> dict:
    """{cell: its result} of all cells, or of those whose numbers the command line gives.

    A cell has the fields ranks and rate, and may have per_node. Its ranks get its number as their argument. options: of
    `measure_cell`.
    """
    numbers = [int(number) for number in sys.argv[1:]] or range(len(cells))
    return {
        cell: measure_cell(file, cell.ranks, cell.rate, n, per_node=getattr(cell, "per_node", 1), **options)
        for n, cell in ((n, cells[n]) for n in numbers)
    }


def torchrun(ranks: int, *program: object, env: dict[str, str] | None = None, quiet: bool = False) -> None:
    """Run a Python program, with its arguments, on ranks of this machine, in the repository's root.

    env: added environment variables. quiet: whether to drop what it prints to stdout.
    """
    command: list[object] = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        "--",
    ]
    stdout = subprocess.DEVNULL if quiet else None
    subprocess.run([*map(str, [*command, *program])], check=True, cwd=ROOT, env=os.environ | (env or {}), stdout=stdout)


def write_result(out: str, result: object) -> None:
    """Write a cell's result, as JSON, to the file that `cell_arguments` names first; only rank 0 calls this."""
    Path(out).write_text(json.dumps(result))
