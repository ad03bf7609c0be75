"""The adapter of DeepSpeed's engine with ZeRO 0 or 1, which waits for the means of each bucket. It imports no DeepSpeed."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from sparsefusion.gradients.session import Session, most_common_dtype

from .adapter import Adapter

OLDEST_DEEPSPEED = "0.19.4"  # older versions have other arguments of ZeRO 1's methods, or skip other steps


class DeepSpeedEngine(Adapter):
    """The adapter of one engine."""

    can_wait_for_buffer = False

    def __init__(self, engine: Any):
        self._engine, self._stage = engine, refuse_deepspeed(engine)
        group = engine.optimizer.dp_process_group if self._stage else engine.seq_data_parallel_group
        self._all = dict(engine.module.named_parameters())
        super().__init__(engine.module, group, {name: p for name, p in self._all.items() if p.requires_grad})
        self._names = {id(p): name for name, p in self._all.items()}
        self.model_group = model_group(engine.mpu)
        self._factor = engine.sequence_parallel_size if engine.gradient_average else self.group.size()
        optimizer = engine.optimizer
        self.loss_scale = (lambda: optimizer.loss_scale) if engine.fp16_enabled() else None
        may_skip = skips_nonfinite_steps(optimizer, self._stage)
        self.skipped_steps = (lambda: engine.skipped_steps) if may_skip else None
        self.sent_itemsize = sent_dtype(engine, self._stage, self.parameters.values()).itemsize

    def install(self, session: Session) -> None:
        self._session = session
        if self._stage:
            self._engine.optimizer.average_tensor = MethodType(self._average_tensor, self._engine.optimizer)
        else:
            self._engine.allreduce_bucket = MethodType(self._allreduce_bucket, self._engine)
        self._engine.allreduce_gradients = MethodType(self._allreduce_gradients, self._engine)
        self._engine.coalesce_grad_reduction = _coalesce

    def remove(self) -> None:
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


def skips_nonfinite_steps(optimizer: Any, stage: int) -> bool:
    """Return True if DeepSpeed skips a step whose gradients are not finite."""
    if not stage:
        return hasattr(optimizer, "overflow")
    checks_norm = hasattr(sys.modules[type(optimizer).__module__], "is_invalid_grad_norm")  # since 0.19.8
    by_norm = checks_norm and optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16
    return optimizer.check_grad_overflow or by_norm


def model_group(mpu: object) -> ProcessGroup | None:
    """The ranks over which the model is divided, from the methods of `mpu` that DeepSpeed calls; None for one rank."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    get_group = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    group = get_group() if get_group else None
    return group if group is not None and group.size() > 1 else None


def sent_dtype(engine: Any, stage: int, parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype in which DeepSpeed sends most gradients. It depends on the parameter with ZeRO 1 and torch_autocast."""
    if not stage or engine.sequence_parallel_size > 1:
        return engine.communication_data_type
    return most_common_dtype(parameters, engine.optimizer.get_param_comm_dtype)


def refuse_deepspeed(engine: Any) -> int:
    """The ZeRO stage of the engine. ValueError if it is 2 or 3, or if the version or a feature is not supported."""
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(f"ZeRO stage {stage} shards gradients over the ranks; SparseFusion needs stage 0 or 1")
    for is_used, feature in _unsupported_features(engine, engine.optimizer, stage):
        if is_used:
            raise ValueError(f"SparseFusion does not work with DeepSpeed's {feature}")
    return stage


def _unsupported_features(engine: Any, optimizer: Any, stage: int) -> Iterator[tuple[object, str]]:
    """Pairs (is used, name) of unsupported features, in the order in which they are reported."""
    version = TorchVersion(sys.modules["deepspeed"].__version__)
    yield version < OLDEST_DEEPSPEED, f"version {version}: {OLDEST_DEEPSPEED} is the oldest"
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    sent = engine.communication_data_type
    narrow = next((p.dtype for p in trained.values() if torch.promote_types(p.dtype, sent) != p.dtype), None)
    yield narrow and engine.sequence_parallel_size == 1, f"communication_data_type {sent} of {narrow} gradients"
    stages = getattr(engine.mpu, "get_pipeline_model_parallel_world_size", lambda: 1)()
    yield engine.pipeline_parallelism or stages > 1, "pipeline parallelism"
    yield engine.has_moe_layers, "mixtures of experts"
    scalers = (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(optimizer, "torch_autocast_gradscaler", None),
    )
    yield any(scaler is not None for scaler in scalers), "torch_autocast with float16"
    if not stage and skips_nonfinite_steps(optimizer, stage):
        checked = {id(p) for group in optimizer.fp16_groups for p in group}
        left_out = [name for name, p in trained.items() if p.numel() and id(p) not in checked]
        yield left_out, f"optimizer, which skips steps without checking {', '.join(left_out[:3])}"
    if stage:
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
        yield not hasattr(optimizer, "average_tensor"), f"{type(optimizer).__name__}: leave out grad_accum_dtype"
        yield not optimizer.contiguous_gradients, "contiguous_gradients: false"
        yield any(map(compact, range(len(optimizer.bit16_groups)))), "grad_accum_dtype beside another dtype"
        yield optimizer.cpu_offload, "offload_optimizer"
        yield optimizer.overlap_comm and torch.cuda.is_available(), "overlap_comm on CUDA"
