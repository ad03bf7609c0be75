"""The model that benchmarks of gradients train: a Mamba-2 whose forward pass is its loss, for DDP to wrap."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ssm.checkpoints.hf import build
from megatron_ssm.configs.config import Config
from megatron_ssm.models.initialization import initialize
from megatron_ssm.training.options import Options
from sparsefusion.fabric.measurement import timed

VOCAB, SEQUENCES, TOKENS = 256, 2, 128  # of each rank's batch
STOLEN, TRIES = 0.03, 3  # what a hypervisor may take of the cores' time in a turn that counts; turns until it does


class Learner(torch.nn.Module):
    """A new model, the same on all ranks."""

    def __init__(self, layers, hidden):
        super().__init__()
        options = Options(
            num_layers=layers, hidden_size=hidden, mamba_head_dim=64, mamba_state_dim=16, seq_length=TOKENS
        )
        self.model = initialize(build(Config.from_dict(options.model_config(VOCAB, 0))), 1)

    def forward(self, ids):
        """ids (SEQUENCES, TOKENS + 1) -> the loss."""
        return self.model.loss(ids[:, :-1], ids[:, 1:])


def step(loss, optimizer) -> None:
    """One step on random tokens."""
    optimizer.zero_grad()
    loss(torch.randint(VOCAB, (SEQUENCES, TOKENS + 1))).backward()
    optimizer.step()


def warm_turn(step) -> float:
    """Seconds of step(), after one that does not count, in which the model comes back into the caches.

    Where a hypervisor gave the cores to others meanwhile, once more: of TRIES turns that which it disturbed least. Called
    by all ranks of the default group.
    """
    turns = []
    while not turns or (turns[-1][0] > STOLEN and len(turns) < TRIES):
        step()
        before = _stolen_s()
        seconds = timed(step)()
        share = torch.tensor((_stolen_s() - before) / (seconds * os.cpu_count()))
        dist.all_reduce(share, op=dist.ReduceOp.MAX)
        turns.append((share.item(), seconds))
    return min(turns, key=lambda turn: turn[0])[1]


def _stolen_s() -> float:
    """Seconds of all cores together in which this machine wanted to compute and its hypervisor did not let it."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
