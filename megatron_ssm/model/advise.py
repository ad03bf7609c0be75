"""Bytes that decoding one token reads and sends, as a `Shape` for `commfabric.fabric.advice`."""

from collections import Counter
from collections.abc import Iterator

from commfabric.fabric.advice import Shape
from megatron_ssm.spec.sizes import Workload
from megatron_ssm.spec.stack import Stack

from .memory import Memory, sizes_of

SUM_BYTES = 4  # bytes of an element in an exact all-reduce of 16-bit activations, which is computed in float32


def decoding_shape(name: str, config: Stack, ranks: int, itemsize: int = 2, length: int = 0) -> Shape:
    """The bytes that decoding one token of a sequence reads and sends.

    A step reads the weights (replicated ones count once for each rank), reads and writes the state of every sequence, and
    reads its keys and values. A sum over some of the ranks (of a Mamba-1 mixer with fewer heads than ranks) is counted like
    a sum over all ranks.

    Args:
        name: The name of the model.
        config: The model.
        ranks: The number of tensor-parallel ranks.
        itemsize: Bytes of an element of the weights; states have at least fp32.
        length: The number of tokens of a sequence.

    Raises:
        ValueError: The model cannot be split over this number of ranks.
    """
    memory = Memory(config, ranks, itemsize)
    moved = memory.moved_per_token(length)
    return Shape(name, ranks * memory.weights_read_per_token, ranks * moved, tuple(all_reduces(config, ranks)))


def all_reduces(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs (bytes per sequence, count) of the all-reduces of a decoded token; docs/families.md has a table of them."""
    yield from block_outputs(config, ranks)
    yield SUM_BYTES * config.hidden_size, 1  # the embedding
    yield from inner_sums(config, ranks)


def block_outputs(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs (bytes per token, count) of the all-reduces that `reduce=` may quantize.

    There is one for each unit, which contains exact columns too, and two for each invocation of a shared block.
    """
    work, hidden, widths = Workload(ranks), config.hidden_size, Counter[int]()
    for _, unit in config.units:
        columns = [part.spec.sizes(work).columns for part in unit.operators]
        normalized = sum(width > 0 for width in columns)
        outputs = normalized + (normalized < len(columns))  # the other outputs are added before they are sent
        widths[max(1, outputs) * hidden + sum(columns)] += 1
        for width in unit.side.part.spec.sizes(work).outputs if unit.side else ():
            widths[width] += 1
    for width, count in widths.items():
        yield SUM_BYTES * width, count


def inner_sums(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs (bytes per token, count) of the exact all-reduces in operators: x_proj, and norms whose groups span ranks."""
    for sizes, count in sizes_of(config, Workload(ranks)):
        for width in sizes.inner:
            yield SUM_BYTES * width, count
