"""The model that benchmarks of gradients train: a Mamba-2 whose forward pass returns its loss, as DDP needs."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from commfabric.fabric.measurement import timed
from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.initialization import initialize
from megatron_ssm.train.options import Options

VOCAB, SEQUENCES, TOKENS = 256, 2, 128  # SEQUENCES and TOKENS: of each rank's batch
MAX_STEAL = 0.03  # the share of the cores' time that the hypervisor may take from an accepted turn
MAX_TURNS = 3


class Learner(torch.nn.Module):
    """A newly initialized model, the same on all ranks."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        options = Options(
            num_layers=layers, hidden_size=hidden, mamba_head_dim=64, mamba_state_dim=16, seq_length=TOKENS
        )
        self.model = initialize(build(families.from_dict(options.new_config(VOCAB, 0))), 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (SEQUENCES, TOKENS + 1) -> the loss, a scalar."""
        return self.model.loss(ids[:, :-1], ids[:, 1:])


def step(loss: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Perform one training step on random tokens."""
    optimizer.zero_grad()
    loss(torch.randint(VOCAB, (SEQUENCES, TOKENS + 1))).backward()
    optimizer.step()


def warm_turn(step: Callable[[], object]) -> float:
    """Seconds of step() on this rank, after an unmeasured call that loads the model into the caches.

    The turn is repeated, up to MAX_TURNS, if the hypervisor took more than MAX_STEAL of the cores' time on any rank; the
    result is of the turn with the smallest share. All ranks of the default group call this together.
    """
    turns: list[tuple[float, float]] = []
    while not turns or (turns[-1][0] > MAX_STEAL and len(turns) < MAX_TURNS):
        step()
        before = _steal_seconds()
        seconds = timed(step)()
        share = torch.tensor((_steal_seconds() - before) / (seconds * (os.cpu_count() or 1)))
        dist.all_reduce(share, op=dist.ReduceOp.MAX)
        turns.append((share.item(), seconds))
    return min(turns, key=lambda turn: turn[0])[1]


def _steal_seconds() -> float:
    """The steal time of all cores since the machine started: it wanted to compute, and the hypervisor ran others."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
