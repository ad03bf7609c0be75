"""Collectives that count what they send: the one place where bytes on the wire are added up.

Every function takes a process group (None: one rank, nothing is sent) and a `Counter` (None: not counted), leaves its
input alone and returns a new tensor.
"""

from collections import Counter as Tally
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Counter:
    """What this rank handed to collectives: `calls` per kind of collective, and `nbytes`, the bytes of their inputs."""

    calls: Tally = field(default_factory=Tally)
    nbytes: int = 0

    def add(self, kind: str, tensor: torch.Tensor) -> None:
        """Count one call of collective `kind` with input `tensor`."""
        self.calls[kind] += 1
        self.nbytes += tensor.numel() * tensor.element_size()

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.nbytes = 0


def all_reduce(tensor, group=None, counter=None, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce `tensor` elementwise over `group`; every rank gets the same new tensor of the same shape and dtype."""
    if group is None:
        return tensor
    total = tensor.clone(memory_format=torch.contiguous_format)
    if counter is not None:
        counter.add("all_reduce", total)
    dist.all_reduce(total, op=op, group=group)
    return total


def all_gather(tensor, group=None, counter=None) -> list[torch.Tensor]:
    """Every rank's `tensor` (same shape and dtype on all ranks), in rank order, on every rank."""
    if group is None:
        return [tensor]
    tensor = tensor.contiguous()
    if counter is not None:
        counter.add("all_gather", tensor)
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts
