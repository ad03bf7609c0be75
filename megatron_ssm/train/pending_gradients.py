"""The residuals of sparse gradients (gradients that are not sent yet) in a training checkpoint: one file for each rank.

A run with any number of data-parallel replicas can continue from them.
"""

import copy
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import on_first, together
from megatron_ssm.checkpoints.disk import in_one_line
from megatron_ssm.checkpoints.folders import DamagedCheckpoint, read_intact
from megatron_ssm.checkpoints.shards import new_file
from megatron_ssm.parallel.groups import Groups
from sparsefusion.fusion.checkpoint_state import check_states, mean_residuals, model_part

from .trainer import Trainer

FILE_NAME = re.compile(r"pending-tensor-\d+-of-(\d+)-replica-\d+-of-(\d+)\.pt")


@dataclass(frozen=True)
class PendingFile:
    """The file that this rank writes."""

    groups: Groups
    state: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer, copies: bool = False) -> "PendingFile | None":
        """The file of a trainer's residuals; None unless it sends gradients sparsely.

        copies: the state may change before `write`; so the residuals are moved to this host's memory.
        """
        if trainer.fusion is None:
            return None
        state = trainer.fusion.state_dict()  # its residuals are copies already
        if copies:
            residuals = state.pop("residuals")
            state = copy.deepcopy(state) | {"residuals": {name: residuals.pop(name).cpu() for name in [*residuals]}}
        return cls(trainer.groups, state)

    def write(self, directory: Path) -> None:
        """Write it into a directory; OSError if that fails."""
        groups = self.groups
        ranks = groups.tensor_rank, groups.tensor_ranks, groups.data_context_rank, groups.data_context_ranks
        with new_file(_path(directory, *ranks)) as file:
            torch.save(self.state, file)


def has_pending(directory: Path) -> bool:
    """Return True if a checkpoint has such files, as rank 0 sees it; all ranks call it together."""
    return on_first(lambda: _layout(directory) is not None, dist.group.WORLD)


def read_pending(directory: Path, trainer: Trainer) -> None:
    """Continue from the files of a run with the same number of tensor-parallel ranks and any number of replicas.

    A trainer that sends gradients sparsely takes the state of its own rank if the number of replicas is the same,
    else the mean of all replicas' residuals; a trainer that sends them dense adds the mean to its next gradients.

    Raises:
        ValueError: On every rank, if the number of tensor-parallel ranks differs, or a file is of another model.
        DamagedCheckpoint: On every rank, if a file is missing or damaged on any rank.
    """
    failure = f"cannot resume from {directory}"

    def read() -> Any:
        with in_one_line(failure, ValueError):
            replicas = _replicas(directory, trainer)
        with in_one_line(failure, DamagedCheckpoint):
            return _read_states(directory, trainer, replicas)

    states = together(read, [dist.group.WORLD])
    if trainer.fusion is None:
        trainer.pending_gradients = mean_residuals(states, trainer.model.device)
    else:
        with in_one_line(failure, ValueError):
            trainer.fusion.load_state_dict(states)


def _replicas(directory: Path, trainer: Trainer) -> int:
    """The number of replicas that have written files; ValueError for another number of tensor-parallel ranks."""
    (tensor_ranks, replicas), groups = _layout(directory) or (0, 0), trainer.groups
    if tensor_ranks != groups.tensor_ranks:
        raise ValueError(
            f"{directory} has pending gradients of {tensor_ranks} tensor-parallel ranks, which "
            f"{groups.tensor_ranks} cannot take. Resume on as many, or delete its pending-*.pt to drop them"
        )
    return replicas


def _read_states(directory: Path, trainer: Trainer, replicas: int) -> Any:
    """This rank's state if the trainer sends sparsely on the same number of replicas, else those of all its replicas."""
    groups = trainer.groups

    def state(replica: int) -> dict[str, Any]:
        return _read(_path(directory, groups.tensor_rank, groups.tensor_ranks, replica, replicas))

    if trainer.fusion is not None and replicas == groups.data_context_ranks:
        return state(groups.data_context_rank)
    states = [state(replica) for replica in range(replicas)]
    if trainer.fusion is None:
        parameters = {name: p for name, p in trainer.named_parameters() if p.requires_grad}
        read_intact(lambda: check_states(states, None, parameters, model_part(groups.tensor)), directory)
    return states


def _layout(directory: Path) -> tuple[int, int] | None:
    """The numbers of tensor-parallel ranks and of replicas in the names of the files; None if there are no files."""
    found = (FILE_NAME.fullmatch(path.name) for path in sorted(directory.glob("pending-*.pt")))
    return next(((int(match[1]), int(match[2])) for match in found if match), None)


def _path(directory: Path, tensor_rank: int, tensor_ranks: int, replica: int, replicas: int) -> Path:
    return directory / f"pending-tensor-{tensor_rank}-of-{tensor_ranks}-replica-{replica}-of-{replicas}.pt"


def _read(path: Path) -> dict[str, Any]:
    """The state in a file, on the CPU: a file of another rank names that rank's GPU, which this rank may not have."""

    def read() -> dict[str, Any]:
        with zipfile.ZipFile(path) as file:  # which torch.load does not verify
            if (changed := file.testzip()) is not None:
                raise ValueError(f"{changed} does not have its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return state | {"residuals": dict(state["residuals"])}

    return read_intact(read, path, f"{path} is missing or damaged: ")
