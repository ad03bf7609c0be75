"""Initial values of parameters, which do not depend on the number of ranks."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_ssm.stack.fields import Field, field_of

NO_CHANGES: Mapping[str, str] = {}

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@torch.no_grad()
def initialize(model: AnyModel, seed: int = 0) -> AnyModel:
    """Draw every parameter as the model's `Stack.draws` says, in place; returns the model.

    Each field is drawn in full from a generator of its own (`seed` and the field's name), and this rank keeps its part. All
    ranks must use the same seed. Sends nothing.
    """
    place: Any = model.place
    config: Any = model.config
    for parameter in model.parameters():
        field = field_of(parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {field.name}".encode()))  # uses 32 bits of a seed
        drawn = draw(field, config.num_layers, generator, config.draws, config.draws_std)
        parameter.copy_(drawn[field.piece(*place.part)])
    return model


def draw(
    field: Field, layers: int, generator: torch.Generator | None = None, draws: Mapping[str, str] = NO_CHANGES,
    std: float = 0.02,
) -> torch.Tensor:  # fmt: skip
    """The initial values of a whole field, at least fp32. layers: of the model. generator: None is torch's own.

    draws: {a kind in `Field.init`: the kind that takes its place}. std: the deviation of normal ones.
    """
    kind = draws.get(field.init, field.init)
    if kind == "normal":
        return torch.empty(field.shape, dtype=torch.float64).normal_(0, std, generator=generator)
    return _DRAWS[kind](field, layers, generator)


def _uniform(shape, bound, generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)


def _linear(field, layers, generator) -> torch.Tensor:
    """torch's default: uniform in +-1/sqrt(inputs); the inputs of a convolution are its taps."""
    return _uniform(field.shape, field.shape[-1] ** -0.5, generator)


def _out_proj(field, layers, generator) -> torch.Tensor:
    """Scaled down by the square root of the number of residual additions (GPT-2)."""
    return _linear(field, layers, generator) / math.sqrt(layers)


def _embedding(field, layers, generator) -> torch.Tensor:
    return torch.empty(field.shape, dtype=torch.float64).normal_(0, 0.02, generator=generator)


def _a_log(field, layers, generator) -> torch.Tensor:
    """Mamba-1: A = -1 .. -N for every channel (S4D-real); Mamba-2: one A per head, uniform in [1, 16]."""
    shape = field.shape
    if len(shape) == 2:
        return torch.arange(1, shape[1] + 1, dtype=torch.float64).log().expand(shape)
    return torch.empty(shape, dtype=torch.float64).uniform_(1, 16, generator=generator).log()


def _a_range(field, layers, generator) -> torch.Tensor:
    """One A per head, uniform in a range (`Field.init_range`)."""
    low, high = field.init_range
    return torch.empty(field.shape, dtype=torch.float64).uniform_(low, high, generator=generator).log()


def _counted(field, layers, generator) -> torch.Tensor:
    """A = -1, -2, ..., of each head, or of each state of a channel."""
    count = torch.arange(1, field.shape[-1] + 1, dtype=torch.float64)
    return count.log().expand(field.shape)


def _dt_bias(field, layers, generator) -> torch.Tensor:
    """The inverse softplus of a step size that is drawn log-uniformly from a range, with a floor (`Field.init_range`)."""
    low, high, floor = field.init_range
    drawn = torch.rand(field.shape, dtype=torch.float64, generator=generator)
    dt = torch.exp(drawn * math.log(high / low) + math.log(low)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


_DRAWS = {
    "linear": _linear,
    "out_proj": _out_proj,
    "mixer_out_proj": _out_proj,
    "embedding": _embedding,
    "A_log": _a_log,
    "A_range": _a_range,
    "counted": _counted,
    "dt_bias": _dt_bias,
    "one": lambda field, layers, generator: torch.ones(field.shape),
    "bias": lambda field, layers, generator: torch.zeros(field.shape),
    "zero": lambda field, layers, generator: torch.zeros(field.shape),
}
