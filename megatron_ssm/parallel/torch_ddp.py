"""torch's DistributedDataParallel, with buckets that have the same order in every step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ordered_ddp(
    loss: nn.Module, group: dist.ProcessGroup, *inputs: torch.Tensor, left_out: Iterable[str] = ()
) -> DistributedDataParallel:
    """A module that returns a scalar, in a DDP whose sums have the same bits before and after a restart.

    left_out: the names of parameters of which the ranks hold different parts, so that DDP leaves their gradients alone.

    After its first backward pass, DDP arranges its buckets anew, in the order in which gradients arrive. The place of a
    value in its bucket decides in which order the ranks' values are added, which matters to the bits on more than two ranks.
    So there, a backward pass on `inputs` comes first. It changes nothing else: no parameter, and gradients are 0 afterwards.
    All ranks of `group`, and all that compute the loss together, call this together.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, list(left_out))
    ddp = DistributedDataParallel(loss, process_group=group, gradient_as_bucket_view=True)
    if group.size() > 2:
        ddp(*inputs).backward()
        ddp.zero_grad(set_to_none=False)  # they are views of the buckets
    return ddp
