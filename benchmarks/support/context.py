"""Models whose sequences context ranks share, and what their training steps send."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.initialization import initialize
from megatron_ssm.model.model import Model
from megatron_ssm.train.options import Options

VOCABULARY = 256


def random_model(
    schedule: Attention2D | None, group: ProcessGroup | None = None, more: dict | None = None, **options: Any
) -> Model:
    """A byte-level model with random weights, split over the tensor-parallel `group`.

    more: further arguments of `load`. options: those of `train.options.Options`, such as hidden_size; or the fields of a
    config.json, of a family that options do not make.
    """
    is_made = families.FAMILIES[options.get("model_type", "mamba2")].from_options is not None
    config = families.from_dict(Options(**options).new_config(VOCABULARY, 0) if is_made else options)
    return initialize(build(config, group, None, context=schedule, **(more or {})), seed=0)


def training_step(model: Model, tokens: int) -> None:
    """Forward and backward of one sequence of `tokens` tokens, of which this rank has its part. Gradients are not summed."""
    schedule = model.schedule
    ids = torch.randint(VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if schedule is not None:
        inputs, labels = schedule.shard(inputs), schedule.shard(labels)
    model.loss(inputs, labels, seq=None if schedule is None else tokens).backward()


def bytes_on_wire() -> int:
    """The bytes that this network namespace has sent over eth0, counted by the kernel."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))
