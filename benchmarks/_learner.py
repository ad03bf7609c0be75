"""The model that benchmarks of gradients train: a Mamba-2 whose forward pass is its loss, for DDP to wrap."""

import torch

from megatron_ssm.checkpoint import build
from megatron_ssm.config import Config
from megatron_ssm.initialization import initialize
from megatron_ssm.options import Options
from sparsefusion.sweep import timed

VOCAB, SEQUENCES, TOKENS = 256, 2, 128  # of each rank's batch


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
    """Seconds of step(), after one that does not count, in which the model comes back into the caches."""
    step()
    return timed(step)()
