"""The cheapest schedule for the shape of an attention on a number of ranks, by bytes sent or by a measured fabric."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from attention2d.cost.memory import peak_memory
from attention2d.cost.volume import messages
from attention2d.layout import token_order as orders
from attention2d.layout.attention_arguments import check_heads, check_sizes
from attention2d.layout.grid import Grid, group_size
from commfabric.fabric.cost_model import Fabric

from .family import Attention2D

BYTES_TIE_RATIO = 1.02  # grids whose bytes are within this factor of the fewest are compared by their number of steps
MAX_SHOWN = 4  # alternatives in `Attention2D.reason`


@dataclass(frozen=True)
class Candidate:
    """A grid and its cost on the busiest rank.

    Attributes:
        bytes_sent: The bytes that the busiest rank sends.
        steps: The number of sequential messages in which it sends them.
        seconds: the time of these messages on the fabric (None: no fabric is given).
        peak_bytes: memory besides q, k, v and the gradient of out.
    """

    ulysses: int
    rows: int
    cols: int
    overlap: bool
    bytes_sent: int
    steps: int
    seconds: float | None
    peak_bytes: int

    @property
    def cost(self) -> float:
        return self.bytes_sent if self.seconds is None else self.seconds

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {self.seconds * 1e3:.3g} ms"
        grid = f"ulysses={self.ulysses}, {self.rows} x {self.cols}{', overlapped' * self.overlap}"
        return (
            f"{grid}: {self.bytes_sent / 1e6:.4g} MB in {self.steps} steps{time}, {self.peak_bytes / 1e6:.4g} MB held"
        )


def choose(
    group: ProcessGroup | None = None, *, heads: int, kv_heads: int, head_dim: int, seq: int, training: bool = True,
    fabric: Fabric | None = None, batch: int = 1, itemsize: int = 2, memory: int | None = None, on_cuda: bool = False,
) -> Attention2D:  # fmt: skip
    """The cheapest schedule of all grids for tensors of this shape; its `.reason` says why. Sends nothing.

    Ring and all-gather send the same bytes; the ring is chosen, because it holds two chunks of keys instead of all. Other
    grids are overlapped only if they would not fit into memory otherwise: overlapping splits the work into more, smaller
    kernel calls. Ranks that call it with the same arguments get the same schedule.

    With k key/value heads per query head, a ring sends less than Ulysses on fewer than about 1 + 1/k ranks, and a grid sends
    less than a ring from about 4/k ranks on.

    Args:
        group: the ranks (None: one rank).
        heads, kv_heads, head_dim: The number of heads of q, the number of heads of k and v, and the size of a head, in the
            tensors that are passed to the schedule.
        seq: the length of the whole sequence.
        training: count backward too.
        fabric: Measured times; the p2p curve is used, or the all_gather curve if there is none. None: schedules are compared
            by bytes.
        batch: the number of sequences.
        itemsize: bytes of an element of q, k and v.
        memory: the bytes that a rank may need besides q, k, v and the gradient of out (None: no limit), as
            `Attention2D.memory` counts them.
        on_cuda: passed to `Attention2D.memory`.

    Raises:
        ValueError: a size is below 1, kv_heads does not divide heads, or no schedule fits into memory.
    """
    best, *others = candidates(
        group_size(group), heads, kv_heads, head_dim, seq, training, fabric, batch, itemsize, memory, on_cuda
    )
    schedule = Attention2D(group, best.rows, best.cols, best.ulysses, overlap=best.overlap)
    schedule.reason = _reason(best, others, training, fabric, schedule)
    return schedule


def candidates(
    ranks: int, heads: int, kv_heads: int, head_dim: int, seq: int, training: bool = True, fabric: Fabric | None = None,
    batch: int = 1, itemsize: int = 2, memory: int | None = None, on_cuda: bool = False,
) -> list[Candidate]:  # fmt: skip
    """All grids of `ranks` ranks over which the heads divide, with their costs, the cheapest first. No rank needs to run.

    Arguments and errors as in `choose`.
    """
    check_sizes(seq=seq, head_dim=head_dim, batch=batch, itemsize=itemsize)
    check_heads(heads, kv_heads)
    slots = orders.local_length("zigzag", seq, ranks)
    grids: list[Candidate] = []
    shape = (slots, batch, heads, kv_heads, head_dim, itemsize)
    for grid in _grids(ranks, heads, kv_heads):
        passes = messages(grid, *shape)
        sent = [*passes.forward, *(passes.backward if training else ())]
        seconds = None if fabric is None else sum(_seconds(fabric, ranks, *message) for message in sent)
        total, steps = sum(count * nbytes for count, nbytes in sent), sum(count for count, _ in sent)
        for overlap in (False, True) if grid.cells > 1 else (False,):
            peak = peak_memory(grid, overlap, *shape, on_cuda=on_cuda)
            peak_bytes = max(peak.forward, peak.backward) if training else peak.forward
            grids.append(Candidate(grid.ulysses, grid.rows, grid.cols, overlap, total, steps, seconds, peak_bytes))
    min_peak_bytes = min(each.peak_bytes for each in grids)
    if memory is not None and memory < min_peak_bytes:
        raise ValueError(f"memory={memory}: no schedule on {ranks} ranks holds less than {min_peak_bytes} bytes")
    return _cheapest_first([each for each in grids if memory is None or each.peak_bytes <= memory])


def _grids(ranks: int, heads: int, kv_heads: int) -> Iterator[Grid]:
    """All grids of `ranks` ranks over which the heads divide, as rank 0 sees them."""
    for ulysses in _divisors(ranks):
        if heads % ulysses == 0 and kv_heads % ulysses == 0:
            for rows in _divisors(ranks // ulysses):
                yield Grid(0, ulysses, rows, ranks // ulysses // rows)


def _cheapest_first(grids: list[Candidate]) -> list[Candidate]:
    """Sort candidates by cost. Without a fabric, the first is the one with the fewest steps among the candidates within
    BYTES_TIE_RATIO of the fewest bytes.

    Ties: a ring before an all-gather; for other grids, gathered before overlapped.
    """
    grids = sorted(grids, key=lambda each: (each.cost, each.steps, each.cols, each.overlap != (each.cols == 1)))
    limit = BYTES_TIE_RATIO * grids[0].bytes_sent
    nearly_fewest_bytes = [each for each in grids if each.seconds is None and each.bytes_sent <= limit]
    best = min(nearly_fewest_bytes or grids[:1], key=lambda each: each.steps)
    return [best, *(each for each in grids if each is not best)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _seconds(fabric: Fabric, ranks: int, count: int, nbytes: int) -> float:
    """The time of `count` steps, in each of which every rank sends a message of `nbytes`.

    With a p2p curve: `count` times the time of one message. Otherwise: the time of an all-gather among count + 1 ranks.
    """
    if not count:
        return 0.0
    if "p2p" in {curve.operation for curve in fabric.curves}:
        return count * fabric.time("p2p", nbytes, ranks, extrapolate=True)
    return fabric.time("all_gather", nbytes, count + 1, extrapolate=True)


def _reason(
    best: Candidate, others: list[Candidate], training: bool, fabric: Fabric | None, schedule: Attention2D
) -> str:
    """The words that say why a schedule was chosen: two lines for it and one for each of the cheapest alternatives."""
    passes = "forward and backward" if training else "forward"
    measure = "by the bytes that a rank sends" if fabric is None else "by the fabric"
    lines = [f"{schedule}: cheapest {measure}, {passes}.", str(best)]
    shown = [other for other in others if other.overlap == (other.cols == 1 < other.rows)]
    return "\n".join([*lines, *(f"compared with {other}" for other in shown[:MAX_SHOWN])])
