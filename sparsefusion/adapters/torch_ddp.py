"""The adapter of torch's DistributedDataParallel: a communication hook. The hook of the last bucket ends the step.

Collectives are started in the body of hooks, never in a callback of a future: callbacks of several buckets may run in
different orders on different ranks, and the ranks' collectives would not match.
"""

import weakref
from collections.abc import Callable

import torch
from torch.distributed import GradBucket, Work
from torch.nn.parallel import DistributedDataParallel

from sparsefusion.gradients.session import Session

from .adapter import Adapter, NotCopied

HOOK_ATTRIBUTE = "_sparsefusion_hook"  # DDP accepts one hook in its lifetime, so it stays when the adapter is removed


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


class HookState(NotCopied):
    """The state of the communication hook, which torch's DDP keeps for its lifetime.

    The garbage collector does not see DDP's reference to it, so it references the adapter weakly.
    """

    dense: DenseBuckets  # DDP's own reduction, which runs without an adapter; set when the hook is registered

    def __init__(self) -> None:
        super().__init__(None)
        self.adapter: Callable[[], TorchDDP | None] = lambda: None


class TorchDDP(Adapter):
    """The adapter of one DDP module."""

    def __init__(self, ddp: DistributedDataParallel):
        super().__init__(ddp.module, ddp.process_group, reduced_parameters(ddp))
        self._ddp = ddp
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.can_send_early = not ddp.static_graph  # such a graph may accumulate into a gradient several times

    def install(self, session: Session) -> None:
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
        state.adapter, self._session = weakref.ref(self), session
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []  # the futures and buckets of this step
        trained = [p for p in self.parameters.values() if self.can_send_early and p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(_ready_hook(weakref.ref(self))) for p in trained]

    def remove(self) -> None:
        getattr(self._ddp, HOOK_ATTRIBUTE).adapter = lambda: None
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
    if adapter := state.adapter():
        return adapter.hook(bucket)
    return state.dense.start(bucket).get_future().then(lambda done: done.value()[0])


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


def refuse_ddp(ddp: DistributedDataParallel) -> None:
    """ValueError if torch's DDP has a communication hook or no buckets, or may skip the end of a step."""
    if ddp._comm_hooks:
        raise ValueError(f"this DDP has the communication hook {ddp._comm_hooks[0][0].__name__}; it accepts only one")
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError("this DDP has the python reducer (torch._dynamo.config.optimize_ddp), which has no buckets")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        raise ValueError("this DDP has optimizers in its backward pass, which use its one communication hook")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("this DDP has skip_all_reduce_unused_params, which skips the end of SparseFusion's steps")
