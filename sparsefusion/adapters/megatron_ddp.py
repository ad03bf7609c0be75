"""The adapter of Megatron-Core's DistributedDataParallel, except for gradients of experts, which Megatron itself reduces."""

from types import MethodType
from typing import Any

from torch.distributed import get_world_size

from sparsefusion.gradients.session import Session, Waitable, most_common_dtype

from .refusals import refuse_experts_with_skipped_steps, refuse_megatron


class MegatronDDP:
    """The adapter of one Megatron DDP module, with or without overlap and distributed optimizer."""

    can_wait_for_buffer = True
    _session: Session  # set while the adapter is installed

    def __init__(self, ddp: Any):
        self._ddp, self._config, self.module = ddp, ddp.ddp_config, ddp.module
        refuse_megatron(ddp)
        self.model_group = ddp.tp_group if ddp.tp_group.size() > 1 else None
        first, self.reduce_scatters = ddp.bucket_groups[0], self._config.use_distributed_optimizer
        groups = "intra_distributed_optimizer_instance_group", "data_parallel_group"
        self.group = getattr(first, groups[0] if self.reduce_scatters else groups[1])
        self._overlaps, self._handles = self._config.overlap_grad_reduce, {}
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        buckets = [bucket for group in ddp.bucket_groups for bucket in group.buckets]
        self.parameters = {self._names[id(p)]: p for bucket in buckets for p in bucket.params_list}
        self.dtype = most_common_dtype([bucket.grad_data for bucket in buckets])  # may differ from the parameters'
        self._factor = self._mean_factor(buckets[0])
        self.can_send_early = self.sends_before_first_atom = self._overlaps and self._factor == 1

    def install(self, session: Session) -> None:
        """Replace Megatron's methods, so that gradients go to `session`."""
        refuse_experts_with_skipped_steps(self._ddp, session)
        self._session = session
        for group in self._ddp.bucket_groups:
            group.start_grad_sync = MethodType(self._start, group)
            if self.can_send_early:
                group.register_grad_ready = MethodType(self._register_ready, group)
        self._ddp.finish_grad_sync = self._finish

    def remove(self) -> None:
        """Restore Megatron's own methods."""
        for group in self._ddp.bucket_groups:
            del group.start_grad_sync
            if self.can_send_early:
                del group.register_grad_ready
            group.grad_reduce_handle = None  # may remain from a step that an error ended
        del self._ddp.finish_grad_sync
        del self._session

    def _start(self, group: Any, force_all_reduce: bool = False) -> None:
        """Replaces a bucket group's start_grad_sync. Without overlap, a second call waits for the result."""
        if id(group) not in self._handles:
            self._handles[id(group)] = self._reduce(group, force_all_reduce)
            if self._overlaps:
                group.grad_reduce_handle = self._handles[id(group)]
        elif not self._overlaps:
            self._handles[id(group)].wait()
        elif not group.is_first_batch:
            raise RuntimeError("Megatron started a reduction that is still in progress")

    def _reduce(self, group: Any, force_all_reduce: bool) -> Waitable:
        flats = [bucket.grad_data for bucket in group.buckets]
        parameters = (p for bucket in group.buckets for p in bucket.params_list)

        def reduce_dense():
            type(group).start_grad_sync(group, force_all_reduce)
            handle, group.grad_reduce_handle = group.grad_reduce_handle, None
            return handle

        gradients = {self._names[id(p)]: p.main_grad.view(-1) for p in parameters}
        return self._session.reduce(gradients, flats, reduce_dense, self._factor)

    def _register_ready(self, group: Any, parameter: Any, *arguments: object, **named: object) -> None:
        """Replaces a bucket group's register_grad_ready: in the last micro-batch, the gradient is complete."""
        if group.is_last_microbatch and group.golden_per_param_grad_ready_counts.get(parameter) == 1:
            self._session.gradient_ready(self._names[id(parameter)], parameter.main_grad.view(-1))
        type(group).register_grad_ready(group, parameter, *arguments, **named)

    def _mean_factor(self, bucket: Any) -> float:
        ranks = 1 if self._config.average_in_collective else get_world_size(self.group)
        return round(bucket.gradient_scaling_factor * ranks, 12)  # 49 * (1 / 49) is not 1

    def _finish(self, *arguments: object, **named: object) -> None:
        """Replaces the module's finish_grad_sync. It starts all groups before it waits: buffers may span several groups."""
        try:
            for group in self._ddp.bucket_groups:
                if id(group) not in self._handles and (group.is_first_batch or not self._overlaps):
                    group.start_grad_sync(*arguments, **named)
            type(self._ddp).finish_grad_sync(self._ddp, *arguments, **named)
            self._session.end_step()
        finally:
            self._handles = {}
            self._session.abandon_step()  # has no effect unless there was an error
