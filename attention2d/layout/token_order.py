"""Token orders: the tokens of a sequence that each rank holds, and the kernel calls that attend them.

- zigzag: the sequence is cut into 2P equal blocks; rank p holds blocks p and 2P-1-p. This is Megatron's order. Causal
  attention of any rank's queries to any rank's keys is then the same amount of work.
- contiguous: rank p holds the p-th of P equal blocks.
- cyclic: rank p holds tokens p, p+P, p+2P, ... This is the order of the paper Attention2D (section 3.2). The causal work is
  almost the same for any rank's queries and any rank's keys.

A causal query sees its own token and all earlier ones. Every rank's shard has the same number of slots. Where the length of
the sequence does not divide, the slots beyond its last token are padding. docs/concepts/attention-on-a-grid.md shows zigzag
order in a picture.
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
    """`length` slots for the tokens start, start + stride, ...; the first `valid` slots hold tokens, the others padding."""

    start: int
    length: int
    valid: int
    stride: int = 1


def blocks_per_rank(order: str, ranks: int) -> int:
    """The number of equally long segments of a rank's shard."""
    return 2 if order == "zigzag" and ranks > 1 else 1


def local_length(order: str, seq: int, ranks: int) -> int:
    """The number of slots on each rank for a sequence of `seq` tokens."""
    count = blocks_per_rank(order, ranks)
    return -(-seq // (count * ranks)) * count


def segments(order: str, rank: int, ranks: int, local: int, seq: int) -> tuple[Segment, ...]:
    """The segments in the `local` slots of rank number `rank` of `ranks`, sorted by position."""
    length, stride = local, 1
    if blocks_per_rank(order, ranks) == 2:
        length = local // 2
        starts = [rank * length, (2 * ranks - 1 - rank) * length]
    elif order != "cyclic":
        starts = [rank * local]
    else:
        starts, stride = [rank], ranks
    return tuple(Segment(start, length, min(length, max(0, -(-(seq - start) // stride))), stride) for start in starts)


def positions(segments: Sequence[Segment]) -> torch.Tensor:
    """(slots,) int64: each slot's position in the sequence. Padding slots have positions after the last token's."""
    return torch.cat([torch.arange(s.start, s.start + s.length * s.stride, s.stride) for s in segments])


def shard(x: torch.Tensor, dim: int, order: str, rank: int, ranks: int) -> torch.Tensor:
    """Cut the slots of `rank` out of `x`, which has the full sequence along `dim`. Padding is zero.

    Raises IndexError if x has no dimension `dim`.
    """
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim={dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    dim %= x.dim()
    seq = x.shape[dim]
    local = local_length(order, seq, ranks)
    padded = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, ranks * local - seq])
    indices = positions(segments(order, rank, ranks, local, seq))
    return padded.index_select(dim, indices.to(x.device))


def unshard(parts: Sequence[torch.Tensor], dim: int, order: str, seq: int) -> torch.Tensor:
    """Join the full sequence of `seq` tokens along `dim`, sorted by position. parts: every rank's shard, in rank order."""
    ranks, local = len(parts), parts[0].shape[dim]
    indices = torch.cat([positions(segments(order, rank, ranks, local, seq)) for rank in range(ranks)])
    return torch.cat(list(parts), dim).index_select(dim, indices.argsort()[:seq].to(parts[0].device))


@dataclass(frozen=True)
class KernelCall:
    """One call of an attention kernel: a slice of query slots against a slice of key slots.

    causal: query i of the query slice sees keys 0 to i of the key slice, which has the same length; otherwise it sees all.
    """

    q: slice
    kv: slice
    causal: bool


def kernel_calls(q: Sequence[Segment], kv: Sequence[Segment], causal: bool) -> list[KernelCall]:
    """Few kernel calls in which every query meets each key that it may see exactly once.

    q, kv: the segments of a query buffer and of a key buffer, from slot 0 on, each sorted by start. All segments have the
    same length and stride, so two segments of stride 1 hold either the same positions or none in common.
    """
    if not causal:
        return [KernelCall(a, b, False) for a in _joined_slices(q) for b in _joined_slices(kv)]
    if any(segment.stride > 1 for segment in (*q, *kv)):
        return _cyclic_calls(q, kv)
    return _block_calls(q, kv)


def split_calls(calls: Sequence[KernelCall], max_length: int) -> Iterator[KernelCall]:
    """Split calls into calls of at most `max_length` queries and `max_length` keys."""
    for call in calls:
        for start in range(call.q.start, call.q.stop, max_length):
            q = slice(start, min(start + max_length, call.q.stop))
            diagonal = call.kv.start + start - call.q.start if call.causal else call.kv.stop
            for first in range(call.kv.start, diagonal, max_length):
                yield KernelCall(q, slice(first, min(first + max_length, diagonal)), False)
            if call.causal:
                yield KernelCall(q, slice(diagonal, diagonal + q.stop - q.start), True)


def _valid_slices(segments: Sequence[Segment]) -> list[slice]:
    """For each segment, the slots of a buffer that hold its tokens, without its padding."""
    ends = list(accumulate(segment.length for segment in segments))
    return [slice(end - s.length, end - s.length + s.valid) for end, s in zip(ends, segments, strict=True)]


def _joined_slices(segments: Sequence[Segment]) -> list[slice]:
    """The slots of a buffer that hold tokens, in as few slices as possible."""
    joined: list[slice] = []
    for slots in _valid_slices(segments):
        if joined and joined[-1].stop == slots.start:
            joined[-1] = slice(joined[-1].start, slots.stop)
        elif slots.stop > slots.start:
            joined.append(slots)
    return joined


def _cyclic_calls(q: Sequence[Segment], kv: Sequence[Segment]) -> list[KernelCall]:
    """Causal calls of the cyclic order: query a + xP sees key b + yP if y <= x where b <= a, and if y < x where b > a."""
    calls = []
    for queries, a in zip(q, _valid_slices(q), strict=True):
        for keys, b in zip(kv, _valid_slices(kv), strict=True):
            skipped = int(keys.start > queries.start)  # the first query sees none of these keys
            count = queries.valid - skipped
            if count > 0:
                calls.append(KernelCall(slice(a.start + skipped, a.stop), slice(b.start, b.start + count), True))
    return calls


@dataclass
class _QueryRun:
    """Adjacent query segments that can share kernel calls.

    q: their slots. earlier: the number of first key segments that all of these queries see completely. own: the number of
    next key segments that hold the positions of the queries themselves (0: none).
    """

    q: slice
    earlier: int
    own: int


def _block_calls(q: Sequence[Segment], kv: Sequence[Segment]) -> list[KernelCall]:
    """Causal calls at stride 1: a query segment sees all earlier key segments, and causally the one at its own positions."""
    key_slices, calls = _valid_slices(kv), []
    for run in _query_runs(q, kv):
        if run.earlier:
            calls.append(KernelCall(run.q, slice(0, key_slices[run.earlier - 1].stop), False))
        if run.own:
            first = key_slices[run.earlier].start
            calls.append(KernelCall(run.q, slice(first, first + run.q.stop - run.q.start), True))
    return calls


def _query_runs(q: Sequence[Segment], kv: Sequence[Segment]) -> list[_QueryRun]:
    """The query segments with tokens, joined to runs.

    A segment joins the run before it if it sees exactly the keys that continue the run's causal mask: the same earlier
    segments where neither has own positions among the keys, and otherwise one segment more.
    """
    starts = [segment.start for segment in kv]
    runs: list[_QueryRun] = []
    for queries, slots in zip(q, _valid_slices(q), strict=True):
        if not queries.valid:
            continue
        earlier = bisect_left(starts, queries.start)
        own = int(earlier < len(kv) and starts[earlier] == queries.start)
        last = runs[-1] if runs else None
        if last and bool(last.own) == bool(own) and earlier == last.earlier + last.own:
            last.q, last.own = slice(last.q.start, slots.stop), last.own + own
        else:
            runs.append(_QueryRun(slots, earlier, own))
    return runs
