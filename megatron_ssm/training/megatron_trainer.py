"""The training loop over Megatron-Core's DistributedDataParallel, which sums gradients in buckets of its own."""

import contextlib
from typing import Any

import torch
from torch import nn

from megatron_ssm.parallel.groups import join_alone
from megatron_ssm.parallel.megatron_ddp import megatron_ddp

from .trainer import Gradients, SequenceLoss, Trainer, adamw


class MegatronTrainer(Trainer):
    """A `Trainer` whose `loss` is a module of Megatron's DDP. The optimizer is AdamW, as in torch's engine.

    It needs CUDA, because Megatron's DDP allocates its buckets on the current CUDA device.
    """

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
