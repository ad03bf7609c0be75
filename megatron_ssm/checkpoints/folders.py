"""The folders of a run's training checkpoints: finds them, reads their `training.json`, and renames them."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commfabric.collectives.agreement import on_first
from commfabric.foundation.command_line import Failure
from commfabric.foundation.json_files import read_json

from .disk import Result, in_one_line, read_with_retries


class DamagedCheckpoint(ValueError):
    """A checkpoint cannot be read; an earlier one of the same run may be intact. path: its folder, or None if unknown."""

    def __init__(self, message: str, path: Path | None = None):
        super().__init__(message)
        self.path = path


def read_intact(read: Callable[[], Result], path: Path, prefix: str = "") -> Result:
    """Return `read_with_retries(read, path)`, where `read` reads a part of the checkpoint at `path`.

    Failure if the disk cannot be read or memory is short. Any other error becomes a DamagedCheckpoint, whose text begins
    with `prefix`, because reading a damaged file may raise anything.
    """
    try:
        return read_with_retries(read, path)
    except Failure:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__  # with the name of a file that is missing
        raise DamagedCheckpoint(prefix + reason, path) from error


def find_checkpoints(directory: str | Path, is_complete: bool = True) -> list[Path]:
    """The complete checkpoints in a directory, oldest first. Failure if the disk cannot be read.

    With is_complete=False, the folders with the name of a checkpoint but without `training.json`, from which no run resumes.
    """

    def read() -> list[Path]:
        named = [p for p in Path(directory).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
        return sorted((p for p in named if (p / "training.json").is_file() == is_complete), key=step_of)

    return read_with_retries(read, directory)


def half_written(directory: str | Path) -> list[Path]:
    """The folders of checkpoints that a run is writing, or that ended runs left half-written or half-removed."""
    return [p for p in Path(directory).glob(".step-*") if re.fullmatch(r"\.step-\d{6,}", p.name)]


# Earlier versions had other names for a model's sizes, such as OLD_NAME. For checkpoints with OLD_NAME, only names that both
# runs have are compared, plus OPTIONAL names, which may be missing in one of them.
OLD_NAME, OPTIONAL = "conv_kernel", ("lora_rank", "lora_alpha", "lora_targets")


def step_of(path: Path) -> int:
    return int(path.name[5:])


def newest_checkpoint(
    directory: str | Path, requirements: dict[str, Any], before_step: int | None = None
) -> tuple[Path, int]:
    """The newest checkpoint and its step.

    It needs no process group: a rank finds an error before it communicates. `load_training` compares the ranks' results.

    Args:
        directory: The directory of the run's checkpoints.
        requirements: JSON values that the checkpoint's run must have in common with this one.
        before_step: Only checkpoints of steps before this one count (None: all).

    Raises:
        ValueError: There is no checkpoint, or its run had other requirements.
        DamagedCheckpoint: The description of the newest one is damaged.
        Failure: The disk cannot be read.
    """
    paths = [path for path in find_checkpoints(directory) if before_step is None or step_of(path) < before_step]
    if not paths:
        earlier = "" if before_step is None else f" from before step {before_step}"
        names = ", ".join(path.name for path in find_checkpoints(directory, is_complete=False))
        incomplete = f" ({names}: no training.json)" if names else ""
        raise ValueError(f"nothing to resume: {directory} holds no checkpoint{earlier}{incomplete}")
    path = paths[-1]
    description = read_training(path, step_of(path))
    compared = [*{**requirements, **description.requirements}]
    if OLD_NAME in description.requirements:
        both = requirements.keys() & description.requirements.keys()
        compared = [name for name in compared if name in both or name in OPTIONAL]
    for name in compared:
        theirs, ours = description.requirements.get(name), requirements.get(name)
        if theirs != ours:
            raise ValueError(f"cannot resume from {path}: it has {name}={theirs!r}, this run {ours!r}")
    return path, description.step


@dataclass(frozen=True)
class Description:
    """The entries of a checkpoint's `training.json`, apart from their checksum.

    Attributes:
        step: The number of steps that the run had done.
        decay_steps: The `Options.decay_steps` of the run (0: none, or not recorded).
        optimizer_steps: The number of steps that the optimizer had done (None: as many as `step`).
        metadata_crc32: The checksum of `.metadata` (None: not recorded).
        requirements: The values that a run must share to resume from here.
        samples: The number of samples that the run had read (None: the global batch of the requirements in each step).
    """

    step: int
    decay_steps: int
    optimizer_steps: int | None
    metadata_crc32: int | None
    requirements: dict[str, Any]
    samples: int | None = None


def description_text(entries: dict[str, Any]) -> str:
    """The text of a `training.json` with these entries (JSON values), to which it adds their checksum."""
    return json.dumps({**entries, "crc32": _checksum(entries)}, indent=2)


def _checksum(entries: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(entries).encode())


def read_training(path: Path, step: int | None = None) -> Description:
    """Read the description of the checkpoint at `path`.

    DamagedCheckpoint if it is damaged or of another step than `step`; Failure if the disk cannot be read. Earlier versions
    wrote no checksum of the entries; such a file is not verified.
    """
    file = path / "training.json"

    def read() -> Description:
        saved = read_json(file)
        expected, checksum = saved.pop("crc32", None), _checksum(saved)
        if expected not in (None, checksum):
            raise ValueError(f"its entries have the CRC-32 {checksum:08x}, not {expected:08x}")
        description = Description(
            int(saved.pop("step")), int(saved.pop("decay_steps", 0)),
            saved.pop("optimizer_steps", None), saved.pop("metadata_crc32", None),
            samples=saved.pop("samples", None), requirements=saved,
        )  # fmt: skip
        if description.step != (description.step if step is None else step):
            raise ValueError(f"it records step {description.step}, not step {step}")
        return description

    return read_intact(read, path, f"{file} is damaged: ")


def rename_to_old(directory: str | Path) -> None:
    """Rename DIRECTORY, if it holds checkpoints, to DIRECTORY.old, so that no later run resumes from them.

    An earlier DIRECTORY.old is replaced.

    All ranks call it together; rank 0 does it. Failure on every rank if it cannot be done.
    """
    directory = Path(directory)
    _replace(directory, name_of_old(directory), lambda: bool(find_checkpoints(directory)))


def name_of_old(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.old")


def rename_to_damaged(path: Path) -> Path:
    """Rename a checkpoint so that no run resumes from it; returns its new name. All ranks call it, as `rename_to_old`."""
    damaged = path.with_name(f"{path.name}.damaged")
    _replace(path, damaged, path.exists, remove)
    return damaged


def remove(path: Path) -> None:
    """Remove a folder, or a file or link with its name, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace(
    old: Path, new: Path, is_wanted: Callable[[], bool], remove_new: Callable[[Path], object] = shutil.rmtree
) -> None:
    """Rename `old` to `new` on rank 0 if `is_wanted()`. An existing `new` is removed with `remove_new`."""

    def rename() -> None:
        if is_wanted():
            if new.exists():
                remove_new(new)
            old.rename(new)

    on_first(in_one_line(f"cannot rename {old} to {new}")(rename), dist.group.WORLD)
