"""Megatron-Core's DistributedDataParallel around a module of ours, which it takes for one of Megatron's."""

import warnings
from typing import Any

from torch import nn

from .groups import TIMEOUT


def megatron_ddp(module: nn.Module) -> Any:
    """The module in Megatron's DDP, which sums gradients over the data-parallel and context ranks of its parallel_state.

    Each parameter gets a `main_grad` of its dtype, in buckets on the current CUDA device; a bucket is sent as soon as the
    last micro-batch has filled it, with one all-reduce. Needs torch.distributed; a parallel_state that is not set up is one
    for replicas only.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT.total_seconds() / 60)
    # Of a transformer's configuration, DDP reads that gradients are summed, not averaged; the sizes are placeholders.
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), module)
