"""The all-reduce of torch's DDP without a communication hook."""

import torch
from torch.distributed import GradBucket, Work
from torch.nn.parallel import DistributedDataParallel


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of the parameters that required gradients when DDP was built, even if they are frozen now."""
    named, seen = {}, set()
    for path, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if f"{path}.{name}" not in ddp.parameters_to_ignore and id(parameter) not in seen:  # DDP's own comparison
                seen.add(id(parameter))
                named[f"{path}.{name}".lstrip(".")] = parameter
    if all(p.requires_grad for p in named.values()):
        return named
    in_buckets = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return {name: p for name, p in named.items() if id(p) in in_buckets}


class DenseBuckets:
    """Reduces a bucket by the same operations as DDP, so that means have the same bits.

    DDP multiplies gradients by 1/ranks when it copies them into a bucket. Gradients that were accumulated in the bucket,
    and with batched_grad_copy all gradients, are divided by the number of ranks instead. Bits differ unless the number of
    ranks is a power of two.
    """

    def __init__(self, ddp: DistributedDataParallel):
        self._group, self._ranks = ddp.process_group, ddp.process_group.size()
        self._accumulated_in: dict[int, int | None] = {}  # {id of a parameter: address of its gradient}
        self._divides = getattr(ddp, "batched_grad_copy", False)
        if ddp.gradient_as_bucket_view and self._ranks & (self._ranks - 1) and not self._divides:
            for parameter in (p for p in ddp.module.parameters() if p.requires_grad):
                parameter.register_hook(lambda gradient, p=parameter: self._note_address(p))

    def _note_address(self, parameter: torch.Tensor) -> None:
        """Record the address at which autograd is going to accumulate the gradient."""
        self._accumulated_in[id(parameter)] = None if parameter.grad is None else parameter.grad.data_ptr()

    def start(self, bucket: GradBucket) -> Work:
        """Start the all-reduce of a bucket."""
        flat = bucket.buffer()
        if self._accumulated_in:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                is_accumulated = self._accumulated_in.get(id(parameter)) == gradient.data_ptr()
                gradient.div_(self._ranks) if is_accumulated else gradient.mul_(1 / self._ranks)
        else:
            flat.div_(self._ranks) if self._divides else flat.mul_(1 / self._ranks)
        return torch.distributed.all_reduce(flat, group=self._group, async_op=True)
