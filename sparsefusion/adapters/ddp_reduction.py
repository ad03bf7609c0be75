"""What torch's DDP reduces, and how, without a hook."""

import torch


def reduced_parameters(ddp) -> dict:
    """{name: parameter} of what DDP reduces: what had gradients when it was built, and may be frozen since."""
    named, seen = {}, set()
    for path, part in ddp.module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if f"{path}.{name}" not in ddp.parameters_to_ignore and id(parameter) not in seen:  # as DDP compares it
                seen.add(id(parameter))
                named[f"{path}.{name}".lstrip(".")] = parameter
    if all(p.requires_grad for p in named.values()):
        return named
    there = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return {name: p for name, p in named.items() if id(p) in there}


class WholeBuckets:
    """DDP's own reduction of a bucket: the same operations, so the same bits.

    It multiplies gradients by 1/ranks when it copies them into a bucket, and divides by ranks those that were added up
    there, and with batched_grad_copy all. That makes a difference unless ranks is a power of two.
    """

    def __init__(self, ddp):
        self._group, self._ranks, self._added_to = ddp.process_group, ddp.process_group.size(), {}
        self._divides = getattr(ddp, "batched_grad_copy", False)
        if ddp.gradient_as_bucket_view and self._ranks & (self._ranks - 1) and not self._divides:
            for parameter in (p for p in ddp.module.parameters() if p.requires_grad):
                parameter.register_hook(lambda gradient, p=parameter: self._note(p))

    def _note(self, parameter):
        """Where its gradient is going to be added to what is there."""
        self._added_to[id(parameter)] = None if parameter.grad is None else parameter.grad.data_ptr()

    def start(self, bucket):
        """Start it."""
        flat = bucket.buffer()
        if self._added_to:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                there = self._added_to.get(id(parameter)) == gradient.data_ptr()
                gradient.div_(self._ranks) if there else gradient.mul_(1 / self._ranks)
        else:
            flat.div_(self._ranks) if self._divides else flat.mul_(1 / self._ranks)
        return torch.distributed.all_reduce(flat, group=self._group, async_op=True)
