"""Which framework reduces a target's gradients, and whether it can be taken over."""

from torch.nn.parallel import DistributedDataParallel

from .deepspeed_engine import DeepSpeedEngine
from .megatron_ddp import MegatronDDP
from .torch_ddp import TorchDDP


def door_of(target):
    """The adapter that fits, told by its methods. ValueError: none does."""
    if isinstance(target, DistributedDataParallel):
        return TorchDDP(target)
    if hasattr(target, "bucket_groups") and hasattr(target, "finish_grad_sync"):
        return MegatronDDP(target)
    if hasattr(target, "zero_optimization_stage") and hasattr(target, "allreduce_gradients"):
        return DeepSpeedEngine(target)
    kinds = {kind.__name__ for kind in type(target).__mro__}
    sharded = kinds & {"FullyShardedDataParallel", "FSDPModule"}
    raise ValueError(
        f"SparseFusion attaches to torch's DistributedDataParallel, Megatron-Core's, or a DeepSpeed engine; this is "
        f"{type(target).__name__}" + (", whose gradients are divided over the ranks" if sharded else "")
    )
