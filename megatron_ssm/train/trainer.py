"""The training loop: tensor x context x data parallelism with torch's DDP, and AdamW. It is the base of the other engines.

Every step depends on the options and on its number, never on the number of ranks: 1 rank and 8 ranks see the same global
batch and compute the same loss and gradient norm. Replicas read different sequences; the context ranks of a replica share
each of its sequences, and its tensor-parallel ranks read the same tokens.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commfabric.collectives.wire_formats import at_least_fp32
from commfabric.foundation.command_line import Failure
from megatron_ssm.checkpoints.deepspeed_files import load_checkpoint
from megatron_ssm.checkpoints.training import MOMENTS, GatheredState
from megatron_ssm.kernels import fused_adam
from megatron_ssm.layers.experts import Experts
from megatron_ssm.layers.routing import RouterLosses, Routing
from megatron_ssm.model.model import Model
from megatron_ssm.model.parameters import parameter_groups
from megatron_ssm.parallel.groups import Groups
from megatron_ssm.spec.fields import field_of
from megatron_ssm.train.gradients import ordered_ddp
from sparsefusion import SparseFusion

from .batches import IGNORE_INDEX, Batches, BatchSizes, Tokens, windows
from .gradients import (
    Gradients,
    average_replicated_gradients,
    clip_gradients,
    divided_experts,
    grad_norm,
    whole_gradients,
)
from .indexed import IndexedBatches, Samples
from .options import Options


def learning_rate(options: Options, step: float) -> float:
    """The learning rate of a step: linear warm-up, then cosine, linear or no decay to min_lr.

    step: the samples read before it, as a number of full global batches.
    """
    warmup = options.lr_warmup_iters
    if step < warmup:
        return options.lr * min(step + 1, warmup) / warmup
    if options.lr_decay_style == "constant":
        return options.lr
    done = min(1.0, (step - warmup) / max(1, options.decay_steps - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if options.lr_decay_style == "cosine" else 1 - done
    return options.min_lr + (options.lr - options.min_lr) * left


def weight_decay(options: Options, step: float) -> float:
    """The weight decay of a step, as `learning_rate`: constant, or it grows linearly or along half a cosine."""
    start, end, style = options.start_weight_decay, options.end_weight_decay, options.weight_decay_incr_style
    if style == "constant":
        return options.weight_decay
    done = min(1.0, step / options.full_steps)
    return start + (end - start) * (done if style == "linear" else (1 - math.cos(math.pi * done)) / 2)


def decaying_groups(model: Model, options: Options) -> list[dict[str, Any]]:
    """`parameter_groups` with the weight decay of the end, which is not 0 if it grows."""
    return parameter_groups(model, weight_decay(options, options.full_steps))


def adamw(model: Model, options: Options) -> torch.optim.Optimizer:
    """AdamW (see `kernels.fused_adam`) of `parameter_groups`."""
    betas = (options.adam_beta1, options.adam_beta2)
    groups = decaying_groups(model, options)
    return fused_adam.adamw(groups, lr=options.lr, betas=betas, eps=options.adam_eps)


def torch_adamw(model: Model, options: Options) -> torch.optim.AdamW:
    """torch's AdamW of `parameter_groups`, for the engines that divide its state."""
    betas = (options.adam_beta1, options.adam_beta2)
    groups = decaying_groups(model, options)
    return torch.optim.AdamW(groups, options.lr, betas, options.adam_eps, fused=True)


def sequence_loss(model: Model, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`Model.loss` of whole sequences, the same on all context ranks, of which each of these takes its tokens."""
    schedule = model.schedule
    if schedule is None:
        return model.loss(inputs, labels)
    seq = inputs.shape[1]
    if model.context_ranks is not None and model.ranks.sequence_parallel:
        # The tokens of each block must divide over the tensor-parallel ranks.
        missing = -inputs.shape[1] % (model.context_ranks.blocks * model.ranks.size)
        inputs = nn.functional.pad(inputs, (0, missing))
        labels = nn.functional.pad(labels, (0, missing), value=IGNORE_INDEX)
    return model.loss(schedule.shard(inputs), schedule.shard(labels), seq=seq)


class SequenceLoss(nn.Module):
    """A module whose forward pass is the model's loss, so that an engine can wrap it. bf16: under autocast."""

    def __init__(self, model: Model, bf16: bool = False):
        super().__init__()
        self.model, self.bf16 = model, bf16

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
            return sequence_loss(self.model, inputs, labels)


def unfilled_state(model: Model, groups: Groups) -> GatheredState:
    """This rank's whole part of the model, unfilled, for `load_checkpoint` of engines that divide the optimizer's state."""
    shapes = {p: field_of(p).local_shape(groups.tensor_rank, groups.tensor_ranks) for p in model.parameters()}
    dtypes = {p: at_least_fp32(p.dtype) for p in shapes}
    return GatheredState(
        {p: {n: torch.empty(shape, dtype=dtypes[p]) for n in entries(p)} for p, shape in shapes.items()}
    )


def gathered_state(
    model: Model, groups: Groups, gather: Callable[[nn.Parameter], dict[str, torch.Tensor]], steps: int
) -> GatheredState:
    """This rank's share of the parameters, for `Snapshot.of` of engines that divide the optimizer's state.

    `gather` returns the whole tensors of a parameter, by the names of `entries`. The ranks that hold the same part of the
    model call it together, and each keeps its share on the CPU.
    """
    state = {}
    for index, parameter in enumerate(model.parameters()):
        tensors = gather(parameter)
        if index % groups.data_context_ranks == groups.data_context_rank:
            state[parameter] = {name: tensor.cpu() for name, tensor in tensors.items()}
    return GatheredState(state, steps)


def entries(parameter: nn.Parameter) -> tuple[str, ...]:
    return ("model", *MOMENTS) if parameter.requires_grad else ("model",)


@dataclass
class Step:
    """The result of a step.

    Attributes:
        loss: Of the whole global batch.
        grad_norm: Likewise, before clipping.
        lr: The learning rate.
        samples: The samples that the run has read.
        is_skipped: True if the loss or the norm is not finite, so that the step has changed nothing.
        more: Numbers of the routers of experts, for the log.
    """

    loss: float
    grad_norm: float
    lr: float
    samples: int = 0
    is_skipped: bool = False
    more: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """A model in training, over tensor-parallel, context and data-parallel ranks (see `Groups`).

    The other engines are subclasses. They replace how gradients are averaged over `groups.data_context`, and where gradients
    and the optimizer's state are; this one does it with torch's DistributedDataParallel, and every rank holds them whole.

    Args:
        model: The model to train.
        groups: Its process groups.
        options: Those of the run.
        report: Called on rank 0 with the lines that sparse gradient reduction reports.

    Attributes:
        loss: The module that computes the loss and averages its gradients.
        batch_sizes: The samples of each step.
        fusion: The sparse gradient reduction, or None.
        pending_gradients: {name: flat gradient} that an earlier run with sparse reduction had not sent yet; they are added
            to the next step's gradients.
    """

    def __init__(self, model: Model, groups: Groups, options: Options, report: Callable[[str], object] = print):
        self.model, self.groups, self.options = model, groups, options
        self.accumulation, self.batch_sizes = options.accumulation(groups.data_ranks), BatchSizes.of(options)
        self.loss, self.optimizer = self._set_up(SequenceLoss(model, options.bf16))
        self._decays = [group["weight_decay"] > 0 for group in self.optimizer.param_groups]
        if any(isinstance(module, Experts) for module in model.modules()):
            form = options.moe_router_load_balancing_type
            model.routing = Routing(RouterLosses(form, options.moe_aux_loss_coeff, options.moe_z_loss_coeff))
        self.fusion: SparseFusion | None = None
        self.pending_gradients: dict[str, torch.Tensor] = {}
        self.skipped_in_a_row = 0
        if groups.data_context is not None and options.gradient_mode != "dense":
            self.fusion = SparseFusion(
                options.gradient_density, options.gradient_sparsifier, options.gradient_mode,
                density_warmup=options.gradient_density_warmup, model_group=groups.tensor,
                copied=lambda parameter: field_of(parameter).copies(groups.tensor_ranks) > 1,
                report=lambda line: report(line) if groups.rank == 0 else None,
                on_nonfinite="skip-known" if options.max_skipped_steps else "raise",
            ).attach(self.loss)  # fmt: skip

    def _set_up(self, loss: SequenceLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module that averages the gradients of the loss, and the optimizer."""
        optimizer = adamw(self.model, self.options)
        if self.groups.data_context is None:
            return loss, optimizer
        tokens = torch.zeros(1, self.options.seq_length, dtype=torch.long, device=self.model.device)
        names = {parameter: name for name, parameter in loss.named_parameters()}
        experts = [names[parameter] for parameter in divided_experts(self.model)]
        return ordered_ddp(loss, self.groups.data_context, tokens, tokens, left_out=experts), optimizer

    def step(self, batches: Batches | IndexedBatches, step: int) -> Step:
        """One optimizer step on global batch number `step`, counted from 0.

        Context and data-parallel ranks sum their gradients, those of experts over `groups.expert_data`; the tensor-parallel
        ranks exchange what `Model.loss` and `grad_norm` send. A step whose loss or gradient norm is not finite, which all
        ranks see alike, is skipped.

        Raises:
            Failure: More than `max_skipped_steps` steps in a row are skipped; on every rank.
        """
        first, batch = self.batch_sizes.of_step(step)
        done = first / self.options.global_batch_size
        rows = batch // self.groups.data_ranks
        self.accumulation = rows // self.options.micro_batch_size
        inputs, labels = batches.samples(first + self.groups.data_rank * rows, rows)
        total: torch.Tensor | float = 0.0
        for index in range(self.accumulation):
            part = slice(index * self.options.micro_batch_size, (index + 1) * self.options.micro_batch_size)
            try:
                total += self._backward(inputs[part], labels[part], is_last=index == self.accumulation - 1)
            except FloatingPointError as error:  # SparseFusion raises it on every rank
                problem = str(error).partition(": ")[2].partition(". ")[0]
                raise Failure(f"step {step + 1}: {problem}, so training stops") from None
        self._sum_experts()
        added = self._add_pending_gradients()
        self._average_copies()
        norm = self._norm()
        loss, rate = float(total), learning_rate(self.options, done)
        more, loads = self._routing()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._skip(step, Step(loss, float(norm), rate, first + batch, is_skipped=True))
        self.skipped_in_a_row = 0
        for name in added:
            del self.pending_gradients[name]
        self._clip(norm)
        for group, decays in zip(self.optimizer.param_groups, self._decays, strict=True):
            group["lr"] = rate
            if decays:
                group["weight_decay"] = weight_decay(self.options, done)
        self._update()
        if self.options.moe_router_enable_expert_bias:
            Routing.correct(loads, self.options.moe_router_bias_update_rate)
        return Step(loss, float(norm), rate, first + batch, more=more)

    def _routing(self) -> tuple[dict[str, Any], dict[Any, torch.Tensor]]:
        """The log's numbers about the routers in this step, and how many tokens chose each expert of each layer."""
        if self.model.routing is None:
            return {}, {}
        values, loads = self.model.routing.take(self.groups.data_context, self.accumulation)
        more: dict[str, Any] = {**values}
        shares = [load / load.sum().clamp(min=1) for load in loads.values()]
        more["max_expert_load"] = max((share.max().item() * len(share) for share in shares), default=0.0)
        if self.options.moe_per_layer_logging:
            more["expert_loads"] = [load.tolist() for load in loads.values()]
        return more, loads

    def _skip(self, step: int, result: Step) -> Step:
        """Drop the gradients of a step that is not finite; returns its result, or raises Failure if it is one too many."""
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.options.max_skipped_steps:
            before = f" after {self.skipped_in_a_row - 1} skipped steps" if self.skipped_in_a_row > 1 else ""
            problem = f"loss {result.loss}, gradient norm {result.grad_norm}: not finite{before}, so training stops"
            raise Failure(f"step {step + 1}: {problem}")
        self._discard_gradients()
        return result

    def evaluate(self, tokens: Tokens | Samples, leaves: Callable[[], bool] | None = None) -> float | None:
        """See `evaluate`."""
        return evaluate(self.model, tokens, self.groups, self.options, leaves=leaves)

    def checkpoint_state(self) -> torch.optim.Optimizer | GatheredState:
        """The optimizer, or its gathered state, for `Snapshot.of`; all ranks call it together."""
        return self.optimizer

    def load(self, path: Path, step: int) -> None:
        """Continue from a training checkpoint of any engine, or from one of DeepSpeed's own; see `load_checkpoint`."""
        load_checkpoint(path, step, self.model, self.optimizer)

    def whole_parameters(self) -> contextlib.AbstractContextManager:
        """Within this context, each rank's model holds its part of all parameters, as `save` needs them."""
        return contextlib.nullcontext()

    def write_own_format(self, out: Path, step: int) -> None:
        """Write what the engine's own library reads to the run's directory, if an option asks for it; all ranks together."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) under the names that `fusion` uses."""
        loss = self.loss if isinstance(self.loss, SequenceLoss) else self.loss.module
        assert isinstance(loss, nn.Module)
        return loss.named_parameters()

    def _gradients(self) -> Gradients:
        """(parameter, the part of its gradient that this rank holds), after the last micro-batch."""
        return whole_gradients(self.model)

    def _add_pending_gradients(self) -> list[str]:
        """Add them to the gradients; returns their names. Those of parameters without a gradient wait for a later step."""
        added, gradients = [], dict(self._gradients()) if self.pending_gradients else {}
        for name, parameter in self.named_parameters() if self.pending_gradients else ():
            if name in self.pending_gradients and parameter in gradients:
                gradient = gradients[parameter]
                gradient += self.pending_gradients[name].view_as(gradient).to(gradient)
                added.append(name)
        return added

    def _backward(self, inputs: torch.Tensor, labels: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Add the gradient of one micro-batch; returns its share of the loss. Replicas average after the last one."""
        average: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(self.loss, DistributedDataParallel) and not is_last:
            average = self.loss.no_sync()
        with average:
            loss = self._share_of_loss(inputs, labels)
            # The loss is a mean over the tokens of all data x context ranks, so their gradients add up; DDP averages them.
            (loss * self.groups.data_context_ranks).backward()
        return loss.detach()

    def _share_of_loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        return self.loss(inputs.to(device), labels.to(device)).to(at_least_fp32(self.model.dtype)) / self.accumulation

    def _sum_experts(self) -> None:
        """Sum the gradients of experts over the ranks that hold the same, after the last micro-batch.

        `_backward` has multiplied them by the number of ranks over which DDP averages those of everything else.
        """
        for parameter in divided_experts(self.model):
            if parameter.grad is not None:
                parameter.grad /= self.groups.data_context_ranks
                if self.groups.expert_data is not None:
                    dist.all_reduce(parameter.grad, group=self.groups.expert_data)

    def _average_copies(self) -> None:
        average_replicated_gradients(self.model, self._gradients())

    def _norm(self) -> torch.Tensor:
        return grad_norm(self.model, self._gradients())

    def _clip(self, norm: torch.Tensor) -> None:
        clip_gradients(self.model, norm, self.options.clip_grad, self._gradients())

    def _update(self) -> None:
        self.optimizer.step()
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        fused_adam.zero_gradients(self.optimizer)


@torch.no_grad()
def evaluate(
    model: Model,
    tokens: Tokens | Samples,
    groups: Groups,
    options: Options,
    loss: nn.Module | None = None,
    leaves: Callable[[], bool] | None = None,
) -> float | None:
    """The loss on a held-out text. Replicas share its windows; all ranks call it together with the same tokens.

    Args:
        model: The model.
        tokens: The text, which is read in windows of seq_length tokens, each from an empty state.
        groups: The process groups of the model.
        options: Those of the run.
        loss: The module that computes the loss (None: `SequenceLoss`).
        leaves: Called before each batch of windows; returns True, on all ranks alike, to stop.

    Returns:
        Nats per byte, the same on every rank; None if the text was not read to its end.
    """
    loss = loss or SequenceLoss(model, options.bf16)
    if isinstance(tokens, Samples):
        inputs, labels = tokens.inputs, tokens.labels
    else:
        inputs, labels = windows(tokens, options.seq_length)
    rows, ranks = options.micro_batch_size, groups.data_ranks
    missing = -len(inputs) % (rows * ranks)
    inputs = nn.functional.pad(inputs, (0, 0, 0, missing))
    labels = nn.functional.pad(labels, (0, 0, 0, missing), value=IGNORE_INDEX)
    nats = 0.0
    for start in range(0, len(inputs), rows * ranks):
        if leaves is not None and leaves():
            return None
        mine = slice(start + groups.data_rank * rows, start + (groups.data_rank + 1) * rows)
        mean = loss(inputs[mine].to(model.device), labels[mine].to(model.device))
        nats += float(mean) * int((labels[start : start + rows * ranks] != IGNORE_INDEX).sum())
    return nats / tokens.text_bytes
