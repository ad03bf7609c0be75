"""The progress of a training run: lines on rank 0's terminal, and the JSON lines of --log."""

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from tqdm import tqdm

from commfabric.collectives.agreement import on_first
from commfabric.foundation.command_line import Printer, first_line
from megatron_ssm.checkpoints.disk import in_one_line

from .options import Options, flag
from .tracking import Trackers
from .trainer import Step


class Progress:
    """Prints a line per logged step (and a progress bar on a terminal) on rank 0, and writes the same to --log.

    All ranks call every method together; Failure or ValueError on every rank if rank 0 cannot write the log.
    """

    def __init__(self, options: Options):
        self.options = options
        self._is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        self._line: dict[str, Any] | None = None  # of the current step, if it is logged
        self._file: TextIO | None = None
        self._trackers: Trackers | None = None
        self._bar = tqdm(disable=True)

    def open_trackers(self, start: int) -> None:
        """Let TensorBoard and Weights & Biases begin after step `start`; Failure on every rank if one of them cannot."""
        options = self.options
        if (options.tensorboard or options.wandb) and self._is_first_rank:
            self._trackers = Trackers(options, self.print_line)
        self._run_trackers(lambda trackers: trackers.begin(start))

    def begin(self, start: int, samples: int, utilization: float = 0.0) -> None:
        """Training begins after step `start`, 0 for a new run: open the log, and measure time from here on.

        samples: those that the run has read before.
        utilization: the share of the devices' peak that a token per second is (0: unknown; it is not reported).
        """
        self._utilization = utilization
        options = self.options
        self._throughput, self._samples = Throughput(options.train_iters - start), samples
        is_shown = self._is_first_rank and sys.stderr.isatty()
        self._bar = tqdm(total=options.train_iters, initial=start, unit="step", disable=not is_shown)
        if options.log:
            on_first(in_one_line(self._log_error, ValueError)(lambda: self._open_log(start)), dist.group.WORLD)

    @property
    def _log_error(self) -> str:
        return f"cannot write to --log {self.options.log}"

    def _open_log(self, start: int) -> None:
        """Open the log, on rank 0. A resumed run keeps the lines of the steps before it."""
        path = Path(self.options.log)
        if not (start and path.is_file()):
            self._file = path.open("w", encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        # "w" would lose the lines of earlier steps if this run ended here.
        self._file = file = path.open("r+", encoding="utf-8")
        file.writelines(line + "\n" for line in lines if _step_of(line) <= start)
        file.truncate()
        file.flush()

    def print_line(self, line: str) -> None:
        """Print a line on rank 0's stdout.

        If stdout cannot be written, for instance because it is a file on a full disk, a line on stderr says so, and the run
        goes on without its lines: what else it writes to that disk fails with a cause of its own.
        """
        printer = Printer(self._is_first_rank)
        with self._bar.external_write_mode():
            try:
                printer.print(line + "\n")
            except OSError as error:
                said = f"cannot write to stdout: {first_line(error)}; the run goes on without it\n"
                with contextlib.suppress(OSError):  # stderr may be the same file; nothing stays in its buffer
                    os.write(sys.stderr.fileno(), said.encode())

    def print_decay(self, previous: int) -> None:
        """Report that the learning rate decays over another number of steps than in the resumed run (0: unknown)."""
        if previous and not self.options.train_samples and previous != self.options.decay_steps:
            self.print_line(f"learning rate now decays over {self.options.decay_steps} steps, was {previous}")

    def end_step(self, step: int, result: Step, is_logged: bool) -> None:
        """A step has ended. Print and prepare its line if `is_logged`, at --log-interval, and at the first and last step."""
        self._throughput.count_step((result.samples - self._samples) * self.options.seq_length)
        self._samples = result.samples
        self._bar.update()
        if result.is_skipped:
            self.print_line(f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: skipped")
        if not (is_logged or is_due(step, self.options.log_interval) or step in (1, self.options.train_iters)):
            return
        rate, left = self._throughput.read()
        used = f"  {rate * self._utilization:.1%} MFU" if self._utilization else ""
        self.print_line(
            f"step {step:>5}/{self.options.train_iters}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
            f"lr {result.lr:.2e}  {rate:,.0f} tokens/s{used}  {timedelta(seconds=round(left))} left"
        )
        tokens = result.samples * self.options.seq_length
        loss, norm = (value if math.isfinite(value) else None for value in (result.loss, result.grad_norm))
        self._line = dict(step=step, loss=loss, lr=result.lr, grad_norm=norm, tokens=tokens, tokens_per_s=rate)
        self._line |= result.more
        if self._utilization:
            self._line["mfu"] = rate * self._utilization
        if result.is_skipped:
            self._line["skipped"] = True

    def add_evaluation(self, step: int, nats: float | None) -> None:
        """Print the held-out loss after a logged step and add it to the line. Its time does not count as training.

        nats: None if a signal has ended the evaluation.
        """
        found = "not evaluated because of a signal" if nats is None else f"{nats:.4f} nats/byte"
        self.print_line(f"step {step:>5}/{self.options.train_iters}  held-out {found}")
        assert self._line is not None
        if nats is not None:
            self._line["held_out_nats_per_byte"] = nats if math.isfinite(nats) else None
        self._throughput.read()

    def write_log(self) -> None:
        """Write the step's line to the log, if it has one. All ranks learn whether rank 0 could write."""
        if line := self._line:
            if self.options.log:
                on_first(in_one_line(self._log_error)(lambda: self._write_line(line)), dist.group.WORLD)
            self._run_trackers(lambda trackers: trackers.write(line))
        self._line = None

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _run_trackers(self, action: Callable[[Trackers], object]) -> None:
        """Let rank 0's trackers do something; all ranks learn whether they could."""

        @in_one_line("cannot write to TensorBoard or Weights & Biases")
        def act() -> None:
            if self._trackers:
                action(self._trackers)

        if self.options.tensorboard or self.options.wandb:
            on_first(act, dist.group.WORLD)

    def close(self) -> None:
        """End the progress bar and close the log. Failure on every rank if rank 0 cannot write what is left."""
        self._bar.close()
        if self._file is not None:
            self._file.close()
        self._run_trackers(Trackers.close)


class Throughput:
    """Tokens per second since it was last read, and the time that is left."""

    def __init__(self, steps: int):
        self._steps_left, self._start, self._steps, self._tokens = steps, time.perf_counter(), 0, 0

    def count_step(self, tokens: int) -> None:
        """A step of this many tokens has ended."""
        self._steps += 1
        self._tokens += tokens
        self._steps_left -= 1

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds left); starts a new measurement."""
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        rate = self._tokens / elapsed
        left = self._steps_left * elapsed / max(1, self._steps)
        self._start, self._steps, self._tokens = time.perf_counter(), 0, 0
        return rate, left


def check_places(options: Options) -> None:
    """ValueError if the log, or a folder of --tensorboard or --profile, cannot be written."""
    if options.log:
        with in_one_line(f"cannot write to --log {options.log}", ValueError):
            Path(options.log).parent.mkdir(parents=True, exist_ok=True)
            Path(options.log).open("a").close()
    for name in ("tensorboard", "profile"):
        if folder := getattr(options, name):
            make_folder(name, folder)


def make_folder(name: str, folder: str | Path) -> None:
    """Create a folder that the option `name` asks for; ValueError if it cannot be written."""
    with in_one_line(f"cannot write to {flag(name)} {folder}", ValueError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _step_of(line: str) -> float:
    """The step of a line of the log; infinity if it is not such a line, as when a run was killed while it wrote."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int | float) else float("inf")
