"""The adapter of DeepSpeed's engine with ZeRO 0 or 1, which waits for the means of each bucket. It imports no DeepSpeed."""

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

from sparsefusion.gradients.session import Session

from .deepspeed_settings import model_group, sent_dtype, skips_nonfinite_steps
from .refusals import refuse_deepspeed


class DeepSpeedEngine:
    """The adapter of one engine."""

    can_wait_for_buffer, reduce_scatters = False, False

    _session: Session  # set while the adapter is installed

    def __init__(self, engine: Any):
        self._engine, self.module = engine, engine.module
        self._stage = refuse_deepspeed(engine)
        self.group = engine.optimizer.dp_process_group if self._stage else engine.seq_data_parallel_group
        self._all = dict(engine.module.named_parameters())
        self.parameters = {name: p for name, p in self._all.items() if p.requires_grad}
        self._names = {id(p): name for name, p in self._all.items()}
        self.model_group = model_group(engine.mpu)
        self._factor = engine.sequence_parallel_size if engine.gradient_average else self.group.size()
        optimizer = engine.optimizer
        self.loss_scale = (lambda: optimizer.loss_scale) if engine.fp16_enabled() else None
        may_skip = skips_nonfinite_steps(optimizer, self._stage)
        self.skipped_steps = (lambda: engine.skipped_steps) if may_skip else None
        self.sent_itemsize = sent_dtype(engine, self._stage, self.parameters.values()).itemsize

    def install(self, session: Session) -> None:
        """Replace DeepSpeed's methods, so that gradients go to `session`."""
        self._session = session
        if self._stage:
            self._engine.optimizer.average_tensor = MethodType(self._average_tensor, self._engine.optimizer)
        else:
            self._engine.allreduce_bucket = MethodType(self._allreduce_bucket, self._engine)
        self._engine.allreduce_gradients = MethodType(self._allreduce_gradients, self._engine)
        self._engine.coalesce_grad_reduction = _coalesce

    def remove(self) -> None:
        """Restore DeepSpeed's own methods."""
        if self._stage:
            del self._engine.optimizer.average_tensor
        else:
            del self._engine.allreduce_bucket
        del self._engine.allreduce_gradients, self._engine.coalesce_grad_reduction
        del self._session

    def _average_tensor(self, optimizer: Any, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        """Replaces the method of ZeRO 1. tensor: the concatenated gradients of the bucket's parameters."""
        parameters = [
            optimizer.bit16_groups[i][at] for i, at, _ in optimizer.ipg_buckets[communication_data_type].params
        ]
        if not parameters:  # an empty bucket comes before a parameter that is larger than a bucket
            return
        gradients = _parts(tensor, [self._names[id(parameter)] for parameter in parameters], parameters)

        def reduce_dense():
            type(optimizer).average_tensor(optimizer, tensor, communication_data_type)

        self._session.reduce(gradients, [tensor], reduce_dense, self._factor).wait()

    def _allreduce_bucket(
        self, engine: Any, bucket: Sequence[torch.Tensor], dp_group: ProcessGroup, dp_world_size: int | None = None
    ) -> torch.Tensor:
        """Replaces the method of ZeRO 0: returns the flat means of a list of gradients."""
        flat = engine.flatten(bucket)
        names = {p.grad.data_ptr(): name for name, p in self._all.items() if p.grad is not None}
        gradients = _parts(flat, [names[gradient.data_ptr()] for gradient in bucket], bucket)

        def reduce_dense():
            flat.copy_(type(engine).allreduce_bucket(engine, [flat], dp_group, dp_world_size))

        self._session.reduce(gradients, [flat], reduce_dense, self._factor).wait()
        return flat

    def _allreduce_gradients(self, engine: Any, *arguments: object, **named: object) -> None:
        type(engine).allreduce_gradients(engine, *arguments, **named)
        if engine.is_gradient_accumulation_boundary():
            self._session.end_step()


def _parts(flat: torch.Tensor, names: Iterable[str], like: Iterable[torch.Tensor]) -> dict:
    """{name: its part of `flat`}, which is split by the sizes of the tensors `like`."""
    return dict(zip(names, flat.split([tensor.numel() for tensor in like]), strict=True))


def _coalesce() -> NoReturn:
    raise NotImplementedError("SparseFusion does not work with DeepSpeed's coalesce_grad_reduction: detach() it first")
