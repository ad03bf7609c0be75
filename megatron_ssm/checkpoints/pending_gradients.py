"""What sparse gradients have not sent yet, in a training checkpoint: a file of each rank, read by any number of replicas."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from sparsefusion.collectives.agreement import from_first
from sparsefusion.fusion.checkpoint_state import check_states, mean_residuals, model_part

from .training import on_every_rank

NAME = re.compile(r"pending-tensor-\d+-of-(\d+)-replica-\d+-of-(\d+)\.pt")


def write_pending(directory: Path, trainer) -> None:
    """This rank's file, if its `training.Trainer` sends gradients sparsely. OSError: it cannot be written."""
    groups = trainer.groups
    if trainer.fusion is None:
        return
    path = _file(directory, groups.tensor_rank, groups.tensor_ranks, groups.data_rank, groups.data_ranks)
    try:
        torch.save(trainer.fusion.state_dict(), path)
    except RuntimeError as error:  # torch's, of a full disk
        raise OSError(str(error)) from None


def has_pending(directory: Path) -> bool:
    """Whether a checkpoint has any, as the first rank sees it; all ranks ask together."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return from_first(lambda: _layout(directory) is not None, group, None)


def read_pending(directory: Path, trainer) -> None:
    """Go on from the files of a run with as many tensor-parallel ranks, and any number of replicas.

    A `training.Trainer` that sends sparsely goes on as they did, or from their mean; another adds the mean to its next
    gradients. ValueError on every rank: there are none; another number of tensor-parallel ranks; a file that is missing,
    damaged or of another model.
    """
    failed = f"cannot resume from {directory}"
    found = on_every_rank(lambda: _found(directory, trainer), failed, ValueError)
    if trainer.fusion is None:
        trainer.pending_gradients = mean_residuals(found, trainer.model.device)
        return
    try:
        trainer.fusion.load_state_dict(found)
    except ValueError as error:
        raise ValueError(f"{failed}: {error}") from None


def _found(directory, trainer) -> dict | list[dict]:
    """This rank's state, if there were as many replicas and they send sparsely, else the list of all of its replicas'."""
    layout, groups = _layout(directory), trainer.groups
    if layout is None:
        raise ValueError(f"{directory} has no pending gradients")
    tensor_ranks, replicas = layout
    if tensor_ranks != groups.tensor_ranks:
        raise ValueError(
            f"{directory} has gradients that {tensor_ranks} tensor-parallel ranks had not sent; "
            f"{groups.tensor_ranks} cannot take them. Resume on as many, or delete its pending-*.pt to drop them"
        )

    def state(replica):
        return _read(_file(directory, groups.tensor_rank, tensor_ranks, replica, replicas))

    if trainer.fusion is not None and replicas == groups.data_ranks:
        return state(groups.data_rank)
    states = [state(replica) for replica in range(replicas)]
    if trainer.fusion is None:
        parameters = {name: p for name, p in trainer.named_parameters() if p.requires_grad}
        check_states(states, None, parameters, model_part(groups.tensor))
    return states


def _layout(directory) -> tuple[int, int] | None:
    """Tensor-parallel ranks and replicas of the run that wrote there."""
    found = (NAME.fullmatch(path.name) for path in sorted(Path(directory).glob("pending-*.pt")))
    return next(((int(match[1]), int(match[2])) for match in found if match), None)


def _file(directory, tensor_rank, tensor_ranks, replica, replicas) -> Path:
    return Path(directory) / f"pending-tensor-{tensor_rank}-of-{tensor_ranks}-replica-{replica}-of-{replicas}.pt"


def _read(path) -> dict:
    try:
        state = torch.load(path, weights_only=True)
        return state | {"residuals": dict(state["residuals"])}
    except Exception as error:  # of a damaged file: of any kind
        raise ValueError(f"{path} is missing or damaged: {str(error).partition(chr(10))[0]}") from None
