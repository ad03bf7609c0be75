"""The functions that compute a tile: what one block of every axis contributes to the outputs.

A tile gets the program, its blocks of the inputs, and for each axis the indices of the whole tensor that the block has;
masks are functions of these, so they are right for every layout. It returns the outputs' contributions, in at least fp32.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from attention2d.compute.tile import attend, attend_backward, empty_result, merge, tile_length
from attention2d.layout.token_order import KernelCall, Segment, kernel_calls, split_calls
from commir.ir.program import Program
from sparsefusion.collectives.wire_formats import at_least_fp32

from .expressions import evaluate
from .scan_programs import scan_tile

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
Tile = Callable[[Program, Tensors, Tensors], dict[str, Tensor]]


def tile_of(program: Program, kernel: str = "library") -> Tile:
    """The function that computes the tile of a program. kernel: "library", or "reference" for plain operations."""
    if (program.tile, kernel) in _TILES:
        return _TILES[program.tile, kernel]
    return evaluate


def derive(program: Program, operand: str, sources: Sequence[Tensor]) -> Tensor:
    """An input that a program derives from others before its loops: delta, the sum of dout * out over head_dim."""
    if operand != "delta":
        raise ValueError(f"{program.name} does not say how to derive {operand}")
    dout, out = sources
    return (dout.to(at_least_fp32(dout.dtype)) * out).sum(-1)


def _attention(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """(out, lse) of some queries over some keys, by the kernels of attention2d."""
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    scale, calls = program.option("scale"), _Calls(program, indices)
    q, k, v = calls.queries(q), calls.keys(k), calls.keys(v)
    if calls.is_one_tile(q, k):
        out, lse = attend(q, k, v, calls.all[0].causal, scale)
    else:
        out, lse = empty_result(q)
        for call in split_calls(calls.all, tile_length(q)):
            merge(out[call.q], lse[call.q], *attend(q[call.q], k[call.kv], v[call.kv], call.causal, scale))
    return {"out": calls.original_queries(out).transpose(0, 1), "lse": calls.original_queries(lse).transpose(0, 1)}


def _attention_backward(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """(dq, dk, dv) of some queries and some keys, by the kernels of attention2d."""
    scale, calls = program.option("scale"), _Calls(program, indices)
    dout, q, lse, delta = (calls.queries(inputs[name].transpose(0, 1)) for name in ("dout", "q", "lse", "delta"))
    k, v = (calls.keys(inputs[name].transpose(0, 1)) for name in "kv")
    if calls.is_one_tile(q, k):
        dq, dk, dv = attend_backward(dout, delta, q, k, v, lse, calls.all[0].causal, scale)
    else:
        dq, dk, dv = (x.new_zeros(x.shape, dtype=at_least_fp32(x.dtype)) for x in (q, k, v))
        for call in split_calls(calls.all, tile_length(q)):
            rows, cols = call.q, call.kv
            tile = dout[rows], delta[rows], q[rows], k[cols], v[cols], lse[rows]
            for total, part in zip(
                (dq[rows], dk[cols], dv[cols]), attend_backward(*tile, call.causal, scale), strict=True
            ):
                total += part
    found = {"dq": calls.original_queries(dq), "dk": calls.original_keys(dk), "dv": calls.original_keys(dv)}
    return {name: x.transpose(0, 1) for name, x in found.items()}


class _Calls:
    """The kernel calls for a tile whose queries and keys are at any positions, after sorting both by position."""

    def __init__(self, program: Program, indices: Tensors) -> None:
        self._orders = [_order(indices[axis]) for axis in ("q", "kv")]
        sorted_indices = [
            x if order is None else x[order]
            for x, order in zip((indices["q"], indices["kv"]), self._orders, strict=True)
        ]
        if program.option("causal"):
            q, kv = _segments(*sorted_indices)
            self.all = kernel_calls(q, kv, True)
        else:
            self.all = [KernelCall(slice(0, len(indices["q"])), slice(0, len(indices["kv"])), False)]

    def is_one_tile(self, q: Tensor, k: Tensor) -> bool:
        """Whether one kernel call covers all queries and all keys, and is small enough."""
        whole = KernelCall(slice(0, len(q)), slice(0, len(k)), self.all[0].causal) if self.all else None
        return self.all == [whole] and max(len(q), len(k)) <= tile_length(q)

    def queries(self, x: Tensor) -> Tensor:
        """Queries sorted by position."""
        return x if self._orders[0] is None else x[self._orders[0]]

    def keys(self, x: Tensor) -> Tensor:
        """Keys sorted by position."""
        return x if self._orders[1] is None else x[self._orders[1]]

    def original_queries(self, x: Tensor) -> Tensor:
        """The inverse of `queries`."""
        return _unsorted(x, self._orders[0])

    def original_keys(self, x: Tensor) -> Tensor:
        """The inverse of `keys`."""
        return _unsorted(x, self._orders[1])


def _order(positions: Tensor) -> Tensor | None:
    """The permutation that sorts positions; None if they are sorted."""
    return None if bool((positions[1:] > positions[:-1]).all()) else positions.argsort()


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    found = torch.empty_like(x)
    found[order] = x
    return found


def _segments(q: Tensor, kv: Tensor) -> tuple[list[Segment], list[Segment]]:
    """Both as segments of consecutive positions, all of the same length: the largest that divides every start and length."""
    runs = [_runs(x) for x in (q, kv)]
    length = math.gcd(*(number for found in runs for run in found for number in run))
    return tuple(
        [Segment(start, length, length) for first, count in found for start in range(first, first + count, length)]
        for found in runs
    )  # type: ignore[return-value]


def _runs(positions: Tensor) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive positions."""
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist(), len(positions)]
    return [(int(positions[a]), b - a) for a, b in zip(starts, starts[1:], strict=False)]


def _attention_ref(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """`_attention` in plain operations."""
    q, k, v = _all_heads(inputs)
    scores = _scores(program, q, k, indices)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    return {"out": torch.einsum("bhqk,bkhd->bqhd", weights, v), "lse": lse.transpose(1, 2)}


def _attention_backward_ref(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """`_attention_backward` in plain operations: P = exp(s - lse), dS = P (dout v^T - delta)."""
    kv_heads, dout = inputs["k"].shape[2], inputs["dout"].to(at_least_fp32(inputs["dout"].dtype))
    q, k, v = _all_heads(inputs)
    weights = (_scores(program, q, k, indices) - inputs["lse"].transpose(1, 2).unsqueeze(-1)).exp()
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout)
    dscores = torch.einsum("bqhd,bkhd->bhqk", dout, v) - inputs["delta"].transpose(1, 2).unsqueeze(-1)
    dscores = weights * dscores * program.option("scale")
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q)
    dk, dv = (x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))
    return {"dq": dq, "dk": dk, "dv": dv}


def _all_heads(inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (inputs[name].to(at_least_fp32(inputs[name].dtype)) for name in "qkv")
    groups = q.shape[2] // k.shape[2]
    return q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _scores(program: Program, q: Tensor, k: Tensor, indices: Tensors) -> Tensor:
    """(batch, heads, queries, keys): scale q k^T, -inf where a query does not see a key."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * program.option("scale")
    if program.option("causal"):
        hidden = indices["q"].unsqueeze(1) < indices["kv"]
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    return scores


_TILES: dict[tuple[str, str], Tile] = {
    ("attention", "library"): _attention,
    ("attention", "reference"): _attention_ref,
    ("attention_backward", "library"): _attention_backward,
    ("attention_backward", "reference"): _attention_backward_ref,
    ("selective_scan", "library"): scan_tile,
    ("selective_scan", "reference"): scan_tile,
}
