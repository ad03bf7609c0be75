"""Bytes that one decoded token reads and sends on so many ranks, as `sparsefusion.fabric.advice` takes them. No torch."""

from megatron_ssm.configs.config import Config
from sparsefusion.fabric.advice import Shape

from .memory import Memory

SUM = 4  # bytes of a number in an exact all-reduce of 16-bit activations: float32


def decoding_shape(name: str, config: Config, ranks: int, itemsize: int = 2, length: int = 0) -> Shape:
    """A model of `itemsize` bytes per number on `ranks` ranks, its states in at least fp32, sequences of `length` tokens.

    A step reads the weights (`Memory.read`; what every rank has whole counts on each), reads and writes every sequence's
    state, and reads its keys and values. A sum of fewer than all ranks (Zamba's, with more ranks than heads) is taken to
    cost what one of all does. ValueError if the model cannot be split so.
    """
    memory = Memory(config, ranks, itemsize)
    moved = 2 * memory.state + length * memory.keys_and_values
    return Shape(name, ranks * memory.read, ranks * moved, tuple(all_reduces(config, ranks)))


def all_reduces(config: Config, ranks: int):
    """(bytes for one sequence, how many) of a decoded token's all-reduces: README's table of families."""
    hidden, layers, uses = config.hidden_size, config.num_layers, len(config.hybrid_layers)
    rides = 1 if config.groups == 1 else 0  # the norm's sum of squares
    yield SUM * (hidden + rides), layers
    yield SUM * hidden, 2 * uses + 1
    if not config.groups and ranks > config.heads:
        yield SUM * (config.dt_rank + 2 * config.state_size), layers
    if 1 < config.groups < ranks:
        yield SUM * config.groups, layers
