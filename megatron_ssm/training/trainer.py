"""The training loop: tensor x context x data parallelism with torch's DDP, and AdamW.

Every step depends on the options and on its number, never on the number of ranks: 1 rank and 8 ranks see the same global
batch and compute the same loss and gradient norm. Replicas read different sequences; the context ranks of a replica share
each of its sequences, and its tensor-parallel ranks read the same tokens.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_ssm.configs.layouts import field_of
from megatron_ssm.models.model import Model
from megatron_ssm.ops import fused_adam
from megatron_ssm.parallel.groups import Groups
from sparsefusion import SparseFusion
from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.foundation.command_line import Failure

from .data import IGNORE_INDEX, Batches, Tokens, windows
from .options import Options


def learning_rate(options: Options, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then cosine, linear or no decay to min_lr."""
    warmup = options.lr_warmup_iters
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.lr_decay_style == "constant":
        return options.lr
    done = min(1.0, (step - warmup) / max(1, options.decay_steps - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if options.lr_decay_style == "cosine" else 1 - done
    return options.min_lr + (options.lr - options.min_lr) * left


def adamw(model: Model, options: Options) -> torch.optim.Optimizer:
    """AdamW (see `ops.fused_adam`). Weight decay applies to matrices, not to A_log, D, norms and biases."""
    parameters = list(model.parameters())
    decayed = [p for p in parameters if field_of(p).has_weight_decay]
    others = [p for p in parameters if not field_of(p).has_weight_decay]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (options.adam_beta1, options.adam_beta2)
    return fused_adam.adamw(groups, lr=options.lr, betas=betas, eps=options.adam_eps)


@torch.no_grad()
def grad_norm(model: Model) -> torch.Tensor:
    """The 2-norm of the whole model's gradient: a scalar tensor, the same on every rank.

    Each element counts once, however many ranks hold it: of a parameter that c tensor-parallel ranks hold, each rank adds
    1/c of the squares. All-reduces one element over the tensor-parallel ranks.
    """
    ranks = model.ranks
    total = torch.zeros((), dtype=at_least_fp32(model.dtype), device=model.device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += parameter.grad.to(total.dtype).square().sum() / field_of(parameter).copies(ranks.size)
    return ranks.all_reduce_exact(total, ranks.group).sqrt()


@torch.no_grad()
def clip_gradients(model: Model, norm: torch.Tensor, limit: float) -> None:
    """Scale every gradient by limit / (norm + 1e-6) if norm > limit, as torch and Megatron do; limit 0 is no limit."""
    if limit and norm > limit:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((limit / (norm + 1e-6)).to(parameter.grad.dtype))


def sequence_loss(model: Model, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`Model.loss` of whole sequences, the same on all context ranks, of which each of these takes its tokens."""
    schedule = model.schedule
    if schedule is None:
        return model.loss(inputs, labels)
    if model.context_ranks is not None and model.ranks.sequence_parallel:
        # The tokens of each block must divide over the tensor-parallel ranks.
        missing = -inputs.shape[1] % (model.context_ranks.blocks * model.ranks.size)
        inputs = nn.functional.pad(inputs, (0, missing))
        labels = nn.functional.pad(labels, (0, missing), value=IGNORE_INDEX)
    return model.loss(schedule.shard(inputs), schedule.shard(labels), seq=inputs.shape[1])


class _Loss(nn.Module):
    """A module whose forward pass is the model's loss, so that DDP can wrap it."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `sequence_loss`."""
        return sequence_loss(self.model, inputs, labels)


@dataclass
class Step:
    """The result of a step; `loss` and `grad_norm` (before clipping) are those of the whole global batch.

    is_skipped: one of them is not finite, so the step has changed nothing.
    """

    loss: float
    grad_norm: float
    lr: float
    is_skipped: bool = False


class Trainer:
    """A model in training, over tensor-parallel, context and data-parallel ranks (see `Groups`).

    report: is called on rank 0 with the lines that sparse gradient reduction reports. fusion: the sparse gradient reduction,
    or None. pending_gradients: {name: flat gradient} that an earlier run with sparse reduction had not sent yet; they are
    added to the next step's gradients.
    """

    def __init__(self, model: Model, groups: Groups, options: Options, report: Callable[[str], object] = print):
        self.model, self.groups, self.options = model, groups, options
        self.accumulation = options.accumulation(groups.data_ranks)
        self.optimizer = adamw(model, options)
        self.loss: nn.Module = _Loss(model)
        if groups.data_context is not None:
            self.loss = DistributedDataParallel(
                self.loss, process_group=groups.data_context, gradient_as_bucket_view=True
            )
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

    def step(self, batches: Batches, step: int) -> Step:
        """One optimizer step on global batch number `step`, counted from 0.

        Context and data-parallel ranks sum their gradients; the tensor-parallel ranks exchange what `Model.loss` and
        `grad_norm` send. A step whose loss or gradient norm is not finite, which all ranks see alike, is skipped; Failure on
        every rank if there are more than `max_skipped_steps` of these in a row.
        """
        inputs, labels = batches.batch(step, self.groups.data_rank, self.groups.data_ranks)
        total: torch.Tensor | float = 0.0
        for index in range(self.accumulation):
            rows = slice(index * self.options.micro_batch_size, (index + 1) * self.options.micro_batch_size)
            try:
                total += self._backward(inputs[rows], labels[rows], is_last=index == self.accumulation - 1)
            except FloatingPointError as error:  # SparseFusion raises it on every rank
                problem = str(error).partition(": ")[2].partition(". ")[0]
                raise Failure(f"step {step + 1}: {problem}, so training stops") from None
        added = self._add_pending_gradients()
        norm = grad_norm(self.model)
        loss, rate = float(total), learning_rate(self.options, step)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._skip(step, Step(loss, float(norm), rate, is_skipped=True))
        self.skipped_in_a_row = 0
        for name in added:
            del self.pending_gradients[name]
        clip_gradients(self.model, norm, self.options.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        fused_adam.zero_gradients(self.optimizer)
        return Step(loss, float(norm), rate)

    def _skip(self, step: int, result: Step) -> Step:
        """Drop the gradients of a step that is not finite; returns its result, or raises Failure if it is one too many."""
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.options.max_skipped_steps:
            before = f" after {self.skipped_in_a_row - 1} skipped steps" if self.skipped_in_a_row > 1 else ""
            problem = f"loss {result.loss}, gradient norm {result.grad_norm}: not finite{before}, so training stops"
            raise Failure(f"step {step + 1}: {problem}")
        fused_adam.zero_gradients(self.optimizer)
        return result

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) under the names that `fusion` uses."""
        loss = self.loss.module if isinstance(self.loss, DistributedDataParallel) else self.loss
        return loss.named_parameters()

    def _add_pending_gradients(self) -> list[str]:
        """Add them to the gradients; returns their names. Those of parameters without a gradient wait for a later step."""
        added = []
        for name, parameter in self.named_parameters() if self.pending_gradients else ():
            if name in self.pending_gradients and parameter.grad is not None:
                parameter.grad += self.pending_gradients[name].view_as(parameter).to(parameter.grad)
                added.append(name)
        return added

    def _backward(self, inputs: torch.Tensor, labels: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Add the gradient of one micro-batch; returns its share of the loss. Replicas average after the last one."""
        model, device = self.model, self.model.device
        average: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(self.loss, DistributedDataParallel) and not is_last:
            average = self.loss.no_sync()
        with average:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.options.bf16):
                loss = self.loss(inputs.to(device), labels.to(device)) / self.accumulation
            # The loss is a mean over the tokens of all data x context ranks, so their gradients add up; DDP averages them.
            (loss * self.groups.data_context_ranks).backward()
        return loss.detach().to(at_least_fp32(model.dtype))


@torch.no_grad()
def evaluate(model: Model, tokens: Tokens, groups: Groups, options: Options) -> float:
    """Nats per byte of a held-out text, the same on every rank.

    The text is read in windows of seq_length tokens, each from an empty state. Replicas share the windows; all ranks call it
    together with the same tokens.
    """
    inputs, labels = windows(tokens, options.seq_length)
    rows, ranks = options.micro_batch_size, groups.data_ranks
    missing = -len(inputs) % (rows * ranks)
    inputs = nn.functional.pad(inputs, (0, 0, 0, missing))
    labels = nn.functional.pad(labels, (0, 0, 0, missing), value=IGNORE_INDEX)
    nats = 0.0
    for start in range(0, len(inputs), rows * ranks):
        mine = slice(start + groups.data_rank * rows, start + (groups.data_rank + 1) * rows)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.bf16):
            mean = sequence_loss(model, inputs[mine].to(model.device), labels[mine].to(model.device))
        nats += float(mean) * int((labels[start : start + rows * ranks] != IGNORE_INDEX).sum())
    return nats / tokens.text_bytes
