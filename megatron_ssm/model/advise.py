"""The all-reduces of a decoded token: their bytes and their number."""

from collections import Counter
from collections.abc import Iterator

from megatron_ssm.spec.sizes import Workload
from megatron_ssm.spec.stack import Stack

from .memory import sizes_of

SUM_BYTES = 4  # bytes of an element in an exact all-reduce of 16-bit activations, which is computed in float32


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
