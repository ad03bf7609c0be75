"""Token orders as data: which rank holds which tokens of a sequence, and which of them see which (attention2d.md A.1, A.3).

zigzag: of 2P equal blocks rank p holds p and 2P-1-p (Megatron's own). cyclic: tokens p, p+P, p+2P, ... contiguous: one
block. A causal query sees itself and what is before it; zigzag gives every pair of ranks the same work, cyclic nearly so.
Where a sequence does not divide, every rank holds equally many slots, and padding stands behind the last token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

ORDERS = ("zigzag", "contiguous", "cyclic")


@dataclass(frozen=True)
class Segment:
    """`length` slots for the tokens start, start + stride, ..., of which the first `valid` exist: the rest is padding."""

    start: int
    length: int
    valid: int
    stride: int = 1


def blocks(order: str, ranks: int) -> int:
    """Equally long ones of which each rank's slots consist."""
    return 2 if order == "zigzag" and ranks > 1 else 1


def local_length(order: str, seq: int, ranks: int) -> int:
    """Slots of each rank for a sequence of `seq` tokens."""
    count = blocks(order, ranks)
    return -(-seq // (count * ranks)) * count


def segments(order: str, rank: int, ranks: int, local: int, seq: int) -> tuple[Segment, ...]:
    """What rank `rank` of `ranks` holds in its `local` slots, in their order, which is that of positions."""
    length, stride = local, 1
    if blocks(order, ranks) == 2:
        length = local // 2
        starts = [rank * length, (2 * ranks - 1 - rank) * length]
    elif order != "cyclic":
        starts = [rank * local]
    else:
        starts, stride = [rank], ranks
    return tuple(Segment(at, length, min(length, max(0, -(-(seq - at) // stride))), stride) for at in starts)


def positions(held: Sequence[Segment]) -> torch.Tensor:
    """(slots,) int64: the position of each slot's token; of padding too, which is at `seq` or behind it."""
    return torch.cat([torch.arange(s.start, s.start + s.length * s.stride, s.stride) for s in held])


def shard(x: torch.Tensor, dim: int, order: str, rank: int, ranks: int) -> torch.Tensor:
    """One rank's slots of `x`, whole along `dim`, zeros where it has no token."""
    dim %= x.dim()
    seq = x.shape[dim]
    local = local_length(order, seq, ranks)
    padded = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, ranks * local - seq])
    held = positions(segments(order, rank, ranks, local, seq))
    return padded.index_select(dim, held.to(x.device))


def unshard(parts: Sequence[torch.Tensor], dim: int, order: str, seq: int) -> torch.Tensor:
    """The first `seq` tokens of what the ranks' equally long `parts` hold, in order of their positions."""
    ranks, local = len(parts), parts[0].shape[dim]
    held = torch.cat([positions(segments(order, rank, ranks, local, seq)) for rank in range(ranks)])
    return torch.cat(list(parts), dim).index_select(dim, held.argsort()[:seq].to(parts[0].device))


@dataclass(frozen=True)
class Call:
    """One product of attention: slots of queries against slots of keys; causal: as many, each seeing up to its own."""

    q: slice
    kv: slice
    causal: bool


def calls(q: Sequence[Segment], kv: Sequence[Segment], causal: bool) -> list[Call]:
    """The fewest calls by which each query sees, once, every key that it may.

    q, kv: what two buffers hold, from slot 0 on, each sorted by start; all of one length and stride, so that two
    segments of stride 1 hold the same positions, or none in common.
    """
    if not causal:
        return [Call(a, b, False) for a in _runs(q) for b in _runs(kv)]
    if any(segment.stride > 1 for segment in (*q, *kv)):
        return _strided(q, kv)
    return _staircase(q, kv)


def cut(found: Sequence[Call], most: int) -> Iterator[Call]:
    """The same work in calls of at most `most` queries and keys."""
    for call in found:
        for start in range(call.q.start, call.q.stop, most):
            q = slice(start, min(start + most, call.q.stop))
            own = call.kv.start + start - call.q.start if call.causal else call.kv.stop  # where causal keys begin
            for first in range(call.kv.start, own, most):
                yield Call(q, slice(first, min(first + most, own)), False)
            if call.causal:
                yield Call(q, slice(own, own + q.stop - q.start), True)


def _slots(held) -> list[slice]:
    """Where each segment's tokens stand in a buffer, padding left out."""
    ends = list(accumulate(segment.length for segment in held))
    return [slice(end - s.length, end - s.length + s.valid) for end, s in zip(ends, held, strict=True)]


def _runs(held) -> list[slice]:
    """Slots of tokens, as few slices as they make."""
    runs = []
    for slots in _slots(held):
        if runs and runs[-1].stop == slots.start:
            runs[-1] = slice(runs[-1].start, slots.stop)
        elif slots.stop > slots.start:
            runs.append(slots)
    return runs


def _strided(q, kv) -> list[Call]:
    """Cyclic: query a + xP sees key b + yP where y <= x if b <= a, and where y < x otherwise."""
    found = []
    for queries, a in zip(q, _slots(q), strict=True):
        for keys, b in zip(kv, _slots(kv), strict=True):
            later = int(keys.start > queries.start)
            count = queries.valid - later
            if count > 0:
                found.append(Call(slice(a.start + later, a.stop), slice(b.start, b.start + count), True))
    return found


@dataclass
class _Run:
    """Queries that see the same keys in front of theirs: `before` segments; and `own`, if their keys are here too."""

    q: slice
    before: int
    own: int


def _staircase(q, kv) -> list[Call]:
    """Stride 1: a query's segment sees all segments in front of it, and itself up to the diagonal."""
    starts, where = [segment.start for segment in kv], _slots(kv)
    runs: list[_Run] = []
    for queries, slots in zip(q, _slots(q), strict=True):
        if not queries.valid:
            continue
        before = bisect_left(starts, queries.start)
        own = int(before < len(kv) and starts[before] == queries.start)
        last = runs[-1] if runs else None
        if last and bool(last.own) == bool(own) and before == last.before + last.own:
            last.q, last.own = slice(last.q.start, slots.stop), last.own + own
        else:
            runs.append(_Run(slots, before, own))
    found = []
    for run in runs:
        if run.before:
            found.append(Call(run.q, slice(0, where[run.before - 1].stop), False))
        if run.own:
            first = where[run.before].start
            found.append(Call(run.q, slice(first, first + run.q.stop - run.q.start), True))
    return found
