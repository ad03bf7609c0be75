"""The training loop with torch's `fully_shard`: parameters, gradients and moments are divided over the replicas.

Each layer gathers its parameters before it computes, forward and backward, over the ranks that hold the same part of the
model (data x context), and its gradients are summed by a reduce-scatter. All sums are SUM: gloo has no average.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from megatron_ssm.checkpoints.deepspeed_files import load_checkpoint
from megatron_ssm.checkpoints.training import MOMENTS, GatheredState
from megatron_ssm.model.parameters import fields_of

from .batches import Tokens
from .gradients import local_part
from .indexed import Samples
from .trainer import SequenceLoss, Trainer, entries, gathered_state, torch_adamw, unfilled_state


class FsdpTrainer(Trainer):
    """A `Trainer` of at least two replicas or context ranks, whose model is divided over them by `fully_shard`."""

    def _set_up(self, loss: SequenceLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert self.groups.data_context is not None  # at least two ranks
        mesh = DeviceMesh.from_group(self.groups.data_context, self.model.device.type)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        self._sharded = fully_shard(self.model, mesh=mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        register_fsdp_forward_method(self.model, "loss")
        fields_of(self.model)  # attaches the fields to the parameters, which are others now
        optimizer = torch_adamw(self.model, self.options)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros((), device=self.model.device), **moments}
        return loss, optimizer

    # A step

    def _backward(self, inputs: torch.Tensor, labels: torch.Tensor, is_last: bool) -> torch.Tensor:
        self._sharded.set_requires_gradient_sync(is_last)
        loss = self._share_of_loss(inputs, labels)
        loss.backward()  # a mean over the tokens of all data x context ranks, so their gradients add up
        return loss.detach()

    def _add_pending_gradients(self) -> list[str]:
        added, gradients = [], dict(self._gradients()) if self.pending_gradients else {}
        for name, parameter in self.named_parameters() if self.pending_gradients else ():
            if name in self.pending_gradients and parameter in gradients:
                mine = local_part(gradients[parameter])
                whole = self.pending_gradients[name].view(parameter.shape)  # of a DTensor: that of all ranks
                mine += self._part(whole).to(mine)
                added.append(name)
        return added

    def _discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of the undivided model, as `fully_shard` divides it; the last ranks may have none."""
        parts = whole.chunk(self.groups.data_context_ranks)
        rank = self.groups.data_context_rank
        return parts[rank] if rank < len(parts) else whole[:0]

    def evaluate(self, tokens: Tokens | Samples, leaves: Callable[[], bool] | None = None) -> float | None:
        """See `Trainer.evaluate`. Divides again what only a backward pass would divide: the parameters outside of layers."""
        result = super().evaluate(tokens, leaves)
        self._sharded.reshard()
        return result

    # Checkpoints

    def checkpoint_state(self) -> GatheredState:
        steps = next((int(state["step"]) for state in self.optimizer.state.values()), 0)
        return gathered_state(self.model, self.groups, self._gathered, steps)

    def _gathered(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        held = {"model": parameter.detach(), **self.optimizer.state.get(parameter, {})}
        return {name: held[name].full_tensor() for name in entries(parameter)}

    @torch.no_grad()
    def load(self, path: Path, step: int) -> None:
        """See `Trainer.load`. Each rank reads its whole part of the model on the CPU, and keeps its rows."""
        whole = unfilled_state(self.model, self.groups)
        load_checkpoint(path, step, self.model, whole)
        for parameter, tensors in whole.state.items():
            state = self.optimizer.state.get(parameter, {})
            for name, tensor in tensors.items():
                local_part(parameter if name == "model" else state[name]).copy_(self._part(tensor))
            if state:
                state["step"].fill_(whole.steps)
