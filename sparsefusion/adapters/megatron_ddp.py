"""Megatron-Core's DistributedDataParallel: its bucket groups start and finish their reduction through a session.

Needs no import of Megatron. Expert parameters, whose group is another, stay with Megatron.
"""

from types import MethodType

from torch.distributed import get_world_size

from sparsefusion.gradients.session import usual_dtype

from .refusals import refuse_megatron, refuse_partly_skipped


class MegatronDDP:
    """The door of one Megatron DDP module, with or without overlap and distributed optimizer."""

    holds = True

    def __init__(self, ddp):
        self._ddp, self._config, self.module, self._session = ddp, ddp.ddp_config, ddp.module, None
        refuse_megatron(ddp)
        self.model_group = ddp.tp_group if ddp.tp_group.size() > 1 else None
        first, self.reduce_scatters = ddp.bucket_groups[0], self._config.use_distributed_optimizer
        groups = "intra_distributed_optimizer_instance_group", "data_parallel_group"
        self.group = getattr(first, groups[0] if self.reduce_scatters else groups[1])
        self._overlaps, self._handles = self._config.overlap_grad_reduce, {}
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        buckets = [bucket for group in ddp.bucket_groups for bucket in group.buckets]
        self.parameters = {names[id(p)]: p for bucket in buckets for p in bucket.params_list}
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.dtype = usual_dtype([bucket.grad_data for bucket in buckets])  # which need not be the parameters'
        self._factor = self._factor_of(buckets[0])
        self.early = self._overlaps and self._factor == 1

    def open(self, session) -> None:
        """Gradients go to `session` from now on."""
        refuse_partly_skipped(self._ddp, session)
        self._session = session
        for group in self._ddp.bucket_groups:
            group.start_grad_sync = MethodType(self._start, group)
            if self.early:
                group.register_grad_ready = MethodType(self._ready, group)
        self._ddp.finish_grad_sync = self._finish

    def close(self) -> None:
        """Megatron's own methods again."""
        for group in self._ddp.bucket_groups:
            del group.start_grad_sync
            if self.early:
                del group.register_grad_ready
            group.grad_reduce_handle = None  # of a step that an error ended
        del self._ddp.finish_grad_sync
        self._session = None

    def _start(self, group, force_all_reduce=False):
        """In the place of a bucket group's start_grad_sync; a second time, which is without overlap the end as well."""
        if id(group) not in self._handles:
            self._handles[id(group)] = self._reduce(group, force_all_reduce)
            if self._overlaps:
                group.grad_reduce_handle = self._handles[id(group)]
        elif not self._overlaps:
            self._handles[id(group)].wait()
        elif not group.is_first_batch:
            raise RuntimeError("Megatron starts a reduction that is under way")

    def _reduce(self, group, force_all_reduce):
        flats = [bucket.grad_data for bucket in group.buckets]
        parameters = [p for bucket in group.buckets for p in bucket.params_list]
        gradients = {self._names[id(p)]: p.main_grad.view(-1) for p in parameters}

        def whole():
            type(group).start_grad_sync(group, force_all_reduce)
            handle, group.grad_reduce_handle = group.grad_reduce_handle, None
            return handle

        return self._session.reduce(gradients, flats, whole, self._factor)

    def _ready(self, group, parameter, *arguments, **named):
        """In the place of a bucket group's register_grad_ready: a gradient of the last micro-batch is there."""
        if group.is_last_microbatch and group.golden_per_param_grad_ready_counts.get(parameter) == 1:
            self._session.ready(self._names[id(parameter)], parameter.main_grad.view(-1))
        type(group).register_grad_ready(group, parameter, *arguments, **named)

    def _factor_of(self, bucket) -> float:
        """What a mean is to be multiplied by: Megatron may want a sum, scaled."""
        ranks = 1 if self._config.average_in_collective else get_world_size(self.group)
        return round(bucket.gradient_scaling_factor * ranks, 12)  # 49 * (1 / 49) is not 1

    def _finish(self, *arguments, **named):
        """In the place of the module's finish_grad_sync. All groups start before any is waited for, as buffers may need."""
        try:
            for group in self._ddp.bucket_groups:
                if id(group) not in self._handles and (group.is_first_batch or not self._overlaps):
                    group.start_grad_sync(*arguments, **named)
            type(self._ddp).finish_grad_sync(self._ddp, *arguments, **named)
            self._session.end_step()
        finally:
            self._handles = {}
            self._session.abandon()  # if there was an error
