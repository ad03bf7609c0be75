"""Process groups for serving and training.

Only this module and modules of `train` and `integrations` import megatron.core, and only when needed, because the import
takes seconds.
"""

import contextlib
import datetime
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from commfabric.collectives.agreement import gather_objects, together
from commfabric.collectives.meeting import gather_in_store, meet
from commfabric.foundation.launcher import adopt_launcher, launched_ranks, this_rank

TIMEOUT = datetime.timedelta(minutes=5)  # the time-out of a collective, after which a lost rank ends the run


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank; None for groups of one rank.

    Attributes:
        tensor: The ranks that hold the parts of one replica of the model.
        context: The ranks that hold the same part, and split the same sequences.
        data: The ranks that hold the same part, and have other sequences.
        data_context: All ranks that hold the same part and sum their gradients (Megatron's data-parallel group with context
            parallelism).
        expert: Consecutive ranks of data_context that split the experts.
        expert_data: The ranks that hold the same experts.
        rank, ranks: This rank's number in the world, and the size of the world.
    """

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    data_context: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1

    @property
    def tensor_rank(self) -> int:
        return 0 if self.tensor is None else dist.get_rank(self.tensor)

    @property
    def tensor_ranks(self) -> int:
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def data_rank(self) -> int:
        return 0 if self.data is None else dist.get_rank(self.data)

    @property
    def data_ranks(self) -> int:
        return 1 if self.data is None else self.data.size()

    @property
    def context_ranks(self) -> int:
        return 1 if self.context is None else self.context.size()

    @property
    def data_context_rank(self) -> int:
        return 0 if self.data_context is None else dist.get_rank(self.data_context)

    @property
    def data_context_ranks(self) -> int:
        return 1 if self.data_context is None else self.data_context.size()


def check_world(tensor: int, world: int, context: int = 1, expert: int = 1) -> None:
    """ValueError unless replicas of `tensor` x `context` ranks divide a world of `world` ranks.

    expert: The number of expert-parallel ranks, which must divide the number of ranks that hold the same part of the model.
    """
    for name, size in dict(tensor=tensor, context=context, expert=expert).items():
        if size < 1:
            raise ValueError(f"{size} {name}-parallel ranks: there must be at least 1")
    replica, of_context = tensor * context, f" x {context} context-parallel" if context > 1 else ""
    if world % replica:
        numbers = f"({world} % {replica} = {world % replica})"
        hint = "" if "WORLD_SIZE" in os.environ else f"; start it with torchrun --nproc-per-node {replica}"
        raise ValueError(
            f"{world} ranks do not divide over replicas of {tensor} tensor-parallel{of_context} ranks {numbers}{hint}"
        )
    if (same := world // tensor) % expert:
        numbers = f"({same} % {expert} = {same % expert})"
        raise ValueError(
            f"{world} ranks / {tensor} tensor-parallel ranks are not a multiple of {expert} expert-parallel ranks {numbers}"
        )


def join(
    tensor: int,
    device: str = "cpu",
    timeout: datetime.timedelta = TIMEOUT,
    init_method: str | None = None,
    context: int = 1,
    check: Callable[[], object] = lambda: None,
    expert: int = 1,
) -> int:
    """Initialize torch.distributed from the launcher's environment variables, unless it is, or there is only one rank.

    The ranks compare their kinds of devices and the results of `check` in a store before they create the process group,
    because ranks with different backends would wait for each other until the time-out.

    Args:
        tensor, context, expert: The sizes of groups; see `check_world`.
        device: "cuda..." selects NCCL, anything else gloo.
        timeout: The time-out of collectives.
        init_method: The URL of the rendezvous; None: MASTER_ADDR.
        check: A function that raises an error if this rank cannot take part, for instance without the device. If
            torch.distributed is initialized, each rank calls it alone.

    Returns:
        The size of the world.

    Raises:
        ValueError: On every rank, if the world does not fit the sizes, or if devices or errors of `check` differ. An error
            that all ranks have is raised as it is.
        LauncherError: On one rank, if its variables are wrong or rank 0 cannot be reached.
    """
    world = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    check_world(tensor, world, context, expert)
    if world == 1 or dist.is_initialized():
        check()
        return world
    kind = "cuda" if device.startswith("cuda") else "cpu"

    adopt_launcher()
    rank, place = this_rank(), ""
    if init_method:
        store, *_ = next(rendezvous(init_method, rank, world, timeout=timeout))
        store.set_timeout(timeout)
    else:
        store, place = meet(timeout)
        store = _for_this_restart(store, world)
    gather = gather_in_store(dist.PrefixStore("join", store), rank, world, place)
    together(check, [gather], same=lambda _: {"device": kind})
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=world, store=store)
    return world


def join_alone(device: str = "cpu", timeout: datetime.timedelta = TIMEOUT) -> None:
    """Initialize torch.distributed with this process as its only rank, for frameworks that require it, unless it is."""
    if not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _for_this_restart(store: dist.Store, world: int) -> dist.Store:
    """torchrun's store, with a prefix for keys of this restart on a single node.

    Without the prefix, gloo would read the addresses of the previous ranks, and wait for them. On several nodes, the numbers
    of restarts may differ. There, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun create a store per restart, if its
    rendezvous is c10d; a static rendezvous ignores the variable.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not restarts or not is_shared or os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        return store
    return dist.PrefixStore(f"restart {restarts}", store)


def replicas(
    tensor: int,
    device: str = "cpu",
    timeout: datetime.timedelta = TIMEOUT,
    init_method: str | None = None,
    context: int = 1,
    expert: int = 1,
) -> Groups:
    """Groups for serving: `join`, then replicas of `tensor` x `context`, or `tensor` x `expert`, consecutive ranks.

    Replicas do not communicate. In a replica, `tensor` consecutive ranks hold the parts of the model; `context` consecutive
    groups of them split each sequence, or `expert` of them split the experts. All ranks of the world call it together. Does
    not need Megatron. Arguments as for `join`.
    """
    world = join(tensor, device, timeout, init_method, context, expert=expert)
    of_tensor = [list(range(first, first + tensor)) for first in range(0, world, tensor)]

    def of_consecutive_groups(count: int) -> list[list[int]]:
        return [
            list(range(first + part, first + tensor * count, tensor))
            for first in range(0, world, tensor * count)
            for part in range(tensor)
        ]

    of_context, of_expert = (_subgroup(of_consecutive_groups(count), timeout) for count in (context, expert))
    rank = dist.get_rank() if world > 1 else 0
    return Groups(_subgroup(of_tensor, timeout), of_context, expert=of_expert, rank=rank, ranks=world)


def _subgroup(members: list[list[int]], timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """This rank's group if these groups divide the world; None for groups of one rank."""
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return dist.group.WORLD
    return dist.new_subgroups_by_enumeration(members, timeout=timeout)[0]


# {group: {count: this rank's subgroup}}, so that models share subgroups
_NEIGHBOURS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def neighbours(group: dist.ProcessGroup, count: int, timeout: datetime.timedelta = TIMEOUT) -> dist.ProcessGroup:
    """The process group of this rank's `count` consecutive ranks of `group`. All ranks of `group` call it together.

    The first call creates the group, and gathers one integer from each rank. Only ranks of `group` take part, because other
    replicas may not need such groups. torch then names a new group after the number of groups that a rank already has, so
    ranks with fewer groups than others first create groups with only themselves.
    """
    known = _NEIGHBOURS.setdefault(group, {})
    if count not in known:
        numbers_of_groups = gather_objects(len(dist.distributed_c10d._world.pg_names), group)
        for _ in range(numbers_of_groups[group.rank()], max(numbers_of_groups)):
            dist.new_group([dist.get_rank()], timeout, use_local_synchronization=True)
        members = dist.get_process_group_ranks(group)
        first = group.rank() // count * count
        known[count] = dist.new_group(members[first : first + count], timeout, use_local_synchronization=True)
    return known[count]


def initialize(
    tensor: int = 1,
    device: str = "cpu",
    timeout: datetime.timedelta = TIMEOUT,
    init_method: str | None = None,
    context: int = 1,
    expert: int = 1,
) -> Groups:
    """Groups for training: `join`, then Megatron's parallel_state (unless it is set up), and this rank's groups from it.

    `tensor` consecutive ranks hold the parts of a model, and `context` consecutive groups of them split each sequence and
    form a replica. All replicas are data parallel. `expert` ranks of the data x context group split the experts. All
    ranks of the world call it together, even a single rank. (`Groups()` is one rank without torch.distributed and Megatron.)
    Arguments as for `join`. ValueError on every rank if parallel_state is set up with other sizes or pipeline parallelism.
    """
    world = join(tensor, device, timeout, init_method, context, expert=expert)
    join_alone(device, timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )
    _check_parallel_state(parallel_state, tensor, context, expert)
    groups = dict(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
    )
    several = {name: group for name, group in groups.items() if group.size() > 1}
    return Groups(**several, rank=dist.get_rank(), ranks=world)


def _check_parallel_state(parallel_state, tensor: int, context: int, expert: int) -> None:
    """ValueError unless Megatron's parallel_state has these sizes, and otherwise only data parallelism."""
    sizes = {
        "tensor": (parallel_state.get_tensor_model_parallel_world_size(), tensor),
        "pipeline": (parallel_state.get_pipeline_model_parallel_world_size(), 1),
        "context": (parallel_state.get_context_parallel_world_size(), context),
        "expert": (parallel_state.get_expert_model_parallel_world_size(), expert),
    }
    for name, (size, expected) in sizes.items():
        if size != expected:
            raise ValueError(f"Megatron's parallel_state already has {size} {name}-parallel ranks, not {expected}")


def shut_down(wait: bool = True) -> None:
    """Destroy Megatron's parallel_state and torch.distributed's groups, if they exist.

    The ranks wait for each other before, unless an exception ends this one, because gloo may abort a rank whose peers have
    destroyed their groups. wait: False if other ranks may be busy or gone.
    """
    if dist.is_initialized():
        if wait and sys.exc_info()[0] is None:
            with contextlib.suppress(RuntimeError):  # of a peer that has ended
                dist.barrier()
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        dist.destroy_process_group()


def check_device(device: str) -> None:
    """ValueError unless this rank has the device of `device_of_rank`."""
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"--device cuda: no GPU for local rank {local}, torch finds {count} on this host")


def device_of_rank(device: str) -> torch.device:
    """The torch.device of a name on this rank. "cuda" is the GPU of LOCAL_RANK, which becomes the current device."""
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
    return torch.device(device)
