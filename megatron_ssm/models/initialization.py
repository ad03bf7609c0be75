"""Initial values of parameters, which do not depend on the number of ranks."""

import math
import zlib
from typing import TYPE_CHECKING

import torch

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import Field, field_of

if TYPE_CHECKING:
    from .model import Model


@torch.no_grad()
def initialize(model: "Model", seed: int = 0) -> "Model":
    """Draw every parameter as state-spaces' Mamba does, in place; returns the model.

    Each field is drawn in full from a generator of its own (`seed` and the field's name), and this rank keeps its part. All
    ranks must use the same seed. Sends nothing.
    """
    for parameter in model.parameters():
        field = field_of(parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {field.name}".encode()))  # uses 32 bits of a seed
        full = draw(model.config, field, generator)
        parameter.copy_(full[field.piece(model.ranks.rank, model.ranks.size)])
    return model


def draw(config: Config, field: Field, generator: torch.Generator | None = None) -> torch.Tensor:
    """The initial values of a whole field, at least fp32. generator: None is torch's own."""
    return _DRAWS[field.init](config, field.shape, generator)


def _uniform(shape, bound, generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)


def _linear(config, shape, generator) -> torch.Tensor:
    """torch's default: uniform in +-1/sqrt(inputs); the inputs of a convolution are its taps."""
    return _uniform(shape, shape[-1] ** -0.5, generator)


def _out_proj(config, shape, generator) -> torch.Tensor:
    """Scaled down by the square root of the number of residual additions (GPT-2)."""
    return _linear(config, shape, generator) / math.sqrt(config.num_layers)


def _embedding(config, shape, generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64).normal_(0, 0.02, generator=generator)


def _a_log(config, shape, generator) -> torch.Tensor:
    """Mamba-1: A = -1 .. -N for every channel (S4D-real); Mamba-2: one A per head, uniform in [1, 16]."""
    if len(shape) == 2:
        return torch.arange(1, shape[1] + 1, dtype=torch.float64).log().expand(shape)
    return torch.empty(shape, dtype=torch.float64).uniform_(1, 16, generator=generator).log()


def _dt_bias(config, shape, generator) -> torch.Tensor:
    """The inverse softplus of a step size that is drawn log-uniformly from the configuration's range."""
    low, high, floor = config.dt_init
    drawn = torch.rand(shape, dtype=torch.float64, generator=generator)
    dt = torch.exp(drawn * math.log(high / low) + math.log(low)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


_DRAWS = {
    "linear": _linear,
    "out_proj": _out_proj,
    "dt_proj": _linear,  # dt_rank^-1/2
    "embedding": _embedding,
    "A_log": _a_log,
    "dt_bias": _dt_bias,
    "one": lambda config, shape, generator: torch.ones(shape),
    "bias": lambda config, shape, generator: torch.zeros(shape),
}
