"""Pretraining: tensor x data parallel, with torch's own DDP, and AdamW.

Every choice is a function of the options and the step, never of the number of ranks: the same global batch, the same
loss, the same gradient norm on 1 rank or 8. Ranks of one replica see the same tokens; replicas see different ones.
"""

import contextlib
import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_ssm.models.model import Model
from megatron_ssm.ops import fused_adam
from megatron_ssm.parallel.groups import Groups
from sparsefusion import SparseFusion
from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.foundation.command_line import Failure

from .data import IGNORE_INDEX, Batches, windows
from .options import Options


def learning_rate(options: Options, step: int) -> float:
    """Of the step-th step, from 0: linear warm-up, then cosine, linear or no decay to min_lr."""
    warmup = options.lr_warmup_iters
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.lr_decay_style == "constant":
        return options.lr
    done = min(1.0, (step - warmup) / max(1, options.decay_steps - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if options.lr_decay_style == "cosine" else 1 - done
    return options.min_lr + (options.lr - options.min_lr) * left


def adamw(model: Model, options: Options) -> torch.optim.Optimizer:
    """AdamW by `fused_adam`; matrices decay, A_log, D, dt biases, norms and other biases do not."""
    decays = [p for p in model.parameters() if p.field.has_weight_decay]
    others = [p for p in model.parameters() if not p.field.has_weight_decay]
    groups = [{"params": decays, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (options.adam_beta1, options.adam_beta2)
    return fused_adam.adamw(groups, lr=options.lr, betas=betas, eps=options.adam_eps)


@torch.no_grad()
def grad_norm(model: Model) -> torch.Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank: each element counts once, whoever holds it.

    A parameter held by c tensor-parallel ranks contributes its squares / c from each. Sends one number.
    """
    ranks = model.ranks
    total = torch.zeros((), dtype=at_least_fp32(model.dtype), device=model.device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += parameter.grad.to(total.dtype).square().sum() / parameter.field.copies(ranks.size)
    return ranks.exact(total, ranks.group).sqrt()


@torch.no_grad()
def clip_gradients(model: Model, norm: torch.Tensor, largest: float) -> None:
    """Scale every gradient by largest / (norm + 1e-6), as torch and Megatron do, where norm > largest (0: no limit)."""
    if largest and norm > largest:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((largest / (norm + 1e-6)).to(parameter.grad.dtype))


class _Loss(nn.Module):
    """The model's loss as a forward pass, for DDP to wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, labels):
        """See `Model.loss`."""
        return self.model.loss(inputs, labels)


@dataclass
class Step:
    """What one step did; `loss` and `grad_norm` (before clipping) are those of the whole global batch."""

    loss: float
    grad_norm: float
    lr: float


class Trainer:
    """A model being trained: one replica's ranks hold its parts, `groups.data` its other replicas.

    fusion: what averages gradients sparsely, or None; it tells `say` what it does, on rank 0. unsent: {name: gradient},
    flat, what an earlier run's sparse means still lacked; is added to the next step's gradients.
    """

    def __init__(self, model: Model, groups: Groups, options: Options, say=print):
        self.model, self.groups, self.options = model, groups, options
        self.accumulation = options.accumulation(groups.data_ranks)
        self.optimizer = adamw(model, options)
        self.loss = _Loss(model)
        if groups.data is not None:
            self.loss = DistributedDataParallel(self.loss, process_group=groups.data, gradient_as_bucket_view=True)
        self.fusion, self.unsent = None, {}
        if groups.data is not None and options.gradient_mode != "dense":
            self.fusion = SparseFusion(
                options.gradient_density, options.gradient_sparsifier, options.gradient_mode,
                density_warmup=options.gradient_density_warmup, model_group=groups.tensor,
                copied=lambda parameter: parameter.field.copies(groups.tensor_ranks) > 1,
                report=lambda text: say(text) if groups.rank == 0 else None,
            ).attach(self.loss)  # fmt: skip

    def step(self, batches: Batches, step: int) -> Step:
        """One optimizer step on the step-th global batch. Failure, on every rank, if loss or gradient is not finite."""
        inputs, labels = batches.batch(step, self.groups.data_rank, self.groups.data_ranks)
        total = 0.0
        for index in range(self.accumulation):
            rows = slice(index * self.options.micro_batch_size, (index + 1) * self.options.micro_batch_size)
            try:
                total += self._backward(inputs[rows], labels[rows], last=index == self.accumulation - 1)
            except FloatingPointError as error:  # of a sparse mean, on every rank
                what = str(error).partition(": ")[2].partition(". ")[0]
                raise Failure(f"step {step + 1}: {what}, so training stops") from None
        self._add_unsent()
        norm = grad_norm(self.model)
        loss, rate = float(total), learning_rate(self.options, step)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Failure(f"step {step + 1}: loss {loss}, gradient norm {float(norm)}: not finite, so training stops")
        clip_gradients(self.model, norm, self.options.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        fused_adam.zero_gradients(self.optimizer)
        return Step(loss, float(norm), rate)

    def named_parameters(self):
        """(name, parameter), by the names that `fusion` knows."""
        return (self.loss if self.groups.data is None else self.loss.module).named_parameters()

    def _add_unsent(self):
        for name, parameter in self.named_parameters() if self.unsent else ():
            if name in self.unsent and parameter.grad is not None:
                parameter.grad += self.unsent.pop(name).view_as(parameter).to(parameter.grad)

    def _backward(self, inputs, labels, last):
        """Add one micro-batch's gradient; replicas exchange theirs with the last one. Returns its share of the loss."""
        model, device = self.model, self.model.device
        wait = contextlib.nullcontext() if last or self.groups.data is None else self.loss.no_sync()
        with wait:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.options.bf16):
                loss = self.loss(inputs.to(device), labels.to(device)) / self.accumulation
            # The loss is a mean over all replicas' tokens, so their gradients add up; DDP averages them.
            (loss * self.groups.data_ranks).backward()
        return loss.detach().to(at_least_fp32(model.dtype))


@torch.no_grad()
def evaluate(model: Model, tokens, groups: Groups, options: Options) -> float:
    """Nats per byte of held-out text (`data.Tokens`), in windows of seq_length that each start afresh."""
    inputs, labels = windows(tokens, options.seq_length)
    rows, ranks = options.micro_batch_size, groups.data_ranks
    missing = -len(inputs) % (rows * ranks)
    inputs = nn.functional.pad(inputs, (0, 0, 0, missing))
    labels = nn.functional.pad(labels, (0, 0, 0, missing), value=IGNORE_INDEX)
    nats = 0.0
    for start in range(0, len(inputs), rows * ranks):
        mine = slice(start + groups.data_rank * rows, start + (groups.data_rank + 1) * rows)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.bf16):
            mean = model.loss(inputs[mine].to(model.device), labels[mine].to(model.device))
        nats += float(mean) * int((labels[start : start + rows * ranks] != IGNORE_INDEX).sum())
    return nats / tokens.text_bytes


class Clock:
    """Tokens per second since it was last read, and the time that is left."""

    def __init__(self, steps: int, tokens_per_step: int):
        self.left, self.tokens_per_step = steps, tokens_per_step
        self.start, self.steps = time.perf_counter(), 0

    def tick(self) -> None:
        """One more step is done."""
        self.steps += 1
        self.left -= 1

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds left); starts a new measurement."""
        elapsed = max(time.perf_counter() - self.start, 1e-9)
        rate = self.steps * self.tokens_per_step / elapsed
        left = self.left * elapsed / max(1, self.steps)
        self.start, self.steps = time.perf_counter(), 0
        return rate, left
