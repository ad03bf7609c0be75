"""What happens to a run of examples/pretrain.py when something fails, and how fast (about 3 min).

The claim: all ranks that still run have ended within 30 s, or the run goes on. Two ranks of a tiny model with the default
limits, a checkpoint after every second step, and a fault in step 4. The seconds are from the fault to the end of the last
rank. The link is left out without root and iproute2, and the full disk without root.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator

os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import torch

from benchmarks.support.cells import NETLAB
from benchmarks.support.launched import (
    TINY,
    Fault,
    disks_work,
    fill_disk,
    launched,
    namespaces_work,
    small_disk,
    write_text,
)
from benchmarks.support.tables import markdown, publish
from megatron_ssm.checkpoints.folders import find_checkpoints, step_of

DEFAULTS = ["--lost-rank-timeout", "15"]  # TINY has a shorter one
LAB = f"faults-{os.getpid()}"
CUT = ["ip", "netns", "exec", f"{LAB}-bridge", "ip", "link", "set", "port1", "down"]
NAMED = "the others end with code 1, and a line names the rank"
LEAVES = "all write a checkpoint after the same step, and end with code 0"
GOES_ON = [
    ["a step is not finite", "all ranks skip it and say so", "the run goes on", "that one"],
    ["the newest checkpoint is damaged", "`--resume auto` says so and takes the one before", "the run goes on",
     "those between the two"],
]  # fmt: skip


@contextlib.contextmanager
def new_folder() -> Iterator[None]:
    """Work in a new folder with the text."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_text()
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def lab() -> Iterator[None]:
    """Two network namespaces, each with a link."""
    environment = os.environ | {"NETLAB": LAB}
    subprocess.run([NETLAB, "up", "2", "none"], env=environment, check=True)
    try:
        yield
    finally:
        subprocess.run([NETLAB, "down"], env=environment, check=True)


def row(
    name: str,
    effect: str,
    fault: Fault,
    lab_name: str | None = None,
    place: contextlib.AbstractContextManager | None = None,
    done: int = 3,
) -> list[str]:
    """A row of the table: a run with this fault.

    lab_name: of its network. place: entered in the run's folder. done: the steps that are trained when the fault strikes.
    """
    ends = [rank for rank in (0, 1) if rank != fault.rank or fault.action not in (signal.SIGKILL, signal.SIGSTOP)]
    with new_folder(), place or contextlib.nullcontext():
        with launched(2, [*TINY, *DEFAULTS], fault, lab=lab_name, grace=5.0) as run:
            codes, seconds = run.wait(*ends, timeout=60)
        saved = max(step_of(path) for path in find_checkpoints("out/checkpoints"))
    assert codes == [0 if effect == LEAVES else 1] * len(ends), codes
    return [name, effect, f"{seconds:.1f}", str(max(0, done - saved))]


def main() -> None:
    """Measure and publish the table."""
    torch.set_num_threads(1)
    kill, stop, term = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
    removed = "; the next save removes the half-written checkpoint"
    rows = [
        row("a rank is killed in a step", NAMED, Fault(1, 4, kill)),
        row(
            "rank 0, which has the store, is killed", "the others end with code 1, each with a line", Fault(0, 4, kill)
        ),
        row("a rank is killed while it saves", NAMED + removed, Fault(1, 4, kill, while_saving=True), done=4),
        row("a rank hangs (SIGSTOP)", NAMED, Fault(1, 4, stop)),
    ]
    if namespaces_work():
        with lab():
            cut = Fault(0, 4, lambda trainer: subprocess.run(CUT, check=True))
            rows.append(row("the link to a rank goes down", "both sides end with code 1, each with a line", cut, LAB))
    if disks_work():
        sizes = "all end with code 1, and a line says what was needed and what was free"
        rows.append(row("the disk is full", sizes, Fault(0, 4, fill_disk), place=small_disk("out", 2000), done=4))
    rows.append(row("SIGTERM or SIGUSR1 on one rank", LEAVES, Fault(1, 4, term)))
    rows.append(row("SIGTERM while it saves", LEAVES, Fault(1, 4, term, while_saving=True)))
    header = ["fault in step 4", "what happens", "seconds until all ranks are out", "steps lost"]
    publish("faults", markdown(header, [*rows, *GOES_ON]))


if __name__ == "__main__":
    main()
