"""Process groups. With `specs`, the only module that imports megatron.core, and only when groups are set up."""

import datetime
import os
import sys
import warnings
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Groups:
    """The process groups this rank belongs to; None is one rank.

    tensor: shares one replica of the model. data: holds the same part of other replicas. context: shares a sequence
    (one rank for now). ranks, rank: the world's size and this rank in it.
    """

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1

    @property
    def tensor_rank(self) -> int:
        """Which part of its replica this rank holds."""
        return 0 if self.tensor is None else dist.get_rank(self.tensor)

    @property
    def tensor_ranks(self) -> int:
        """How many parts there are."""
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def data_rank(self) -> int:
        """Which replica this rank belongs to."""
        return 0 if self.data is None else dist.get_rank(self.data)

    @property
    def data_ranks(self) -> int:
        """How many replicas there are."""
        return 1 if self.data is None else self.data.size()


def launched_ranks() -> int:
    """How many ranks torchrun, or the deepspeed launcher, started (1: none did)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world(tensor: int, world: int) -> None:
    """ValueError unless `tensor` ranks per replica divide the world."""
    if tensor < 1 or world % tensor:
        numbers = f"({world} % {tensor} = {world % tensor if tensor else world})"
        hint = "" if "WORLD_SIZE" in os.environ else f"; start it with torchrun --nproc-per-node {tensor}"
        raise ValueError(f"{world} ranks do not divide over replicas of {tensor} tensor-parallel ranks {numbers}{hint}")


def join(tensor: int, device: str = "cpu", timeout=TIMEOUT, init_method: str | None = None) -> int:
    """Join torch.distributed as torchrun's environment says, unless that is done or this is the only rank.

    Returns the world's size; ValueError on every rank if `tensor` does not divide it.
    """
    world = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    check_world(tensor, world)
    if world > 1 and not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        rank = int(os.environ["RANK"])
        dist.init_process_group(backend, init_method, timeout, rank=rank, world_size=world)
    return world


def replicas(tensor: int, device: str = "cpu", timeout=TIMEOUT, init_method: str | None = None) -> Groups:
    """Groups for serving: replicas of `tensor` neighbouring ranks that know nothing of each other; needs no Megatron."""
    world = join(tensor, device, timeout, init_method)
    if world == 1:
        return Groups()
    group = dist.group.WORLD
    if tensor < world:
        group = None if tensor == 1 else dist.new_subgroups(tensor, timeout=timeout)[0]
    return Groups(group, None, None, dist.get_rank(), world)


_NEIGHBOURS = weakref.WeakKeyDictionary()  # {group: {count: its subgroup}}, so that a second model makes no second one


def neighbours(group, count: int, timeout=TIMEOUT):
    """This rank's group of `count` consecutive ranks of `group`, which all of its ranks make together, once.

    torch names a group that only its members make after the number of groups they already have; ranks that have fewer
    make groups of their own alone first, so that all names agree.
    """
    known = _NEIGHBOURS.setdefault(group, {})
    if count not in known:
        made = [None] * group.size()
        dist.all_gather_object(made, len(dist.distributed_c10d._world.pg_names), group=group)
        for _ in range(made[group.rank()], max(made)):
            dist.new_group([dist.get_rank()], timeout, use_local_synchronization=True)
        members = dist.get_process_group_ranks(group)
        first = group.rank() // count * count
        known[count] = dist.new_group(members[first : first + count], timeout, use_local_synchronization=True)
    return known[count]


def initialize(tensor: int = 1, device: str = "cpu", timeout=TIMEOUT, init_method: str | None = None) -> Groups:
    """Groups for training: `join`, then Megatron's parallel_state, and this rank's groups out of it.

    tensor: ranks per replica; neighbouring ranks form a replica, and the world's other ranks are data parallel.
    One rank needs neither torch.distributed nor Megatron.
    """
    world = join(tensor, device, timeout, init_method)
    if world == 1:
        return Groups()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    minutes = timeout.total_seconds() / 60
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, context_parallel_size=1, distributed_timeout_minutes=minutes
        )
    if (size := parallel_state.get_tensor_model_parallel_world_size()) != tensor:
        raise ValueError(f"Megatron's parallel_state already has {size} tensor-parallel ranks, not {tensor}")
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    tensor_group, data_group = (None if g.size() == 1 else g for g in groups)
    return Groups(tensor_group, None, data_group, dist.get_rank(), world)


def shut_down() -> None:
    """Leave Megatron's parallel_state and torch.distributed, if they were joined."""
    if dist.is_initialized():
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        dist.destroy_process_group()


def device_of_rank(device: str) -> torch.device:
    """'cuda' on a machine with several GPUs: the one of this rank's LOCAL_RANK, made current."""
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
    return torch.device(device)
