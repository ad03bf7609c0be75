"""torch's DistributedDataParallel: a communication hook, in which everything is launched, and, in the last one, ended."""

import torch
from torch.nn.parallel import DistributedDataParallel

from .attachment import KeptHook
from .refusals import refuse_ddp

HOOKED = "_sparsefusion_door"  # DDP takes one hook for ever: the door stays, with or without a session behind it


class TorchDDP:
    """The door of one DDP module."""

    holds = True

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp, self.module, self.group, self._session = ddp, ddp.module, ddp.process_group, None
        self.parameters = _reduced(ddp)
        self._names = {id(p): name for name, p in self.parameters.items()}

    def open(self, session) -> None:
        """Gradients go to `session` from now on."""
        hooked = getattr(self._ddp, HOOKED, None)
        if hooked is None:
            refuse_ddp(self._ddp)
            hooked = KeptHook()
            try:
                self._ddp.register_comm_hook(hooked, _hook)
            except RuntimeError as error:  # one of torch's own is there
                raise ValueError(f"this DDP takes no communication hook: {str(error).partition(chr(10))[0]}") from None
            finally:
                self._ddp._comm_hooks.clear()  # a note for the python reducer, which a copy would take along
            hooked.whole = _Whole(self._ddp)
            setattr(self._ddp, HOOKED, hooked)
        hooked.door, self._session, self._futures = self, session, []

    def close(self) -> None:
        """DDP reduces as it would without a hook."""
        getattr(self._ddp, HOOKED).door = self._session = None

    def hook(self, bucket):
        """What DDP calls with each bucket, in its order."""
        flat, hooked = bucket.buffer(), getattr(self._ddp, HOOKED)
        future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        names = (self._names[id(parameter)] for parameter in bucket.parameters())
        gradients = dict(zip(names, (gradient.view(-1) for gradient in bucket.gradients()), strict=True))
        self._session.reduce(gradients, [flat], lambda: hooked.whole.start(bucket))
        self._futures.append((future, flat))
        if bucket.is_last():
            ended, self._futures = self._futures, []
            self._session.end_step()
            for each, mean in ended:
                each.set_result(mean)
        return future


def _reduced(ddp) -> dict:
    """{name: parameter} of what DDP reduces: what had gradients when it was built, and may be frozen since."""
    named = {name: p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    if all(p.requires_grad for p in named.values()):
        return named
    there = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return {name: p for name, p in named.items() if id(p) in there}


def _hook(hooked, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    door = hooked.door
    return door.hook(bucket) if door else hooked.whole.start(bucket).get_future().then(lambda done: done.value()[0])


class _Whole:
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
