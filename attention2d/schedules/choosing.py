"""Which schedule is cheapest, for a shape on a number of ranks: by the bytes they send, or by a measured fabric."""

from dataclasses import dataclass

from attention2d.cost.memory import memory as memory_of
from attention2d.cost.volume import messages
from attention2d.layout import token_order as orders
from attention2d.layout.checks import check_heads
from attention2d.layout.grid import Grid, size_of
from sparsefusion.fabric.cost_model import Fabric

from .family import Attention2D

NEXT_TO_NOTHING = 1.02  # times the fewest bytes: then fewer steps are better
SHOWN = 4  # of the others, in the reason


@dataclass(frozen=True)
class Candidate:
    """A point of the family, what its busiest rank sends, in how many steps, and by a fabric in what time; what it holds."""

    ulysses: int
    rows: int
    cols: int
    overlap: bool
    nbytes: int
    steps: int
    seconds: float | None
    held: int

    @property
    def cost(self) -> float:
        """Seconds if there are any, else bytes."""
        return self.nbytes if self.seconds is None else self.seconds

    def __str__(self):
        time = "" if self.seconds is None else f", {self.seconds * 1e3:.3g} ms"
        point = f"ulysses={self.ulysses}, {self.rows} x {self.cols}{', overlapped' * self.overlap}"
        return f"{point}: {self.nbytes / 1e6:.4g} MB in {self.steps} steps{time}, {self.held / 1e6:.4g} MB held"


def choose(
    group=None, *, heads: int, kv_heads: int, head_dim: int, seq: int, training=True, fabric: Fabric | None = None,
    batch: int = 1, itemsize: int = 2, memory: int | None = None, on_cuda=False,
) -> Attention2D:  # fmt: skip
    """The cheapest of all grids, for such tensors; its `.reason` says why.

    heads, kv_heads: of one rank, before any are shared. training: counts backward too. fabric: measured (its p2p, or else
    its all_gather curve); None counts bytes. memory: bytes that a rank may hold beside its q, k, v and the gradient of out
    (`Attention2D.memory`, also on_cuda); None: any number. Ranks that ask alike get the same schedule; nothing is sent. Of a
    ring and an all-gather, which send the same, it takes the ring, which holds two chunks of keys instead of all; other
    grids are overlapped, which takes more and smaller calls, only where they would not fit. ValueError: head counts that
    do not divide; no schedule holds so little.
    """
    ranks = size_of(group)
    best, *others = candidates(
        ranks, heads, kv_heads, head_dim, seq, training, fabric, batch, itemsize, memory, on_cuda
    )
    schedule = Attention2D(group, best.rows, best.cols, best.ulysses, overlap=best.overlap)
    schedule.reason = _reason(best, others, training, fabric, schedule)
    return schedule


def candidates(
    ranks,
    heads,
    kv_heads,
    head_dim,
    seq,
    training=True,
    fabric=None,
    batch=1,
    itemsize=2,
    memory=None,
    on_cuda=False,
) -> list[Candidate]:
    """All grids of so many ranks on which the heads divide, the cheapest first; arguments and errors as `choose`'s."""
    check_heads(heads, kv_heads)
    slots, found = orders.local_length("zigzag", seq, ranks), []
    for ulysses in _divisors(ranks):
        if heads % ulysses or kv_heads % ulysses:
            continue
        for rows in _divisors(ranks // ulysses):
            grid = Grid(0, ulysses, rows, ranks // ulysses // rows)
            sent = messages(grid, slots, batch, heads, kv_heads, head_dim, itemsize)
            sent = [*sent.forward, *(sent.backward if training else ())]
            seconds = None if fabric is None else sum(_seconds(fabric, ranks, *message) for message in sent)
            total, steps = sum(count * nbytes for count, nbytes in sent), sum(count for count, _ in sent)
            for overlap in (False, True) if grid.cells > 1 else (False,):
                taken = memory_of(grid, overlap, slots, batch, heads, kv_heads, head_dim, itemsize, on_cuda=on_cuda)
                held = max(taken.forward, taken.backward) if training else taken.forward
                found.append(Candidate(ulysses, rows, grid.cols, overlap, total, steps, seconds, held))
    least = min(each.held for each in found)
    if memory is not None and memory < least:
        raise ValueError(f"memory={memory}: no schedule on {ranks} ranks holds less than {least} bytes")
    return _best_first([each for each in found if memory is None or each.held <= memory])


def _best_first(found) -> list[Candidate]:
    """The cheapest first; of those that send next to nothing more than the least, the one with the fewest steps.

    Of twins, that send the same in as many steps, rings come before all-gathers, and other grids before overlapped ones.
    """
    found = sorted(found, key=lambda each: (each.cost, each.steps, each.cols, each.overlap != (each.cols == 1)))
    near = [each for each in found if each.seconds is None and each.nbytes <= NEXT_TO_NOTHING * found[0].nbytes]
    best = min(near or found[:1], key=lambda each: each.steps)
    return [best, *(each for each in found if each is not best)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _seconds(fabric, ranks, count, nbytes) -> float:
    """Of `count` steps in which every rank sends a message: one each of p2p's, or the steps of an all-gather."""
    if not count:
        return 0.0
    if "p2p" in {curve.operation for curve in fabric.curves}:
        return count * fabric.time("p2p", nbytes, ranks, extrapolate=True)
    return fabric.time("all_gather", nbytes, count + 1, extrapolate=True)


def _reason(best, others, training, fabric, schedule) -> str:
    """Sentences."""
    what = "forward and backward" if training else "forward"
    by = "by the bytes that a rank sends" if fabric is None else "by the fabric"
    lines = [f"{schedule}: cheapest {by}, {what}.", str(best)]
    plain = [other for other in others if other.overlap == (other.cols == 1 < other.rows)]
    return "\n".join([*lines, *(f"beside {other}" for other in plain[:SHOWN])])
