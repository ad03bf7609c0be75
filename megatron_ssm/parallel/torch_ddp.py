"""torch's DistributedDataParallel, with buckets that have the same order in every step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ordered_ddp(
    loss: nn.Module, group: dist.ProcessGroup, *inputs: torch.Tensor, left_out: Iterable[str] = ()
) -> DistributedDataParallel:
    """A module that returns a scalar, in a DDP whose sums are bitwise equal before and after a restart.

    After its first backward pass, DDP rearranges its buckets in the order in which gradients arrive. The position of a value
    in its bucket determines the order in which the ranks' values are added, and so the rounding on more than two ranks.
    There, this function runs a backward pass on `inputs` first. It changes no parameter, and gradients are 0 afterwards.
    All ranks that compute the loss together call it together.

    left_out: The names of parameters of which ranks hold different parts. DDP does not reduce their gradients.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, list(left_out))
    ddp = DistributedDataParallel(loss, process_group=group, gradient_as_bucket_view=True)
    if group.size() > 2:
        ddp(*inputs).backward()
        ddp.zero_grad(set_to_none=False)  # they are views of the buckets
    return ddp
