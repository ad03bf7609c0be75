"""Bytes that decoding one token reads and sends, as `sparsefusion.fabric.advice` takes them. Loads no torch."""

from collections.abc import Iterator

from megatron_ssm.configs.config import Config
from sparsefusion.fabric.advice import Shape

from .memory import Memory

SUM_BYTES = 4  # of an element in an exact all-reduce of 16-bit activations, which is computed in float32


def decoding_shape(name: str, config: Config, ranks: int, itemsize: int = 2, length: int = 0) -> Shape:
    """What decoding one token costs on `ranks` tensor-parallel ranks, for sequences of `length` tokens.

    itemsize: bytes of an element of the weights; states are in at least fp32. A step reads the weights (those that every
    rank holds unsplit count once for each rank), reads and writes every sequence's state, and reads its keys and values. A
    sum over some of the ranks (Zamba's, with more ranks than heads) is assumed to cost as much as one over all. ValueError
    if the model cannot be split over so many ranks.
    """
    memory = Memory(config, ranks, itemsize)
    moved = 2 * memory.state_per_sequence + length * memory.keys_and_values_per_token
    return Shape(name, ranks * memory.weights_read_per_token, ranks * moved, tuple(all_reduces(config, ranks)))


def all_reduces(config: Config, ranks: int) -> Iterator[tuple[int, int]]:
    """(bytes for one sequence, count) of the all-reduces of a decoded token; docs/families.md has them as a table."""
    yield from block_outputs(config)
    yield SUM_BYTES * config.hidden_size, 1  # of the embedding
    yield from inner_sums(config, ranks)


def block_outputs(config: Config) -> Iterator[tuple[int, int]]:
    """Those of block outputs, which `reduce=` may round: of the mixers, and two of each use of the shared block."""
    norm = 1 if config.groups == 1 else 0  # the gated norm's sum of squares, in the same message
    yield SUM_BYTES * (config.hidden_size + norm), config.num_layers
    if config.hybrid_layers:
        yield SUM_BYTES * config.hidden_size, 2 * len(config.hybrid_layers)


def inner_sums(config: Config, ranks: int) -> Iterator[tuple[int, int]]:
    """Those inside the mixers: of x_proj, and of the norms of groups on several ranks."""
    if not config.groups and ranks > config.heads:
        yield SUM_BYTES * (config.dt_rank + 2 * config.state_size), config.num_layers
    if 1 < config.groups < ranks:
        yield SUM_BYTES * config.groups, config.num_layers
