"""The training loop over Megatron-Core's DistributedDataParallel, which sums gradients in buckets of its own.

With its distributed optimizer, AdamW's moments are divided over the replicas. Of that optimizer's interface, these are not
documented: which part of a parameter this rank updates, and the state that belongs to it.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_ssm.checkpoints.deepspeed_files import load_checkpoint
from megatron_ssm.checkpoints.training import MOMENTS, GatheredState
from megatron_ssm.parallel.groups import TIMEOUT, join_alone

from .gradients import Gradients, average_divided_gradients, clip_gradients, grad_norm
from .trainer import SequenceLoss, Trainer, adamw, gathered_state, torch_adamw, unfilled_state


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


class MegatronTrainer(Trainer):
    """A `Trainer` whose `loss` is a module of Megatron's DDP. The optimizer is AdamW, as in torch's engine."""

    def _set_up(self, loss: SequenceLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        join_alone(self.model.device.type)
        self._ddp = megatron_ddp(loss)
        return self._ddp, adamw(self.model, self.options)

    def _backward(self, inputs: torch.Tensor, labels: torch.Tensor, is_last: bool) -> torch.Tensor:
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            loss = self._share_of_loss(inputs, labels)
            loss.backward()
        if is_last:
            self._ddp.finish_grad_sync()
        return loss.detach()

    def _sum_experts(self) -> None:
        """Nothing: Megatron's DDP sums them over its own groups."""

    def _gradients(self) -> Gradients:
        parameters: Any = self.model.parameters()
        return ((parameter, parameter.main_grad) for parameter in parameters if parameter.requires_grad)

    def _update(self) -> None:
        for parameter, gradient in self._gradients():
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # or the next gradient would be added to main_grad twice
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        self._ddp.zero_grad_buffer()


class DividedMegatronTrainer(MegatronTrainer):
    """A `MegatronTrainer` with Megatron's distributed optimizer: each rank of `groups.data_context` has the summed gradients
    of its share of the parameters, updates these, and has their moments. The optimizer within is torch's AdamW.

    A step sends each gradient with a reduce-scatter and each updated parameter with an all-gather. The trainer computes the
    norm and clips, as in every engine. Megatron has this optimizer for parameters on CUDA only.
    """

    def _set_up(self, loss: SequenceLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        join_alone(self.model.device.type)
        optimizer = torch_adamw(self.model, self.options)
        self._ddp = megatron_ddp(loss, divides_optimizer=True)
        self._divided = megatron_optimizer(self._ddp, optimizer)
        for share in (share for group in optimizer.param_groups for share in group["params"]):
            moments = {name: torch.zeros_like(share) for name in MOMENTS}
            optimizer.state[share] = {"step": torch.zeros((), device=share.device), **moments}
        return self._ddp, optimizer

    # A step

    def _part(self, parameter: nn.Parameter) -> slice:
        """The elements of a parameter, as a vector, that this rank updates."""
        if parameter not in self._divided.model_param_gbuf_map:
            return slice(0, 0)
        part = self._divided._get_model_param_range_map(parameter)["param"]
        return slice(part.start, part.end)

    def _parts(self) -> Gradients:
        """(parameter, the elements of its gradient that this rank has summed), after the last micro-batch."""
        return ((parameter, gradient.view(-1)[self._part(parameter)]) for parameter, gradient in self._gradients())

    def _average_copies(self) -> None:
        parts = ((parameter, self._part(parameter), gradient) for parameter, gradient in self._parts())
        average_divided_gradients(self.model, parts, self.groups.data_context)

    def _norm(self) -> torch.Tensor:
        return grad_norm(self.model, self._parts(), self.groups.data_context)

    def _clip(self, norm: torch.Tensor) -> None:
        clip_gradients(self.model, norm, self.options.clip_grad, self._parts())

    def _update(self) -> None:
        self._divided.prepare_grads()  # the shares get their gradients
        self._divided.step_with_ready_grads()  # and are updated; then the ranks gather the parameters
        self._discard_gradients()

    # Checkpoints

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The moments of this rank's elements of a parameter, and its count of steps; empty if it has none."""
        part = self._part(parameter)
        return self._divided._get_main_param_and_optimizer_states(parameter) if part.stop > part.start else {}

    def checkpoint_state(self) -> GatheredState:
        steps = (int(held["step"]) for held in self.optimizer.state.values())
        return gathered_state(self.model, self.groups, self._gathered, next(steps, 0))

    def _gathered(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The parameter and its moments, whole on every rank that holds this part of the model.

        The ranks all-reduce the moments, in which each has filled its own elements.
        """
        whole = {name: torch.zeros_like(parameter) for name in MOMENTS if parameter.requires_grad}
        mine = self._moments(parameter) if parameter.requires_grad else {}
        for name, moment in whole.items():
            if mine:
                moment.view(-1)[self._part(parameter)] = mine[name]
            if self.groups.data_context is not None:
                dist.all_reduce(moment, group=self.groups.data_context)
        return {"model": parameter.detach(), **whole}

    @torch.no_grad()
    def load(self, path: Path, step: int) -> None:
        """See `Trainer.load`. Each rank reads its whole part of the model on the CPU, and keeps its elements' moments."""
        whole = unfilled_state(self.model, self.groups)
        load_checkpoint(path, step, self.model, whole)
        for parameter, tensors in whole.state.items():
            parameter.copy_(tensors["model"])  # and with it the share, which is in the same memory
            if mine := self._moments(parameter):
                for name in MOMENTS:
                    mine[name].copy_(tensors[name].view(-1)[self._part(parameter)])
                mine["step"].fill_(whole.steps)
