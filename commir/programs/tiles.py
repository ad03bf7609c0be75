"""The functions that compute a tile: what one block of every axis contributes to the outputs.

A tile gets the program, its blocks of the inputs, and for each axis the indices of the whole tensor that the block has;
masks are functions of these, so they are right for every layout. It returns the outputs' contributions, in at least fp32.
They share no memory with the inputs, so that a caller may write into them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from attention2d.compute.tile import attend, attend_backward, empty_result, merge, tile_length
from attention2d.layout.token_order import KernelCall, Segment, kernel_calls, split_calls
from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.program import Program

from .expressions import evaluate
from .kernels import registered_tile
from .scan_programs import scan_tile

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
Tile = Callable[[Program, Tensors, Tensors], dict[str, Tensor]]
TileInto = Callable[[Program, Tensors, Tensors, Sequence[Tensor]], None]
_COMPILED: dict[object, Callable[..., Any]] = {}  # {program, shapes, dtypes and devices: the compiled tile}


def tile_of(program: Program, kernel: str = "library") -> Tile:
    """The function that computes a tile: fused ("library"), plain ("reference", or "compiled"), or a registered kernel."""
    if kernel == "compiled":
        return _compiled(tile_of(program, "reference"))
    return registered_tile(kernel) or _TILES.get((program.tile, kernel), evaluate)


def tile_into(program: Program, kernel: str = "library") -> TileInto | None:
    """The function that computes a tile and combines it into earlier results, or None if there is none."""
    return _attention_into if (program.tile, kernel) == ("attention", "library") else None


def _compiled(plain: Tile) -> Tile:
    """A tile in plain operations under `torch.compile`, which fuses them for each shape of its blocks."""

    def tile(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
        blocks, places = list(inputs.values()), list(indices.values())
        key = program, tuple((name, x.shape, x.dtype, x.device) for name, x in (*inputs.items(), *indices.items()))
        if key not in _COMPILED:

            def traced(blocks: list[Tensor], places: list[Tensor]) -> dict[str, Tensor]:
                return plain(program, dict(zip(inputs, blocks, strict=True)), dict(zip(indices, places, strict=True)))

            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, and most plans do not need it

            _COMPILED[key] = torch.compile(make_fx(traced)(blocks, places), dynamic=False)
        results: dict[str, Tensor] = _COMPILED[key](blocks, places)
        return results

    return tile


def derive(program: Program, operand: str, sources: Sequence[Tensor]) -> Tensor:
    """Compute an input from others, as a program does before its loops: delta, the sum of dout * out over head_dim."""
    if operand != "delta":
        raise ValueError(f"{program.name} does not say how to derive {operand}")
    dout, out = sources
    return (dout.to(at_least_fp32(dout.dtype)) * out).sum(-1)


def _attention(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """(out, lse) of some queries over some keys, by the kernels of attention2d."""
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")  # (seq, batch, heads, head_dim), as attention2d has them
    scale, calls = program.option("scale"), _Calls(program, indices)
    k, v = calls.kv.sort(k), calls.kv.sort(v)
    if calls.is_one_tile(q, k):
        out, lse = attend(q, k, v, calls.all[0].causal, scale)
    else:
        out, lse = _attend_in_calls(q, k, v, list(split_calls(calls.of_unsorted_queries(), tile_length(q))), scale)
    return {"out": out.transpose(0, 1), "lse": lse.transpose(0, 1)}


def _attention_into(program: Program, inputs: Tensors, indices: Tensors, total: Sequence[Tensor]) -> None:
    """`_attention`, merged into (out, lse) of the same queries over other keys, without a copy of the results."""
    q, k, v, out, lse = (x.transpose(0, 1) for x in (*(inputs[name] for name in "qkv"), *total))
    calls = _Calls(program, indices)
    k, v = calls.kv.sort(k), calls.kv.sort(v)
    for call in split_calls(calls.of_unsorted_queries(), tile_length(q)):
        part = attend(q[call.q], k[call.kv], v[call.kv], call.causal, program.option("scale"))
        merge(out[call.q], lse[call.q], *part)


def _attend_in_calls(q: Tensor, k: Tensor, v: Tensor, calls: list[KernelCall], scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of several kernel calls, merged.

    The first result for some queries is copied where the slots of other calls are either the same or disjoint.
    """
    slots = sorted({(call.q.start, call.q.stop) for call in calls})
    edges = [0, *(edge for slot in slots for edge in slot), len(q)]
    if edges == sorted(edges):  # no two overlap
        fresh, out, lse = set(slots), q.new_empty(q.shape, dtype=at_least_fp32(q.dtype)), None
        lse = out.new_empty(q.shape[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            out[start:stop], lse[start:stop] = 0.0, -torch.inf
    else:
        fresh, (out, lse) = set(), empty_result(q)
    for call in calls:
        rows, part = call.q, attend(q[call.q], k[call.kv], v[call.kv], call.causal, scale)
        if (rows.start, rows.stop) in fresh:
            fresh.remove((rows.start, rows.stop))
            out[rows], lse[rows] = part
        else:
            merge(out[rows], lse[rows], *part)
    return out, lse


def _attention_backward(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """(dq, dk, dv) of some queries and some keys, by the kernels of attention2d."""
    scale, calls = program.option("scale"), _Calls(program, indices)
    dout, q, lse, delta = (calls.q.sort(inputs[name].transpose(0, 1)) for name in ("dout", "q", "lse", "delta"))
    k, v = (calls.kv.sort(inputs[name].transpose(0, 1)) for name in "kv")
    if calls.is_one_tile(q, k):
        dq, dk, dv = attend_backward(dout, delta, q, k, v, lse, calls.all[0].causal, scale)
    else:
        dq, dk, dv = (x.new_zeros(x.shape, dtype=at_least_fp32(x.dtype)) for x in (q, k, v))
        for call in split_calls(calls.all, tile_length(q)):
            rows, cols = call.q, call.kv
            tile = dout[rows], delta[rows], q[rows], k[cols], v[cols], lse[rows]
            parts = attend_backward(*tile, call.causal, scale)
            for total, part in zip((dq[rows], dk[cols], dv[cols]), parts, strict=True):
                total += part
    gradients = {"dq": calls.q.unsort(dq), "dk": calls.kv.unsort(dk), "dv": calls.kv.unsort(dv)}
    return {name: x.transpose(0, 1) for name, x in gradients.items()}


class _Calls:
    """The kernel calls of a tile whose queries and keys are at any positions; a causal mask needs both sorted first."""

    def __init__(self, program: Program, indices: Tensors) -> None:
        self._is_causal = bool(program.option("causal"))
        if self._is_causal:
            self.q, self.kv = _runs_of(indices["q"]), _runs_of(indices["kv"])
            self.all = _causal_calls(self.q.all, self.kv.all)
        else:  # without a mask the order does not matter
            self.q = self.kv = _Runs(torch.arange(1))
            self.all = [KernelCall(slice(0, len(indices["q"])), slice(0, len(indices["kv"])), False)]

    def of_unsorted_queries(self) -> list[KernelCall]:
        """The calls if only the keys are sorted: those of each run of queries, which then need not be copied."""
        if not self._is_causal or self.q.is_sorted:
            return self.all
        calls = list[KernelCall]()
        for run in self.q.all:
            for call in _causal_calls((run,), self.kv.all):
                rows = slice(run.start + call.q.start, run.start + call.q.stop)
                calls.append(KernelCall(rows, call.kv, call.causal))
        return calls

    def is_one_tile(self, q: Tensor, k: Tensor) -> bool:
        """Return True if one kernel call covers all queries in their order and all keys, and is small enough."""
        whole = KernelCall(slice(0, len(q)), slice(0, len(k)), self.all[0].causal) if self.all else None
        return self.q.is_sorted and self.all == [whole] and max(len(q), len(k)) <= tile_length(q)


_RUNS = WeakTensorKeyDictionary()  # {positions: their runs}


class _Run(NamedTuple):
    """Consecutive positions in a tile; `start` is the slot of the first."""

    first: int
    length: int
    start: int

    @property
    def slots(self) -> slice:
        return slice(self.start, self.start + self.length)


@lru_cache(maxsize=4096)  # a rank makes the same tiles in every pass
def _causal_calls(q: tuple[_Run, ...], kv: tuple[_Run, ...]) -> list[KernelCall]:
    """The causal calls between runs of queries and of keys, as if each were sorted by position."""
    length = math.gcd(*(number for run in (*q, *kv) for number in run[:2]))

    def segments(runs: tuple[_Run, ...]) -> list[Segment]:
        return [Segment(n, length, length) for run in runs for n in range(run.first, run.first + run.length, length)]

    return kernel_calls(segments(q), segments(kv), True)


class _Runs:
    """Runs of consecutive positions in a tile, sorted by position."""

    def __init__(self, positions: Tensor) -> None:
        breaks = (positions.diff() != 1).nonzero().flatten() + 1
        starts = [0, *breaks.tolist(), len(positions)]
        runs = [_Run(int(positions[a]), b - a, a) for a, b in zip(starts, starts[1:], strict=False)]
        self.all = tuple(sorted(runs))
        self.is_sorted = list(self.all) == runs

    def sort(self, x: Tensor) -> Tensor:
        """Sort the slots of x, its first dimension, by position."""
        return x if self.is_sorted else torch.cat([x[run.slots] for run in self.all])

    def unsort(self, x: Tensor) -> Tensor:
        """Undo `sort`."""
        if self.is_sorted:
            return x
        unsorted = torch.empty_like(x)
        for run, part in zip(self.all, x.split([run.length for run in self.all]), strict=True):
            unsorted[run.slots] = part
        return unsorted


def _runs_of(positions: Tensor) -> _Runs:
    """The runs of positions, found once for each tensor: a plan remembers the positions of its tiles."""
    if positions not in _RUNS:
        _RUNS[positions] = _Runs(positions)
    return _RUNS[positions]


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
    dk, dv = (x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))  # (batch, seq, kv_heads, head_dim)
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
    ("gated_delta", "library"): scan_tile,
    ("gated_delta", "reference"): scan_tile,
}
