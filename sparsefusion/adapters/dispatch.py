"""Finds the adapter for a framework's object."""

from torch.nn.parallel import DistributedDataParallel

from .deepspeed_engine import DeepSpeedEngine
from .megatron_ddp import MegatronDDP
from .target_groups import is_deepspeed_engine, is_megatron_ddp
from .torch_ddp import TorchDDP

Adapter = TorchDDP | MegatronDDP | DeepSpeedEngine


def adapter_for(target: object) -> Adapter:
    """The adapter of `target`, which is recognized by its methods. ValueError: there is none, or it refuses the settings."""
    if isinstance(target, DistributedDataParallel):
        return TorchDDP(target)
    if is_megatron_ddp(target):
        return MegatronDDP(target)
    if is_deepspeed_engine(target):
        return DeepSpeedEngine(target)
    kinds = {kind.__name__ for kind in type(target).__mro__}
    is_sharded = kinds & {"FullyShardedDataParallel", "FSDPModule"}
    raise ValueError(
        f"SparseFusion attaches to torch's DistributedDataParallel, Megatron-Core's, or a DeepSpeed engine; this is "
        f"{type(target).__name__}" + (", whose gradients are divided over the ranks" if is_sharded else "")
    )
