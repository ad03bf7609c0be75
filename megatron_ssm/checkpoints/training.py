"""Resumable checkpoints: torch DCP, readable at any tensor-parallel degree.

A checkpoint `step-000010` holds the unpadded parameters, one entry per field of the layout, as DTensors (so DCP knows
which rank has which rows), the same for both Adam moments, the random state, and `training.json`: the step, the length
of the learning rate's decay, and what a resumed run must agree on. It is written under a hidden name and renamed, so a
folder with that name is whole.
"""

import json
import pickle
import re
import shutil
from pathlib import Path, PurePath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_ssm.configs.layouts import field_of
from megatron_ssm.ops.fused_adam import counts_by_group
from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.foundation.command_line import Failure

MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = 2  # the newest checkpoints stay


def save_training(directory, step: int, model, optimizer, agreement: dict, decay_steps: int = 0, more=None) -> None:
    """Write DIRECTORY/step-N, on all ranks together, and remove all but the newest `KEPT`.

    agreement: what a run that resumes from here must have in common with this one (JSON values). decay_steps: see
    `Options.decay_steps`. more: writes into the folder it is given what else belongs to this rank. Failure, on every
    rank, if any of them cannot write.

    Each rank writes its own `__RANK_0.distcp`: its rows of what is split, and its share of what several ranks hold.
    Rank 0 also writes `.metadata` (which file has which rows) and `training.json`, makes, renames and removes folders.
    Sent over the default group, as pickles: DCP gathers every rank's plan to rank 0 and scatters the plans without
    repetitions, gathers what was written where and broadcasts it; no tensor travels. Rank 0 broadcasts its error twice.
    """
    directory = Path(directory)
    hidden, final = directory / f".step-{step:06d}", directory / f"step-{step:06d}"
    training = json.dumps({"step": step, "decay_steps": decay_steps, **agreement}, indent=2)

    def begin():
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)

    def end():
        (hidden / "training.json").write_text(training, encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        hidden.rename(final)
        others = [path for path in find_checkpoints(directory) if path != final]
        for old in others[: max(0, len(others) - KEPT + 1)]:
            shutil.rmtree(old)

    _on_rank_0(begin, f"cannot write {final}")
    if more:
        on_every_rank(lambda: more(hidden), f"cannot write {final}")
    try:
        dcp.save(_state(model, optimizer), checkpoint_id=hidden, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # DCP raises it on every rank
        cause, _ = next(iter(error.failures.values()))
        raise Failure(f"cannot write {final}: {_one_line(cause)}") from None
    _on_rank_0(end, f"cannot write {final}")


def set_aside(directory) -> None:
    """Rename DIRECTORY to DIRECTORY.old, in place of an earlier one, if it holds checkpoints: nothing resumes from them.

    All ranks together; rank 0 does it and broadcasts its error. Failure, on every rank, if it cannot be done.
    """
    directory = Path(directory)
    old = directory.with_name(f"{directory.name}.old")

    def rename():
        if find_checkpoints(directory):
            if old.exists():
                shutil.rmtree(old)
            directory.rename(old)

    _on_rank_0(rename, f"cannot rename {directory} to {old}")


def find_checkpoints(directory) -> list[Path]:
    """The whole checkpoints in a directory, oldest first."""
    found = [p for p in Path(directory).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted((p for p in found if (p / "training.json").is_file()), key=lambda p: int(p.name[5:]))


def newest_checkpoint(directory, agreement: dict) -> tuple[Path, int]:
    """The newest checkpoint and its step; ValueError if there is none, or if it is of another run.

    Needs no process group: every rank finds the same before any communication.
    """
    found = find_checkpoints(directory)
    if not found:
        raise ValueError(f"nothing to resume: {directory} holds no checkpoint")
    path = found[-1]
    step, _, saved = _read_training(path)
    for name in {**agreement, **saved}:
        if agreement.get(name) != saved.get(name):
            theirs, ours = saved.get(name), agreement.get(name)
            raise ValueError(f"cannot resume from {path}: it has {name}={theirs!r}, this run {ours!r}")
    return path, step


def saved_decay_steps(path) -> int:
    """The `Options.decay_steps` of the run that wrote a checkpoint (0: none, or it is not known)."""
    return _read_training(path)[1]


def _read_training(path) -> tuple[int, int, dict]:
    """(step, decay steps, agreement) of a checkpoint's training.json; ValueError if it is none."""
    try:
        saved = json.loads((path / "training.json").read_text(encoding="utf-8"))
        return int(saved.pop("step")), int(saved.pop("decay_steps", 0)), saved
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path / 'training.json'} is not a checkpoint's") from None


def load_training(path, step: int, model, optimizer) -> None:
    """Fill the model, the optimizer's moments and the random state from a checkpoint of any tensor-parallel degree.

    ValueError, on every rank, if it is damaged or of another model; what its table of contents and the sizes of its
    files tell is found before any communication.

    Every rank reads `.metadata` and, from the files of any rank, the rows it holds. Sent over the default group, as
    pickles: DCP gathers every rank's plan to rank 0, scatters them back and gathers the outcome; no tensor travels.
    """
    _restart(optimizer, step)
    state = _state(model, optimizer)
    try:
        reader = _Reader(path)
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path} is damaged or of another model: {error}") from None
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, pickle.UnpicklingError):  # torch's text is many lines of advice
            cause = ValueError("what a file holds is no tensor")
        raise ValueError(f"{path} is damaged or of another model: {cause}") from None
    torch.set_rng_state(state["rng"])


def _restart(optimizer, step) -> None:
    """The count of steps and moments to be filled, as the optimizer (see `fused_adam`) has them after its own steps."""
    grouped = counts_by_group(optimizer)
    for group in optimizer.param_groups:
        if grouped:
            group["step"] = step
        for parameter in filter(lambda p: p.requires_grad, group["params"]):
            dtype = at_least_fp32(parameter.dtype) if grouped else parameter.dtype
            held = {} if grouped else {"step": torch.tensor(float(step), device=parameter.device, dtype=torch.float32)}
            held |= {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}
            optimizer.state[parameter] = held


def _state(model, optimizer) -> dict:
    """{entry: DTensor or tensor}; the tensors are the model's and the optimizer's own, so loading fills them."""
    state = {"rng": torch.get_rng_state()}
    for parameter in model.parameters():
        field = field_of(parameter)
        state[f"model.{field.name}"] = _distributed(parameter.detach(), field, model.ranks)
        for moment in MOMENTS if parameter.requires_grad else ():
            tensor = optimizer.state[parameter][moment]
            state[f"{moment}.{field.name}"] = _distributed(tensor, field, model.ranks)
    return state


def _distributed(tensor, field, ranks):
    """This rank's piece as a DTensor of the whole field over the tensor-parallel ranks (one rank: the tensor itself).

    The mesh is (pieces, copies): split along the field's dimension, and repeated where several ranks hold a piece.
    It only describes; no communication goes through it.
    """
    if ranks.group is None:
        return tensor
    members = torch.tensor(dist.get_process_group_ranks(ranks.group))
    mesh = members.view(-1, field.copies(ranks.size))
    placements = [Replicate() if field.split is None else Shard(field.split), Replicate()]
    whole = torch.empty(field.shape, device="meta")
    return DTensor.from_local(
        tensor,
        DeviceMesh(tensor.device.type, mesh, _init_backend=False),
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _on_rank_0(action, failed: str) -> None:
    """Run `action` on rank 0 while the others wait; its OSError is a Failure of one line on every rank."""
    on_every_rank(action if not dist.is_initialized() or dist.get_rank() == 0 else _nothing, failed)


def _nothing():
    pass


def on_every_rank(action, failed: str, kind=Failure):
    """What `action` returns, on all ranks; the first one's OSError, or `kind`, is a `kind` of one line on every rank."""
    found = error = None
    try:
        found = action()
    except (OSError, kind) as reason:
        error = f"{failed}: {_one_line(reason)}"
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    if first := next(filter(None, errors), None):
        raise kind(first)
    return found


def _one_line(error) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


class _Reader(dcp.FileSystemReader):
    """DCP's reader, except that its metadata, a pickle, may name nothing but DCP's own records.

    Error if the metadata cannot be read, or a file it names is missing or shorter than it says.
    """

    def __init__(self, path):
        super().__init__(path)
        with open(Path(path) / ".metadata", "rb") as file:
            self.metadata = _Unpickler(file).load()
        if not isinstance(self.metadata, Metadata):
            raise ValueError(f"its metadata is a {type(self.metadata).__name__}")
        for entry in self.metadata.storage_data.values():
            size, wanted = (Path(path) / entry.relative_path).stat().st_size, entry.offset + entry.length
            if size < wanted:
                raise ValueError(f"{entry.relative_path} has {size} bytes, not {wanted}")

    def read_metadata(self, *args, **kwargs):
        """The checkpoint's table of contents."""
        return self.metadata


# BytesStorageMetadata is not among them: DCP unpickles what such an entry holds, whatever that is.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "uint8"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Loads the records that describe tensors in a checkpoint, and nothing else."""

    def find_class(self, module, name):
        """The class, if it may be loaded."""
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where it was written; Python 3.13 names another module
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}")
        return super().find_class(module, name)
