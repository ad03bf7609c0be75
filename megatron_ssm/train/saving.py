"""The checkpoints of a run: when to write them, writing them at once or in the background, and resuming from the newest.

In the background, training stops only while the state is copied to memory. The copy is as large as this rank's parameters
and moments, and its memory is used again for the next checkpoint.
"""

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import gather_objects, on_first, together
from commfabric.foundation.command_line import Failure, first_line
from megatron_ssm.checkpoints.deepspeed_files import is_deepspeed, step_of_deepspeed
from megatron_ssm.checkpoints.disk import DirectoryLock, in_one_line
from megatron_ssm.checkpoints.folders import (
    DamagedCheckpoint,
    find_checkpoints,
    name_of_old,
    newest_checkpoint,
    rename_to_damaged,
    rename_to_old,
    step_of,
)
from megatron_ssm.checkpoints.training import Snapshot, Stage
from megatron_ssm.kernels.huge_pages import HugePages

from .gradients import local_part
from .options import Options
from .pending_gradients import PendingFile, has_pending, read_pending
from .progress import is_due
from .trainer import Trainer

BEGUN = ".begun"  # a file next to the checkpoints: the `_names_of_run` of the run that has begun there, one a line
NO_ID = "none"  # the id of torchrun's runs that are started without one
STARTED = time.monotonic()  # about when the process started, from which --exit-duration-in-mins counts
OWN = ("", "newest", "auto")  # what --resume says unless it names a folder
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # preempted nodes get the first; Slurm can send the second before the end


class Interruption:
    """While it is entered, notes SIGNALS, which ask a run to leave, instead of letting them end the process.

    The handlers are set in the main thread only; elsewhere Python does not allow it, and signals act as they did.
    """

    def __init__(self, device: torch.device):
        self._device, self._received, self._before = device, 0, dict[int, Any]()

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def on_any_rank(self, has_failed: bool = False, is_late: bool = False) -> tuple[str, bool, bool]:
        """(the name of a signal that any rank has received, or ""; `has_failed`, `is_late`: true if one is on any rank).

        All ranks call it together and get the same. All-reduces three integers over the default group.
        """
        flags = torch.tensor([self._received, int(has_failed), int(is_late)], device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        number, failed, late = flags.tolist()
        return signal.Signals(number).name if number else "", bool(failed), bool(late)


class BackgroundWriter:
    """Writes one checkpoint at a time. All ranks make the same calls in the same order.

    It communicates over its own gloo group with the time-out `timeout`, so that its messages do not mix with training.
    """

    def __init__(self, timeout: timedelta):
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # {name: (copy of a tensor, entry of the copy)}
        self._memory = HugePages()
        self._under_way: Future | None = None

    def write(self, make: Callable[[Stage], Snapshot]) -> None:
        """Wait for the previous checkpoint, copy the state, and begin to write it.

        `make` returns the snapshot; its argument `stage` makes entries of copies (see `Snapshot.of`). Failure on every rank
        if the previous checkpoint could not be written.
        """
        self.wait()
        snapshot = make(self._entry)
        self._under_way = self._thread.submit(snapshot.write, self._group)

    def _entry(self, name: str, tensor: torch.Tensor, entry_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The entry of a copy in this host's memory, which is reused if the previous one has the same shape and dtype."""
        known = self._copies.get(name)
        if known is None or (known[0].shape, known[0].dtype) != (tensor.shape, tensor.dtype):
            if tensor.is_cuda:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            else:
                with self._memory:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            known = self._copies[name] = copy, entry_of(copy)
        copy, entry = known
        copy.copy_(tensor)
        return entry

    @property
    def has_failed(self) -> bool:
        """True if this rank already knows that the checkpoint under way cannot be written; `wait` then says why."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait until no checkpoint is under way. Failure on every rank if it could not be written."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()


class Saver:
    """Writes the checkpoints of a run into a directory. All ranks make the same calls; Failure on every rank if one fails.

    requirements: what a run that resumes must have in common with this one. start: the steps done before this run. With
    --async-save, a checkpoint may still be under way when `save` returns.
    """

    def __init__(self, trainer: Trainer, directory: Path, requirements: dict[str, Any], start: int):
        self._start = start
        self._trainer, self._directory, self._requirements = trainer, directory, requirements
        self._background: BackgroundWriter | None = None
        if trainer.options.async_save:
            self._background = BackgroundWriter(timedelta(minutes=trainer.options.distributed_timeout_minutes))

    def end_step(self, step: int, interruption: Interruption) -> str:
        """Write a checkpoint if one is due or the run leaves after this step; why it leaves before its end, or ""."""
        has_failed = self._background is not None and self._background.has_failed
        minutes = self._trainer.options.exit_duration_in_mins
        is_late = minutes > 0 and time.monotonic() - STARTED > 60 * minutes
        signal, has_failed, is_late = interruption.on_any_rank(has_failed, is_late)
        if has_failed:
            self.finish()  # raises the error on every rank
        options = self._trainer.options
        is_last, leaves = step == options.train_iters, is_due(step, options.exit_interval)
        # Checkpoints after skipped steps would displace those from before.
        is_due_now = is_due(step, options.save_interval) and not self._trainer.skipped_in_a_row
        if is_last or leaves or is_late or signal or is_due_now:
            self._check_parameters(step, interruption)
            self.save(step)
            signal = signal or interruption.on_any_rank()[0]
        if is_last or not (leaves or is_late or signal):
            return ""
        return f"on {signal}" if signal else f"as --{'exit-interval' if leaves else 'exit-duration-in-mins'} says"

    def _check_parameters(self, step: int, interruption: Interruption) -> None:
        """Failure on every rank if the run ends here, and has skipped all of its steps or its parameters are not finite."""
        trainer = self._trainer
        if not (skipped := trainer.skipped_in_a_row):
            return
        if skipped == step - self._start:
            raise Failure(f"step {step}: all steps of this run were skipped ({skipped}), so nothing is saved")
        with trainer.whole_parameters():
            is_damaged = not all(
                bool(local_part(parameter).isfinite().all()) for parameter in trainer.model.parameters()
            )
        if interruption.on_any_rank(is_damaged)[1]:
            raise Failure(f"step {step}: parameters are not finite, so they are not saved; earlier checkpoints remain")

    def save(self, step: int) -> None:
        """Write the checkpoint of a step, with gradients that sparse reduction has not sent yet."""
        if self._background is None:
            self._snapshot(step).write()
        else:
            self._background.write(lambda stage: self._snapshot(step, stage))

    def _snapshot(self, step: int, stage: Stage | None = None) -> Snapshot:
        trainer, options = self._trainer, self._trainer.options
        pending = PendingFile.of(trainer, copies=stage is not None)
        write_pending = None if pending is None else pending.write
        return Snapshot.of(
            self._directory, step, trainer.model, trainer.checkpoint_state(), self._requirements, options.decay_steps,
            write_pending, options.keep, stage, trainer.batch_sizes.of_step(step)[0],
        )  # fmt: skip

    def finish(self) -> None:
        if self._background is not None:
            self._background.wait()


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[bool]:
    """Within this context, no other run begins in the directory `out`. Gives whether this run continues there.

    It does so if the mark there is its own, which shows that torchrun has restarted the ranks: whatever --resume says, as a
    run that began anew would remove what it has done. torchrun's count of restarts shows less: the earlier ranks may have
    ended before they began, and nodes that join or leave do not count. A mark of an earlier run is removed.

    All ranks enter it together. Rank 0 alone holds a lock on the directory, and reads and removes the mark; the others learn
    what it has found. Failure on every rank if another run holds the lock. If the mark is that of this run, they go on all
    the same: the machine of their rank 0 before may be lost, and the file system may not have noticed. Where the file system
    has no locks, there is none. ValueError on every rank if rank 0 cannot read or remove the mark, Failure if it cannot read
    the directory.
    """
    names, directory, locks = _names_of_run(), out / "checkpoints", list[DirectoryLock]()
    mark = directory / BEGUN

    @in_one_line(f"cannot read or remove {mark}", ValueError)
    def look() -> bool:
        is_own = False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_own = not names.isdisjoint(mark.read_text(encoding="utf-8").splitlines())
        with contextlib.suppress(OSError):  # `RunInputs.read` reports it
            out.mkdir(parents=True, exist_ok=True)
        try:
            locks.extend([DirectoryLock(out)] if out.is_dir() else [])
        except BlockingIOError as error:
            if not is_own:
                raise Failure(f"cannot begin in --out {out}: {first_line(error)}") from None
        if is_own:
            return bool(find_checkpoints(directory))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mark.unlink()
        return False

    try:
        yield on_first(look, dist.group.WORLD)
    finally:
        for lock in locks:
            lock.release()


def _names_of_run() -> set[str]:
    """The names of torchrun's run: its id, or if it has none of its own, the folders of the logs of all nodes.

    After a restart, one of them is enough to recognize the run, as a node may have left it. No names without torchrun. All
    ranks call it together.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    own = logs_of_torchrun() if run == NO_ID else run
    return {name for name in gather_objects(own, dist.group.WORLD) if name}


def logs_of_torchrun() -> str:
    """The folder of torchrun's logs, whose name is random: the same after a restart, and different for any other run.

    "" if torchrun writes none.
    """
    folder = re.fullmatch(r"(.+)/attempt_\d+/\d+/error\.json", os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return folder[1] if folder else ""


def resumes_deepspeed(options: Options) -> bool:
    return options.resume not in OWN


def checkpoint_to_resume(
    how: str, directory: Path, requirements: dict[str, Any], train_iters: int
) -> tuple[Path, int] | None:
    """The checkpoint that `Options.resume` names, and its step; None for a run that begins.

    directory: that of the run's checkpoints.

    In place of a folder `deepspeed` that is missing because a run was killed while it replaced it, it takes the folder
    before, `deepspeed.old`. ValueError if there is none, or none that fits the requirements, if it is of a step after
    train_iters, or if this run may rename it.
    """
    if how in OWN:
        begins = not how or (how == "auto" and not find_checkpoints(directory))
        return None if begins else newest_to_load(directory, requirements, train_iters, falls_back=how == "auto")
    folder = Path(how)
    replaced = folder.parent / "deepspeed.old"
    if folder.name == "deepspeed" and not folder.exists() and is_deepspeed(replaced):
        folder = replaced
    if not is_deepspeed(folder):
        raise ValueError(f"--resume {how} is neither newest nor auto, nor a folder with a checkpoint of DeepSpeed's")
    for place in (directory, name_of_old(directory)):
        if folder.resolve().is_relative_to(place.resolve()):
            raise ValueError(f"--resume {how} is in {place}, which this run renames or removes; move it elsewhere")
    return _with_step_checked(train_iters, folder, step_of_deepspeed(folder))


def _with_step_checked(train_iters: int, path: Path, step: int) -> tuple[Path, int]:
    if step > train_iters:
        raise ValueError(f"{path} has done {step} steps, more than --train-iters {train_iters}")
    return path, step


def newest_to_load(
    directory: Path, requirements: dict[str, Any], train_iters: int, falls_back: bool, before: int | None = None
) -> tuple[Path, int]:
    """The newest checkpoint from before a step (None: of all) and its step, as `newest_checkpoint`.

    falls_back: return it also if its description is damaged, and let `resume` report this. ValueError: it is of a step
    after train_iters, unless its description is damaged.
    """
    try:
        return _with_step_checked(train_iters, *newest_checkpoint(directory, requirements, before))
    except DamagedCheckpoint as error:
        if not falls_back or error.path is None:
            raise
        return error.path, step_of(error.path)


def resume(
    trainer: Trainer,
    directory: Path,
    checkpoint: tuple[Path, int] | None,
    requirements: dict[str, Any],
    report: Callable[[str], object],
) -> tuple[Path, int] | None:
    """Load a checkpoint of a directory, and with --resume auto the newest earlier one if it is damaged; returns it.

    The damaged one is renamed, so that no later run takes it. checkpoint: None for a new run. report: prints lines on rank 0
    about what is not loaded. ValueError on every rank if none is left. Failure on every rank if one of them cannot read the
    disk.
    """

    def report_incomplete() -> None:
        for path in find_checkpoints(directory, is_complete=False):
            report(f"{path} has no training.json, so it is not a complete checkpoint; it is ignored")

    if trainer.options.resume:
        on_first(in_one_line(f"cannot read {directory}")(report_incomplete), dist.group.WORLD)
    if checkpoint is None:
        return None
    while True:
        path, step = checkpoint
        try:
            trainer.load(path, step)
            if has_pending(path):
                read_pending(path, trainer)
            return checkpoint
        except DamagedCheckpoint as error:
            if trainer.options.resume != "auto":
                raise
            damage = str(error)
        find_earlier = functools.partial(
            newest_to_load, directory, requirements, trainer.options.train_iters, falls_back=True, before=step
        )
        checkpoint = together(in_one_line(damage, ValueError)(find_earlier), [dist.group.WORLD])
        report(f"{damage}; it is kept as {rename_to_damaged(path)}; resuming {checkpoint[0]} instead")


def claim(directory: Path, continues: bool) -> None:
    """Take a directory for this run's checkpoints, before its first step. Failure on every rank if that is not possible.

    continues: whether the checkpoints in it are of this run; if not, the directory is renamed.
    """
    if not continues:
        rename_to_old(directory)
    names = _names_of_run()

    def mark() -> None:
        directory.mkdir(exist_ok=True)
        (directory / BEGUN).write_text("\n".join(sorted(names)), encoding="utf-8")

    if names:  # torchrun has started the ranks; see `only_run`
        on_first(in_one_line(f"cannot write to {directory}")(mark), dist.group.WORLD)
