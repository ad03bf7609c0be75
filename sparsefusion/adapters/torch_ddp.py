"""The adapter of torch's DistributedDataParallel: a communication hook. The hook of the last bucket ends the step.

Collectives are started in the body of hooks, never in a callback of a future: callbacks of several buckets may run in
different orders on different ranks, and the ranks' collectives would not match.
"""

import weakref
from collections.abc import Callable

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sparsefusion.gradients.session import Session

from .attachment import NotCopied
from .ddp_reduction import DenseBuckets, reduced_parameters
from .refusals import refuse_ddp

HOOK_ATTRIBUTE = "_sparsefusion_hook"  # DDP accepts one hook in its lifetime, so it stays when the adapter is removed


class HookState(NotCopied):
    """The state of the communication hook, which torch's DDP keeps for its lifetime.

    The garbage collector does not see DDP's reference to it, so it references the adapter weakly.
    """

    dense: DenseBuckets  # DDP's own reduction, which runs without an adapter; set when the hook is registered

    def __init__(self) -> None:
        super().__init__(None)
        self._adapter: weakref.ref[TorchDDP] | None = None

    @property
    def adapter(self) -> "TorchDDP | None":
        return None if self._adapter is None else self._adapter()

    @adapter.setter
    def adapter(self, adapter: "TorchDDP | None") -> None:
        self._adapter = None if adapter is None else weakref.ref(adapter)


class TorchDDP:
    """The adapter of one DDP module."""

    can_wait_for_buffer = True
    _session: Session  # set while the adapter is installed

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp, self.module, self.group = ddp, ddp.module, ddp.process_group
        self.parameters = reduced_parameters(ddp)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.can_send_early = not ddp.static_graph  # such a graph may accumulate into a gradient several times

    def install(self, session: Session) -> None:
        """Register the hook, so that gradients go to `session`. ValueError if this DDP accepts no communication hook."""
        state = getattr(self._ddp, HOOK_ATTRIBUTE, None)
        if state is None:
            refuse_ddp(self._ddp)
            state = HookState()
            try:
                self._ddp.register_comm_hook(state, _hook)
            except RuntimeError as error:  # it has one of torch's built-in hooks
                reason = str(error).partition("\n")[0]
                raise ValueError(f"this DDP accepts no communication hook: {reason}") from None
            finally:
                self._ddp._comm_hooks.clear()  # the list is for the python reducer; copies of the DDP would copy it
            state.dense = DenseBuckets(self._ddp)
            setattr(self._ddp, HOOK_ATTRIBUTE, state)
        state.adapter, self._session = self, session
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []  # the futures and buckets of this step
        trained = [p for p in self.parameters.values() if self.can_send_early and p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(_ready_hook(weakref.ref(self))) for p in trained]

    def remove(self) -> None:
        """Let DDP reduce as it would without a hook."""
        getattr(self._ddp, HOOK_ATTRIBUTE).adapter = None
        for handle in self._handles:
            handle.remove()
        del self._session

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called with a parameter whose gradient is complete. DDP reduces this backward pass if a bucket has arrived."""
        gradient = parameter.grad
        if self._futures and gradient is not None and parameter.is_contiguous() and gradient.is_contiguous():
            self._session.gradient_ready(self._names[id(parameter)], gradient.view(-1))

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
            except Exception as error:  # any error raised here would interrupt DDP's backward pass
                _raise_after_backward(error)
            for bucket_future, mean in step_futures:
                bucket_future.set_result(mean)
        return future


def _ready_hook(adapter: "weakref.ref[TorchDDP]") -> Callable[[torch.Tensor], None]:
    """A hook that passes complete gradients to the adapter, which it references weakly: the garbage collector misses it."""

    def gradient_ready(parameter: torch.Tensor) -> None:
        if (attached := adapter()) is not None:
            attached.gradient_ready(parameter)

    return gradient_ready


def _raise_after_backward(error: Exception) -> None:
    """Raise the error when DDP has finished its backward pass, so that another backward pass can follow.

    DDP queues the end of its backward pass after the last hook; the error is queued behind it.
    """

    def fail():
        raise error

    engine = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(fail))
    except RuntimeError:  # in join() this rank has no backward pass, but participates in that of other ranks
        raise error from None


def _hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    adapter = state.adapter
    return (
        adapter.hook(bucket) if adapter else state.dense.start(bucket).get_future().then(lambda done: done.value()[0])
    )
