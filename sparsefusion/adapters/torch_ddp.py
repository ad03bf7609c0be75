"""torch's DistributedDataParallel: a communication hook, in which everything is launched, and, in the last one, ended."""

import torch
from torch.nn.parallel import DistributedDataParallel

from .attachment import KeptHook
from .ddp_reduction import WholeBuckets, reduced_parameters
from .refusals import refuse_ddp

HOOKED = "_sparsefusion_door"  # DDP takes one hook for ever: the door stays, with or without a session behind it


class TorchDDP:
    """The door of one DDP module."""

    holds = True

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp, self.module, self.group, self._session = ddp, ddp.module, ddp.process_group, None
        self.parameters = reduced_parameters(ddp)
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
            hooked.whole = WholeBuckets(self._ddp)
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
            try:
                self._session.end_step()
            except Exception as error:  # of any kind: raised here, it would leave DDP in the middle of its backward
                _raise_after(error)
            for each, mean in ended:
                each.set_result(mean)
        return future


def _raise_after(error):
    """When DDP has ended its backward, so that another can follow; it queues its own end when the last hook is over."""

    def failed():
        raise error

    engine = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(failed))
    except RuntimeError:  # no backward: this rank only follows the others', in join()
        raise error from None


def _hook(hooked, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    door = hooked.door
    return door.hook(bucket) if door else hooked.whole.start(bucket).get_future().then(lambda done: done.value()[0])
