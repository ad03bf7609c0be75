"""Resumable training checkpoints in the format of torch.distributed.checkpoint (DCP), for any tensor-parallel degree.

A checkpoint is a folder such as `step-000010`. It holds the parameters without padding, one entry for each field of the
layout; both Adam moments in the same form; the random state; and `training.json` with the step, the number of steps over
which the learning rate decays, and what a resumed run must have in common with this one. Entries are DTensors, so that DCP
knows which rank holds which rows. The folder is written under a hidden name and then renamed, so that a folder with the
final name is complete.
"""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_ssm.configs.layouts import Field, field_of
from megatron_ssm.models.model import Model
from megatron_ssm.ops.fused_adam import counts_by_group
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.foundation.command_line import Failure

from .agreement import first_line, run_on_every_rank, run_on_rank_0

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class GatheredState:
    """What stands in place of an optimizer whose parameters and moments are divided over replicas, as DeepSpeed's are.

    state: for each parameter {"model": the parameter, "exp_avg": ..., "exp_avg_sq": ...}, this rank's part of the model, on
    the CPU and in fp32; parameters that other replicas write may be missing. steps: how many the optimizer has done.
    """

    state: dict[nn.Parameter, dict[str, torch.Tensor]]
    steps: int = 0


def save_training(
    directory: str | Path,
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | GatheredState,
    requirements: dict[str, Any],
    decay_steps: int = 0,
    write_more: Callable[[Path], None] | None = None,
    keep: int = 2,
) -> None:
    """Write DIRECTORY/step-N, on all ranks together, and remove all but the newest `keep` checkpoints.

    requirements: JSON values that a run which resumes from here must have in common with this one. decay_steps: see
    `Options.decay_steps`. write_more: writes additional files of this rank into the folder it is given. Failure on every
    rank if any of them cannot write, or if rank 0 does not find what the others have written: all ranks must see the same
    directory.

    Each rank writes its own `__RANK_0.distcp`: its rows of each tensor that is split, and its share of the tensors that
    several ranks hold. Rank 0 also writes `.metadata` (which file holds which rows) and `training.json`, and makes, renames
    and removes folders. Communication over the default group, as pickles: DCP gathers every rank's plan on rank 0 and
    scatters the plans without duplicates, then gathers a list of what was written and broadcasts it; before and after, the
    ranks gather their errors. No tensor is sent.
    """
    directory = Path(directory)
    hidden, final = directory / f".step-{step:06d}", directory / f"step-{step:06d}"
    failure = f"cannot write {final}"
    training = json.dumps({"step": step, "decay_steps": decay_steps, **requirements}, indent=2)

    def begin() -> None:
        for unfinished in directory.glob(".step-*"):  # of runs that were ended while they wrote or removed them
            shutil.rmtree(unfinished, ignore_errors=True)
        hidden.mkdir(parents=True)

    def end() -> None:
        _check_complete(hidden)
        (hidden / "training.json").write_text(training, encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        hidden.rename(final)
        others = [path for path in find_checkpoints(directory) if path != final]
        for old in others[: max(0, len(others) - keep + 1)]:
            _remove(old)

    run_on_rank_0(begin, failure)
    if write_more:
        run_on_every_rank(lambda: write_more(hidden), failure)
    try:
        dcp.save(_state(model, optimizer), checkpoint_id=hidden, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # DCP raises it on every rank
        raise Failure(f"{failure}: {first_line(_cause(error))}") from None
    run_on_rank_0(end, failure)


def _check_complete(folder: Path) -> None:
    """Failure unless this rank finds the files of all ranks, in the sizes that rank 0's table of contents names."""
    try:
        _open_reader(folder)
    except ValueError as error:
        raise Failure(f"rank 0 does not find all ranks' files in a directory that they share ({error})") from None


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If that is interrupted, what remains has a hidden name, so no run takes it for a checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def set_aside(directory: str | Path) -> None:
    """Rename DIRECTORY, if it holds checkpoints, to DIRECTORY.old, which is replaced: no later run resumes from them.

    All ranks call it together; rank 0 does it. Failure on every rank if it cannot be done.
    """
    directory = Path(directory)
    old = directory.with_name(f"{directory.name}.old")

    def rename() -> None:
        if find_checkpoints(directory):
            if old.exists():
                shutil.rmtree(old)
            directory.rename(old)

    run_on_rank_0(rename, f"cannot rename {directory} to {old}")


def find_checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    found = [p for p in Path(directory).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted((p for p in found if (p / "training.json").is_file()), key=lambda p: int(p.name[5:]))


def newest_checkpoint(directory: str | Path, requirements: dict[str, Any]) -> tuple[Path, int]:
    """The newest checkpoint and its step; ValueError if there is none, or if its run had other requirements.

    Needs no process group: a rank finds an error before it communicates. `load_training` compares what the ranks found.
    """
    found = find_checkpoints(directory)
    if not found:
        raise ValueError(f"nothing to resume: {directory} holds no checkpoint")
    path = found[-1]
    step, _, saved = _read_training(path)
    for name in {**requirements, **saved}:
        if requirements.get(name) != saved.get(name):
            theirs, ours = saved.get(name), requirements.get(name)
            raise ValueError(f"cannot resume from {path}: it has {name}={theirs!r}, this run {ours!r}")
    return path, step


def saved_decay_steps(path: Path) -> int:
    """The `Options.decay_steps` of the run that wrote a checkpoint (0: none, or not recorded)."""
    return _read_training(path)[1]


def _read_training(path: Path) -> tuple[int, int, dict[str, Any]]:
    """(step, decay steps, settings of the run) from a checkpoint's training.json; ValueError if it cannot be read."""
    file = path / "training.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        step, decay_steps = saved.pop("step"), saved.pop("decay_steps", 0)
        valid = all(type(count) is int and count >= 0 for count in (step, decay_steps))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {first_line(error)}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ValueError(f"{file} is not a checkpoint's")
    return step, decay_steps, saved


def load_training(path: str | Path, step: int, model: Model, optimizer: torch.optim.Optimizer | GatheredState) -> None:
    """Fill the model, the optimizer's moments and the random state from a checkpoint of any tensor-parallel degree.

    ValueError on every rank if it is damaged, cannot be read by one of them, or belongs to another model. Errors that the
    table of contents and the sizes of the files show are found before a tensor is read.

    Every rank reads `.metadata` and, from the files of any rank, the rows it holds. Communication over the default group, as
    pickles: the ranks gather their errors; DCP gathers every rank's plan on rank 0, scatters the plans and gathers the
    outcome. No tensor is sent.
    """
    failure = f"{path} is damaged or of another model"
    reader = run_on_every_rank(lambda: _open_reader(path), failure, ValueError, compared=Path(path).name)
    if isinstance(optimizer, GatheredState):
        optimizer.steps = step
    else:
        _reset_optimizer(optimizer, step)
    state = _state(model, optimizer)
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # DCP raises it on every rank
        cause = _cause(error)
        if isinstance(cause, pickle.UnpicklingError):  # torch's text is many lines of advice
            cause = ValueError("an entry of a file is not a tensor")
        raise ValueError(f"{failure}: {cause}") from None
    try:
        torch.set_rng_state(state["rng"])
    except RuntimeError as error:
        raise ValueError(f"{failure}: {first_line(error)}") from None


def _cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0]


def _reset_optimizer(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count and allocate zero moments where the optimizer (see `fused_adam`) keeps them after its own steps."""
    grouped = counts_by_group(optimizer)
    for group in optimizer.param_groups:
        if grouped:
            group["step"] = step
        for parameter in filter(lambda p: p.requires_grad, group["params"]):
            dtype = at_least_fp32(parameter.dtype) if grouped else parameter.dtype
            state = {} if grouped else {"step": torch.tensor(float(step), device=parameter.device, dtype=torch.float32)}
            state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}
            optimizer.state[parameter] = state


def _state(model: Model, optimizer: torch.optim.Optimizer | GatheredState) -> dict[str, torch.Tensor]:
    """{entry: DTensor or tensor}; they share memory with the model and the optimizer, so that loading fills these."""
    state = {"rng": torch.get_rng_state()}
    for parameter in model.parameters():
        field = field_of(parameter)
        if isinstance(optimizer, GatheredState):
            tensors = optimizer.state.get(parameter, {})
        else:
            moments = {name: optimizer.state[parameter][name] for name in MOMENTS if parameter.requires_grad}
            tensors = {"model": parameter.detach(), **moments}
        state |= {f"{name}.{field.name}": _distributed(each, field, model.ranks) for name, each in tensors.items()}
    return state


def _distributed(tensor: torch.Tensor, field: Field, ranks: Ranks) -> torch.Tensor:
    """This rank's part as a DTensor of the full field over the tensor-parallel ranks (one rank: the tensor itself).

    The mesh is (parts, copies): split along the field's dimension, and replicated over the ranks that hold the same part.
    It only describes the layout; no communication goes through it.
    """
    if ranks.group is None:
        return tensor
    members = torch.tensor(dist.get_process_group_ranks(ranks.group))
    mesh = members.view(-1, field.copies(ranks.size))
    placements = [Replicate() if field.split is None else Shard(field.split), Replicate()]
    full = torch.empty(field.shape, device="meta")
    return DTensor.from_local(
        tensor,
        DeviceMesh(tensor.device.type, mesh, _init_backend=False),
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _open_reader(path: str | Path) -> "_Reader":
    """A reader of this checkpoint; ValueError with one line, whatever is wrong."""
    try:
        return _Reader(path)
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from None


class _Reader(dcp.FileSystemReader):
    """DCP's reader, but it unpickles the metadata with a list of permitted classes, and checks the sizes of files.

    Error if the metadata cannot be read, or a file that it names is missing or shorter than the metadata says.
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        with open(Path(path) / ".metadata", "rb") as file:
            self.metadata = _Unpickler(file).load()
        if not isinstance(self.metadata, Metadata):
            raise ValueError(f"its metadata is of type {type(self.metadata).__name__}")
        for entry in self.metadata.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise ValueError(f"its metadata names {entry.relative_path}, which is not a file of the checkpoint")
            size, wanted = (Path(path) / entry.relative_path).stat().st_size, entry.offset + entry.length
            if size < wanted:
                raise ValueError(f"{entry.relative_path} has {size} bytes, not {wanted}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of contents."""
        return self.metadata


# The classes that metadata may name. BytesStorageMetadata is not among them: DCP would unpickle the bytes of such an entry.
_PERMITTED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "uint8"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Loads the records that describe the tensors of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        """The class, if it is permitted; UnpicklingError otherwise."""
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath  # the folder where it was written; Python 3.13 names another module
        if name not in _PERMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}")
        return super().find_class(module, name)
