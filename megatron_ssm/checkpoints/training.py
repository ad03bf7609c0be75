"""Resumable training checkpoints in the format of torch.distributed.checkpoint (DCP), for any division of the model.

A checkpoint is a folder such as `step-000010`. It holds the parameters without padding, one entry for each field of the
layout; both Adam moments in the same form; the random state; and `training.json` with the step, the number of steps over
which the learning rate decays, and what a resumed run must have in common with this one. Entries are DTensors, so that DCP
knows which rank holds which rows. The folder is written under a hidden name and then renamed, so that a folder with the
final name is complete.
"""

import functools
import logging
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from commfabric.collectives.agreement import on_first, together
from commfabric.collectives.wire_formats import at_least_fp32
from commfabric.foundation.command_line import Failure, first_line
from megatron_ssm.kernels.fused_adam import counts_by_group
from megatron_ssm.layers.operator import Place
from megatron_ssm.model.model import Model
from megatron_ssm.spec.fields import Field, field_of

from .disk import DirectoryLock, in_one_line, is_machine_error, read_with_retries, sync_directory
from .folders import DamagedCheckpoint, description_text, find_checkpoints, half_written, read_training, remove
from .shards import ShardReader, ShardWriter, new_file, open_shards

log = logging.getLogger("megatron_ssm")
MOMENTS = ("exp_avg", "exp_avg_sq")
# (name of an entry, this rank's tensor, function that makes the entry of a tensor) -> the entry to write
Stage = Callable[[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


@dataclass
class GatheredState:
    """The state of an optimizer whose parameters and moments are divided over replicas, as DeepSpeed's are.

    Attributes:
        state: For each parameter {"model": the parameter, "exp_avg": ..., "exp_avg_sq": ...}, this rank's part of the model,
            on the CPU and in fp32; parameters that other replicas write may be missing.
        steps: The number of steps that the optimizer has done.
    """

    state: dict[nn.Parameter, dict[str, torch.Tensor]]
    steps: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint DIRECTORY/step-N to write.

    Attributes:
        directory: The directory of the run's checkpoints.
        step: The number of steps done.
        state: This rank's part of the entries.
        training: The entries of `training.json`.
        write_pending: Writes this rank's file of gradients that are not sent yet into a folder; None if there are none.
        keep: The number of checkpoints that remain, the newest.
    """

    directory: Path
    step: int
    state: dict[str, torch.Tensor]
    training: dict[str, Any]
    write_pending: Callable[[Path], object] | None = None
    keep: int = 2

    @classmethod
    def of(
        cls,
        directory: str | Path,
        step: int,
        model: Model,
        optimizer: torch.optim.Optimizer | GatheredState,
        requirements: dict[str, Any],
        decay_steps: int = 0,
        write_pending: Callable[[Path], object] | None = None,
        keep: int = 2,
        stage: Stage | None = None,
        samples: int | None = None,
    ) -> "Snapshot":
        """The checkpoint of a model in training.

        Args:
            directory: The directory of the run's checkpoints.
            step: The number of steps done.
            model: The model.
            optimizer: Its optimizer, or the state of one that is divided over replicas.
            requirements: JSON values that a run which resumes from here must have in common with this one.
            decay_steps: See `Options.decay_steps`.
            write_pending: See `Snapshot`.
            keep: The number of checkpoints that remain, the newest.
            stage: Makes each entry of a copy in this host's memory; None: the tensors are unchanged until `write`.
            samples: The number of samples that the run has read; None: it is not recorded.
        """
        if not isinstance(optimizer, GatheredState):
            if any(p.requires_grad and p not in optimizer.state for p in model.parameters()):
                _reset_optimizer(optimizer, 0)  # every step so far was skipped
        training = {"step": step, "decay_steps": decay_steps, "optimizer_steps": _steps_of(optimizer), **requirements}
        if samples is not None:
            training["samples"] = samples
        return cls(Path(directory), step, _state(model, optimizer, stage or _as_it_is), training, write_pending, keep)

    def write(self, group: ProcessGroup | None = None) -> None:
        """Write it, on all ranks together. Failure on every rank if one of them cannot write; nothing of it then remains.

        It fails too if rank 0 does not find what the others have written: all ranks must see the same directory. When
        this returns, the disk has all files and their names: a crash of the machine does not lose them.

        Each rank writes its own `__RANK_0.distcp`: its rows of each tensor that is split, and its share of the tensors that
        several ranks hold. Rank 0 also writes `.metadata` (which file holds which rows, and checksums) and `training.json`,
        and makes, renames and removes folders. It holds a lock meanwhile, so folders that it finds half-written are of runs
        that have ended; it removes them. Communication over `group` (None: the default group), as pickles: DCP
        gathers every rank's plan on rank 0 and scatters the plans without duplicates, then gathers a list of what was
        written and broadcasts it; before and after, the ranks gather their errors. No tensor is sent.
        """
        hidden, final = self.directory / f".step-{self.step:06d}", self.directory / f"step-{self.step:06d}"
        group = group or dist.group.WORLD
        failure, locks = f"cannot write {final}", list[DirectoryLock]()

        @in_one_line(failure)
        def begin() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            locks.append(DirectoryLock(self.directory))
            for unfinished in half_written(self.directory) if locks[0].is_held else [hidden]:
                shutil.rmtree(unfinished, ignore_errors=True)
            hidden.mkdir()

        try:
            on_first(begin, group)
            try:
                self._write_shards(hidden, failure, group)
                on_first(in_one_line(failure)(lambda: self._complete(hidden, final)), group)
            except Failure:  # of all ranks: after any other error of this one, rank 0 may be renaming the folder
                shutil.rmtree(hidden, ignore_errors=True)  # on every rank: its disk may be another one than rank 0's
                raise
        finally:
            for lock in locks:
                lock.release()

    def _write_shards(self, folder: Path, failure: str, group: ProcessGroup | None) -> None:
        @in_one_line(failure)
        def write_pending() -> None:
            folder.mkdir(parents=True, exist_ok=True)  # a network file system may not show it to this rank yet
            if self.write_pending:
                self.write_pending(folder)

        together(write_pending, [group])
        writer, alone = ShardWriter(folder), not dist.is_initialized()
        try:
            dcp.save(self.state, storage_writer=writer, process_group=group, no_dist=alone)
        except CheckpointException as error:  # DCP raises it on every rank
            raise Failure(f"{failure}: {first_line(_cause(error))}") from None

    def _complete(self, hidden: Path, final: Path) -> None:
        """Check the files of all ranks, give the folder its name, and remove old checkpoints."""
        checksum = zlib.crc32((hidden / ".metadata").read_bytes())
        try:
            open_shards(hidden, checksum)
        except DamagedCheckpoint as error:
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            shared = "rank 0 does not find all ranks' files in a directory that they share"
            raise OSError(f"{shared if is_missing else 'it cannot be read back'} ({error})") from None
        training = description_text({**self.training, "metadata_crc32": checksum})
        with new_file(hidden / "training.json") as file:
            file.write(training.encode())
        sync_directory(hidden)
        remove(final)
        hidden.rename(final)
        sync_directory(self.directory)
        others = [path for path in find_checkpoints(self.directory) if path != final]
        for old in others[: max(0, len(others) - self.keep + 1)]:
            _remove(old)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If that fails or is interrupted, what remains has a hidden name, so no run takes it for one.

    It may belong to another user, or be open on another machine. Then a line says so, and the next save tries again.
    """
    hidden = checkpoint.with_name(f".{checkpoint.name}")
    try:
        checkpoint.rename(hidden)
        remove(hidden)
    except OSError as error:
        log.warning(f"cannot remove the old checkpoint {checkpoint}: {first_line(error)}")


def load_training(path: str | Path, step: int, model: Model, optimizer: torch.optim.Optimizer | GatheredState) -> None:
    """Fill the model, the optimizer's moments and the random state from a checkpoint of any division of the model.

    Every rank reads `.metadata` and, from the files of any rank, the rows it holds, whose checksums it verifies. Errors that
    the table of contents and the sizes of the files show are found before a tensor is read. Communication over the default
    group, as pickles: the ranks gather their errors; DCP gathers every rank's plan on rank 0, scatters the plans and gathers
    the outcome. No tensor is sent.

    Args:
        path: The folder of the checkpoint.
        step: The step of the checkpoint, which is also the optimizer's if the checkpoint has no other number.
        model: The model to fill.
        optimizer: The optimizer to fill, or the state of one that is divided over replicas.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged, of another step or of another model; the model may be filled in part.
        Failure: A rank cannot read the disk for some seconds, its memory is short, or its GPU has failed: the checkpoint may
            be intact.
        ValueError: The ranks find different checkpoints, as in directories that they do not share. Each of these is raised
            on every rank.
    """
    failure = f"{path} is damaged or of another model"

    @in_one_line(failure, DamagedCheckpoint)
    def open_checkpoint() -> tuple[ShardReader, int]:
        if not read_with_retries((Path(path) / "training.json").is_file, path):
            return open_shards(path, None), step
        training = read_training(Path(path), step)
        steps = step if training.optimizer_steps is None else training.optimizer_steps
        return open_shards(path, training.metadata_crc32), steps

    def described(opened: tuple[ShardReader, int]) -> str:
        return f"{Path(path).name} with metadata of CRC-32 {opened[0].metadata_crc32:08x}"

    reader, steps = together(open_checkpoint, [dist.group.WORLD], described)
    state = state_to_fill(model, optimizer, steps)
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # DCP raises it on every rank
        cause = _cause(error)
        if isinstance(cause, Failure) or is_machine_error(cause):
            line = str(cause) if isinstance(cause, Failure) else f"cannot read {path}: {first_line(cause)}"
            raise Failure(line) from None
        raise DamagedCheckpoint(f"{failure}: {first_line(cause)}") from None
    torch.set_rng_state(state["rng"])


def state_to_fill(
    model: Model, optimizer: torch.optim.Optimizer | GatheredState, steps: int
) -> dict[str, torch.Tensor]:
    """{entry of a checkpoint: this rank's tensor, or a DTensor around it} of an optimizer that has done `steps` steps.

    An entry is called "model.", "exp_avg." or "exp_avg_sq." and the name of a field; "rng" is the random state.
    """
    if isinstance(optimizer, GatheredState):
        optimizer.steps = steps
    else:
        _reset_optimizer(optimizer, steps)
    return _state(model, optimizer)


def _cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed; a Failure if there is one."""
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, Failure)), causes[0])


def _steps_of(optimizer: torch.optim.Optimizer | GatheredState) -> int:
    """The number of steps that the optimizer (see `fused_adam`) has done: fewer than the run's if some were skipped."""
    if isinstance(optimizer, GatheredState):
        return optimizer.steps
    held = optimizer.param_groups if counts_by_group(optimizer) else optimizer.state.values()
    return next(int(each["step"]) for each in held if "step" in each)


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


def _as_it_is(name: str, tensor: torch.Tensor, entry_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return entry_of(tensor)


def _state(
    model: Model, optimizer: torch.optim.Optimizer | GatheredState, stage: Stage = _as_it_is
) -> dict[str, torch.Tensor]:
    """{entry: DTensor or tensor} that share memory with the model and the optimizer, so that loading fills these.

    With `stage`, entries of copies in this host's memory.
    """
    state = {"rng": torch.get_rng_state()}
    is_on_cpu = stage is not _as_it_is or isinstance(optimizer, GatheredState)
    mesh_of = functools.cache(functools.partial(_mesh, model.place, "cpu" if is_on_cpu else model.device.type))
    for parameter in model.parameters():
        field = field_of(parameter)
        if isinstance(optimizer, GatheredState):
            tensors = optimizer.state.get(parameter, {})
        else:
            tensors = {"model": parameter.detach()}
            if parameter.requires_grad:
                tensors |= {moment: optimizer.state[parameter][moment] for moment in MOMENTS}
        for kind, tensor in tensors.items():
            mesh = mesh_of(field.copies(model.ranks.size), field.by_expert)
            name = f"{kind}.{field.name}"
            state[name] = stage(name, tensor, functools.partial(_distributed, field=field, mesh=mesh))
    return state


def _mesh(place: Place, device_type: str, copies: int, by_expert: bool) -> DeviceMesh | None:
    """The ranks that divide a field as a mesh (experts, parts, copies); None if one rank holds the whole field.

    The mesh only describes the layout; there is no communication over it. `copies` consecutive tensor-parallel ranks hold
    the same part; with `by_expert`, ranks also divide the experts of the field.
    """
    tensor, expert = place.ranks.group, place.experts.group if by_expert else None
    if tensor is None and expert is None:
        return None
    own = [dist.get_rank()]
    members = torch.tensor(own if tensor is None else dist.get_process_group_ranks(tensor))
    others = torch.tensor(own if expert is None else dist.get_process_group_ranks(expert)) - own[0]
    grid = others.unsqueeze(1) + members  # the groups of all replicas are alike
    return DeviceMesh(device_type, grid.view(len(others), -1, copies), _init_backend=False)


def _distributed(tensor: torch.Tensor, field: Field, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's part as a DTensor of the full field: split along its dimensions, replicated over the ranks with copies.

    mesh: see `_mesh`; None: the tensor itself.
    """
    if mesh is None:
        return tensor
    experts, parts = (0 if field.by_expert else None), field.split
    placements = [Replicate() if dim is None else Shard(dim) for dim in (experts, parts, None)]
    full = torch.empty(field.shape, device="meta")
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
