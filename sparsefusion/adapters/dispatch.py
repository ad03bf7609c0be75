"""Finds the adapter for a framework's object."""

from torch.nn.parallel import DistributedDataParallel

from .deepspeed_engine import DeepSpeedEngine
from .megatron_ddp import MegatronDDP
from .target_groups import is_deepspeed_engine, is_megatron_ddp
from .torch_ddp import TorchDDP

Adapter = TorchDDP | MegatronDDP | DeepSpeedEngine


def adapter_for(target: object) -> Adapter:
    """The adapter of `target`, by its methods. ValueError if the framework or its settings are not supported."""
    if isinstance(target, DistributedDataParallel):
        return TorchDDP(target)
    if is_megatron_ddp(target):
        return MegatronDDP(target)
    if is_deepspeed_engine(target):
        return DeepSpeedEngine(target)
    kinds = {kind.__name__ for kind in type(target).__mro__}
    is_sharded = kinds & {"FullyShardedDataParallel", "FSDPModule"}
    raise ValueError(
        f"SparseFusion attaches to DistributedDataParallel of torch or Megatron-Core, or to a DeepSpeed engine, not to "
        f"{type(target).__name__}" + (", whose gradients are sharded over the ranks" if is_sharded else "")
    )
