"""The adapter of torch's DistributedDataParallel: a communication hook. The hook of the last bucket ends the step."""

import weakref

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sparsefusion.gradients.session import Session

from .attachment import NotCopied
from .ddp_reduction import DenseBuckets, reduced_parameters
from .refusals import refuse_ddp

HOOK_ATTRIBUTE = "_sparsefusion_hook"  # DDP takes one hook for its lifetime, so it stays when the adapter is removed


class HookState(NotCopied):
    """The state of the communication hook, which torch's DDP keeps for its lifetime.

    The garbage collector does not see that DDP holds it, so the adapter is referenced weakly. dense: DDP's own
    reduction, which runs when there is no adapter.
    """

    dense: DenseBuckets  # since DDP has taken the hook

    def __init__(self) -> None:
        super().__init__(None)
        self._adapter: weakref.ref[TorchDDP] | None = None

    @property
    def adapter(self) -> "TorchDDP | None":
        """The adapter that takes the gradients, or None."""
        return None if self._adapter is None else self._adapter()

    @adapter.setter
    def adapter(self, adapter: "TorchDDP | None") -> None:
        """Reference an adapter weakly, or None."""
        self._adapter = None if adapter is None else weakref.ref(adapter)


class TorchDDP:
    """The adapter of one DDP module."""

    can_wait_for_buffer = True
    _session: Session  # while it is installed

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp, self.module, self.group = ddp, ddp.module, ddp.process_group
        self.parameters = reduced_parameters(ddp)
        self._names = {id(p): name for name, p in self.parameters.items()}

    def install(self, session: Session) -> None:
        """Hand gradients to `session` from now on. ValueError: this DDP takes no communication hook."""
        state = getattr(self._ddp, HOOK_ATTRIBUTE, None)
        if state is None:
            refuse_ddp(self._ddp)
            state = HookState()
            try:
                self._ddp.register_comm_hook(state, _hook)
            except RuntimeError as error:  # it has one of torch's built-in hooks
                raise ValueError(f"this DDP takes no communication hook: {str(error).partition(chr(10))[0]}") from None
            finally:
                self._ddp._comm_hooks.clear()  # a note for the python reducer, which a copy would take along
            state.dense = DenseBuckets(self._ddp)
            setattr(self._ddp, HOOK_ATTRIBUTE, state)
        state.adapter, self._session = self, session
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []  # of this step

    def remove(self) -> None:
        """Let DDP reduce as it would without a hook."""
        getattr(self._ddp, HOOK_ATTRIBUTE).adapter = None
        del self._session

    def hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DDP with each bucket, in the same order on all ranks."""
        flat, state = bucket.buffer(), getattr(self._ddp, HOOK_ATTRIBUTE)
        future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        names = (self._names[id(parameter)] for parameter in bucket.parameters())
        gradients = dict(zip(names, (gradient.view(-1) for gradient in bucket.gradients()), strict=True))
        self._session.reduce(gradients, [flat], lambda: state.dense.start(bucket))
        self._futures.append((future, flat))
        if bucket.is_last():
            step_futures, self._futures = self._futures, []
            try:
                self._session.end_step()
            except (
                Exception
            ) as error:  # of any kind: raised here, it would leave DDP in the middle of its backward pass
                _raise_after_backward(error)
            for each, mean in step_futures:
                each.set_result(mean)
        return future


def _raise_after_backward(error: Exception) -> None:
    """Raise when DDP has finished its backward pass, so that another can follow.

    DDP queues its own end after the last hook; the error is queued behind it.
    """

    def fail():
        raise error

    engine = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(fail))
    except RuntimeError:  # there is no backward pass: in join(), this rank only takes part in the others'
        raise error from None


def _hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    adapter = state.adapter
    return (
        adapter.hook(bucket) if adapter else state.dense.start(bucket).get_future().then(lambda done: done.value()[0])
    )
