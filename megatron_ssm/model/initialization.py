"""Initial values of parameters. They do not depend on the number of ranks."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_ssm.spec.fields import Field, field_of

# Megatron's initialization of matrices, for --init-method-std; see `Stack.draws`
MEGATRON = dict(
    linear="normal", embedding="normal", out_proj="scaled_normal", mixer_out_proj="scaled_normal", convolution="linear"
)  # fmt: skip
NO_REPLACEMENTS: Mapping[str, str] = {}

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@torch.no_grad()
def initialize(model: AnyModel, seed: int = 0) -> AnyModel:
    """Initialize every parameter of a model in place.

    Each field is drawn in full from its own generator, which depends on the seed and the name of the field, and this rank
    keeps its part. Sends nothing.

    Args:
        model: The model.
        seed: The seed, the same on all ranks.

    Returns:
        The model.
    """
    place: Any = model.place
    config: Any = model.config
    for parameter in model.parameters():
        field = field_of(parameter)
        values = draw(field, config.num_layers, field_generator(field, seed), config.draws, config.draws_std)
        parameter.copy_(values[field.piece(*place.part)])
    return model


def field_generator(field: Field, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {field.name}".encode()))  # uses 32 bits of a seed


def draw(
    field: Field, layers: int, generator: torch.Generator | None = None, draws: Mapping[str, str] = NO_REPLACEMENTS,
    std: float = 0.02,
) -> torch.Tensor:  # fmt: skip
    """The initial values of a whole field, in at least fp32. generator: None for torch's default one.

    draws: {an initialization in `Field.init`: the one that replaces it}; see `Stack.draws`. std: the standard deviation of
    "normal", and of "scaled_normal" before it is divided by the square root of the layers.
    """
    kind = draws.get(field.init, field.init)
    if kind == "normal":
        return _normal(field.shape, std, generator)
    if kind == "scaled_normal":
        return _normal(field.shape, std / math.sqrt(layers), generator)
    return _DRAWS[kind](field, layers, generator)


def _uniform(shape, low, high, generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator)


def _normal(shape, std, generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64).normal_(0, std, generator=generator)


def _linear(field, layers, generator) -> torch.Tensor:
    """Uniform in +-1/sqrt(inputs), as torch initializes linear layers; the inputs of a convolution are its taps."""
    bound = field.shape[-1] ** -0.5
    return _uniform(field.shape, -bound, bound, generator)


def _out_proj(field, layers, generator) -> torch.Tensor:
    """`_linear`, divided by the square root of the number of residual additions (GPT-2)."""
    return _linear(field, layers, generator) / math.sqrt(layers)


def _embedding(field, layers, generator) -> torch.Tensor:
    return _normal(field.shape, 0.02, generator)


def _a_log(field, layers, generator) -> torch.Tensor:
    """Mamba-1: A = -1, ..., -N for every channel (S4D-real). Mamba-2: one A per head, -A uniform in [1, 16]."""
    if len(field.shape) == 2:
        return _counted(field, layers, generator)
    return _uniform(field.shape, 1, 16, generator).log()


def _a_range(field, layers, generator) -> torch.Tensor:
    """One A per head, -A uniform in the range (low, high) = `Field.init_range`."""
    low, high = field.init_range
    return _uniform(field.shape, low, high, generator).log()


def _counted(field, layers, generator) -> torch.Tensor:
    """A = -1, -2, ... along the last dimension: over the heads, or over the states of each channel."""
    count = torch.arange(1, field.shape[-1] + 1, dtype=torch.float64)
    return count.log().expand(field.shape)


def _dt_bias(field, layers, generator) -> torch.Tensor:
    """The inverse softplus of a log-uniform step size. (low, high, floor) of the step size are `Field.init_range`."""
    low, high, floor = field.init_range
    uniform = torch.rand(field.shape, dtype=torch.float64, generator=generator)
    dt = torch.exp(uniform * math.log(high / low) + math.log(low)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


_DRAWS = {
    "linear": _linear,
    "convolution": _linear,
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
