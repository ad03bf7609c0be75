"""Bytes that decoding one token reads and sends, as `sparsefusion.fabric.advice` takes them."""

from collections import Counter
from collections.abc import Iterator

from megatron_ssm.stack.sizes import Workload
from megatron_ssm.stack.stack import Stack
from sparsefusion.fabric.advice import Shape

from .memory import Memory, sizes_of

SUM_BYTES = 4  # of an element in an exact all-reduce of 16-bit activations, which is computed in float32


def decoding_shape(name: str, config: Stack, ranks: int, itemsize: int = 2, length: int = 0) -> Shape:
    """What decoding one token costs on `ranks` tensor-parallel ranks, for sequences of `length` tokens.

    itemsize: bytes of an element of the weights; states are in at least fp32. A step reads the weights (those that every
    rank holds unsplit count once for each rank), reads and writes every sequence's state, and reads its keys and values. A
    sum over some of the ranks (a Mamba-1 mixer with fewer heads than ranks) is assumed to cost as much as one over all.
    ValueError if the model cannot be split over so many ranks.
    """
    memory = Memory(config, ranks, itemsize)
    moved = memory.moved_per_token(length)
    return Shape(name, ranks * memory.weights_read_per_token, ranks * moved, tuple(all_reduces(config, ranks)))


def all_reduces(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """(bytes for one sequence, count) of the all-reduces of a decoded token; docs/families.md has them as a table."""
    yield from block_outputs(config, ranks)
    yield SUM_BYTES * config.hidden_size, 1  # of the embedding
    yield from inner_sums(config, ranks)


def block_outputs(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """Those that `reduce=` may quantize: one for each unit, with exact columns in the same message, and two for each use of
    a shared block.
    """
    work, hidden, widths = Workload(ranks), config.hidden_size, Counter[int]()
    for _, unit in config.units:
        sizes = [part.spec.sizes(work) for part in unit.operators]
        followed = sum(each.columns > 0 for each in sizes)
        outs = followed + (followed < len(sizes))  # summands that nothing follows are added before they are sent
        widths[max(1, outs) * hidden + sum(each.columns for each in sizes)] += 1
        for width in unit.side.part.spec.sizes(work).outputs if unit.side else ():
            widths[width] += 1
    for width, count in widths.items():
        yield SUM_BYTES * width, count


def inner_sums(config: Stack, ranks: int) -> Iterator[tuple[int, int]]:
    """Those inside operators, which are exact: of x_proj, and of the norms of groups on several ranks."""
    for sizes, count in sizes_of(config, Workload(ranks)):
        for width in sizes.inner:
            yield SUM_BYTES * width, count
