"""What happens to a run of examples/pretrain.py when something fails, and how fast (about 3 min).

The claim: all ranks have ended within 30 s, also one that hangs, or the run goes on. Two ranks of a tiny model with the
default limits, a checkpoint after every second step, and a fault in step 4. The seconds are from the fault to the end of the
last rank. The link is left out without root and iproute2, and the full disk without root. With an argument, only the rows
whose name contains it are run, and printed.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import torch

from benchmarks.support.cells import NETLAB
from benchmarks.support.launched import (
    TINY,
    Fault,
    disks_work,
    fill_disk,
    launched,
    lines,
    namespaces_work,
    small_disk,
    write_text,
)
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm.checkpoints.folders import find_checkpoints, step_of
from megatron_ssm.train.trainer import Trainer

DEFAULTS = ["--lost-rank-timeout", "15"]  # TINY has a shorter one
LAB = f"faults-{os.getpid()}"
CUT = ["ip", "netns", "exec", f"{LAB}-bridge", "ip", "link", "set", "port1", "down"]
NAMED = "the others end with code 1, and a line names the rank"
EACH = "the others end with code 1, each with a line"
ENDED = "; they kill it"
LEAVES = "all write a checkpoint after the same step, and end with code 0"


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


Row = list[str]


def row(
    name: str,
    effect: str,
    fault: Fault,
    lab_name: str | None = None,
    place: contextlib.AbstractContextManager | None = None,
    done: int = 3,
) -> Row:
    """A row of the table: a run with this fault, until no rank exists any more.

    lab_name: of its network. place: entered in the run's folder. done: the steps that are trained when the fault strikes.
    """
    with new_folder(), place or contextlib.nullcontext():
        with launched(2, [*TINY, *DEFAULTS], fault, lab=lab_name, grace=5.0) as run:
            codes, seconds = run.wait(0, 1, timeout=60)
        saved = max(step_of(path) for path in find_checkpoints("out/checkpoints"))
    expected = [0 if effect == LEAVES else 1] * 2
    if fault.action in (signal.SIGKILL, signal.SIGSTOP):
        expected[fault.rank] = -signal.SIGKILL
    assert codes == expected, codes
    return [name, effect, f"{seconds:.1f}", str(max(0, done - saved))]


def spoil_gradient(trainer: Trainer) -> None:
    """Make one gradient of this rank infinite in the next backward pass."""
    parameter = trainer.model.layers[0].mixer.D
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.inf)[1])


def row_of_nan(name: str) -> Row:
    """A run in which the gradient of a step is not finite."""
    with new_folder():
        with launched(2, [*TINY, *DEFAULTS], Fault(1, 4, spoil_gradient)) as run:
            codes, _ = run.wait(0, 1, timeout=60)
        lost = sum("skipped" in json.loads(line) for line in Path("log.jsonl").read_text().splitlines())
        said = [line for line in lines("out", 2) if line.startswith("step 4: ") and line.endswith(": skipped")]
    assert codes == [0, 0] and len(said) == 1, (codes, said)
    return [name, "all ranks skip it and say so", "the run goes on", str(lost)]


def row_of_damage(name: str) -> Row:
    """A run that resumes after a byte of its newest checkpoint has changed."""
    with new_folder():
        for more in (["--exit-interval", "4"], ["--resume", "auto"]):
            with launched(2, [*TINY, *DEFAULTS, *more]) as run:
                codes, _ = run.wait(0, 1, timeout=60)
            assert codes == [0, 0], codes
            if more[0] == "--exit-interval":
                newest = find_checkpoints("out/checkpoints")[-1]
                shard = max(newest.glob("*.distcp"))
                data = bytearray(shard.read_bytes())
                data[len(data) // 2] ^= 1
                shard.write_bytes(data)
        (said,) = [line for line in lines("out", 2) if "instead" in line]
        before = re.search(r"; resuming \S+/step-(\d+) instead", said)
    assert before, said
    lost = step_of(newest) - int(before[1])
    return [name, "`--resume auto` says so and takes the one before", "the run goes on", str(lost)]


def row_of_link(name: str) -> Row:
    """A run whose ranks lose their link."""
    with lab():
        cut = Fault(0, 4, lambda trainer: subprocess.run(CUT, check=True))
        return row(name, "both sides end with code 1, each with a line", cut, LAB)


def row_of_disk(name: str) -> Row:
    """A run whose disk is full."""
    effect = "all end with code 1, and a line says so"
    return row(name, effect, Fault(0, 4, fill_disk), place=small_disk("out", 2000), done=4)


def main() -> None:
    """Measure and publish the table."""
    torch.set_num_threads(1)
    kill, stop, term = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
    removed = "; the next save removes the half-written checkpoint"
    rows: dict[str, Callable[[str], Row]] = {
        "a rank is killed in a step": lambda name: row(name, NAMED, Fault(1, 4, kill)),
        "rank 0, which has the store, is killed": lambda name: row(name, EACH, Fault(0, 4, kill)),
        "a rank is killed while it saves": lambda name: row(
            name, NAMED + removed, Fault(1, 4, kill, while_saving=True), done=4
        ),
        "a rank hangs (SIGSTOP)": lambda name: row(name, NAMED + ENDED, Fault(1, 4, stop)),
        "rank 0, which has the store, hangs": lambda name: row(name, EACH + ENDED, Fault(0, 4, stop)),
    }
    if namespaces_work():
        rows["the link to a rank goes down"] = row_of_link
    if disks_work():
        rows["the disk is full"] = row_of_disk
    rows |= {
        "SIGTERM or SIGUSR1 on one rank": lambda name: row(name, LEAVES, Fault(1, 4, term)),
        "SIGTERM while it saves": lambda name: row(name, LEAVES, Fault(1, 4, term, while_saving=True)),
        "a step is not finite": row_of_nan,
        "the newest checkpoint is damaged": row_of_damage,
    }
    chosen = {name: run for name, run in rows.items() if all(word in name for word in sys.argv[1:])}
    header = ["fault in step 4", "what happens", "seconds until all ranks are out", "steps lost"]
    print_or_publish("faults", markdown(header, [run(name) for name, run in chosen.items()]))


if __name__ == "__main__":
    main()
