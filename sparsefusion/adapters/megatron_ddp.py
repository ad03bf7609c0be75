"""The adapter of Megatron-Core's DistributedDataParallel, except for gradients of experts, which Megatron itself reduces."""

from types import MethodType
from typing import Any

from torch.distributed import get_world_size

from sparsefusion.gradients.session import Session, Waitable, most_common_dtype

from .adapter import Adapter


class MegatronDDP(Adapter):
    """The adapter of one Megatron DDP module, with or without overlap and distributed optimizer."""

    def __init__(self, ddp: Any):
        self._ddp, self._config = ddp, ddp.ddp_config
        refuse_megatron(ddp)
        is_sharded, first = self._config.use_distributed_optimizer, ddp.bucket_groups[0]
        group = first.intra_distributed_optimizer_instance_group if is_sharded else first.data_parallel_group
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        buckets = [bucket for group in ddp.bucket_groups for bucket in group.buckets]
        super().__init__(ddp.module, group, {self._names[id(p)]: p for b in buckets for p in b.params_list})
        self.dtype = most_common_dtype([bucket.grad_data for bucket in buckets])  # may differ from the parameters'
        self.sent_itemsize = self.dtype.itemsize
        self.dense_operation = "reduce_scatter" if is_sharded else "all_reduce"
        self.model_group = ddp.tp_group if ddp.tp_group.size() > 1 else None
        self._overlaps, self._handles = self._config.overlap_grad_reduce, {}
        self._factor = self._mean_factor(buckets[0])
        self.can_send_early = self.sends_before_first_atom = self._overlaps and self._factor == 1

    def install(self, session: Session) -> None:
        refuse_experts_with_skipped_steps(self._ddp, session)
        self._session = session
        for group in self._ddp.bucket_groups:
            group.start_grad_sync = MethodType(self._start, group)
            if self.can_send_early:
                group.register_grad_ready = MethodType(self._register_ready, group)
        self._ddp.finish_grad_sync = self._finish

    def remove(self) -> None:
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


def refuse_megatron(ddp: Any) -> None:
    """ValueError if Megatron's DDP reduces nothing or over two groups, or has stages that skip steps independently."""
    if getattr(ddp.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
        raise ValueError("num_distributed_optimizer_instances > 1 reduces over two groups, and SparseFusion over one")
    for option in ("check_for_large_grads", "reduce_scatter_with_fp32_accumulation"):
        if getattr(ddp.ddp_config, option, False):
            raise ValueError(f"SparseFusion does not work with Megatron's {option}")
    if not ddp.bucket_groups:
        raise ValueError("this Megatron DDP has no parameters that are reduced over the data-parallel group")
    stages = ddp.pp_group if isinstance(ddp.pp_group, list) else [ddp.pp_group]
    if any(group.size() > 1 for group in stages):
        raise ValueError(
            "SparseFusion does not work with Megatron's pipeline parallelism, whose stages have their own steps"
        )


def refuse_experts_with_skipped_steps(ddp: Any, session: Session) -> None:
    """ValueError if Megatron's DDP may skip a step because of gradients of experts, which the session does not see."""
    if (session.skips_nonfinite_steps or session.loss_scale) and ddp.expert_parallel_bucket_groups:
        raise ValueError(
            "SparseFusion with a loss scale, or skipped steps, does not work with Megatron's experts: a step is skipped if "
            "their gradients overflow, and the elements that it sent of other gradients would be lost"
        )
