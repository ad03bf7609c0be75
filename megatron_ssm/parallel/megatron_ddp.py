"""Megatron-Core's DistributedDataParallel and DistributedOptimizer for modules and optimizers of this package."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .groups import TIMEOUT


def megatron_ddp(module: nn.Module, divides_optimizer: bool = False) -> Any:
    """The module in Megatron's DDP, which sums gradients over the data-parallel and context ranks of its parallel_state.

    Each parameter gets a `main_grad` of its dtype, in buckets on the device of the module. A bucket is sent by one
    all-reduce as soon as the last micro-batch has filled it. Needs torch.distributed. If parallel_state is not set up,
    it is set up with data parallelism only.

    divides_optimizer: For `megatron_optimizer`. A bucket is sent by one reduce-scatter, after which each rank has the
        sums of its share, and the parameters move to buckets as well.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT.total_seconds() / 60)
    # DDP needs a transformer's configuration only to sum gradients instead of averaging; the sizes are placeholders.
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True)
    how = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=divides_optimizer)
    with _buckets_beside(module):
        return DistributedDataParallel(config, how, module)


@contextlib.contextmanager
def _buckets_beside(module: nn.Module) -> Iterator[None]:
    """Let Megatron's DDP, which allocates buckets on `torch.cuda.current_device()`, use the CPU for a module on the CPU.

    The replacement affects all threads of the process while the context is open.
    """
    usual = torch.cuda.current_device
    if all(parameter.is_cpu for parameter in module.parameters()):
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = usual


def megatron_optimizer(ddp: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Megatron's DistributedOptimizer around torch's AdamW, whose groups hold parameters of a module in `megatron_ddp`.

    Afterwards the groups hold this rank's shares of the parameters, as flat views of their memory. Megatron supports
    parameters on CUDA in fp32 or 16 bits; TypeError for others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with torch.no_grad():  # shares must not be part of a graph
        return DistributedOptimizer(
            optimizer, OptimizerConfig(use_distributed_optimizer=True), grad_scaler=None, init_state_fn=None,
            model_chunks=[ddp], per_model_buffers={0: ddp.buffers}, data_parallel_group=ddp.intra_dp_cp_group,
            data_parallel_group_gloo=None, data_parallel_group_idx=0, distributed_optimizer_instance_id=0,
        )  # fmt: skip
