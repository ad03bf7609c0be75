"""Choosing the next token, the same on every rank.

Each rank holds the logits of its slice of the vocabulary. The ranks gather candidates: with greedy search the largest logit
of each slice and its id, with top-k the k largest of each slice, otherwise all logits. From the same candidates, all ranks
compute the same choice.
"""

import math
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from commfabric.collectives.agreement import on_first
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.operators import gather_last
from megatron_ssm.parallel.ranks import Ranks

LogProbability = tuple[float, list[tuple[int, float]]]  # log-probability of a token; (id, it) of the most likely ids


class Sampling(NamedTuple):
    """How a token is chosen from logits; see `generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def choose_tokens(
    local: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator | None], ranks: Ranks
) -> torch.Tensor:
    """(batch,) token ids on the CPU, the same on every rank; -1 where a logit is NaN.

    Gathers, per row and rank: 2 values with greedy search, 2 * top_k with top-k, else the slice.

    local: this rank's slice of the logits (batch, width), with penalties. generators: one per row, unused at temperature 0.
    """
    if not sampling.temperature:
        return _greedy(local, ranks).cpu()
    values, ids = _candidates(local, sampling.top_k, ranks)
    values, ids = values.cpu(), ids.cpu()
    rows = zip(values, ids, generators, strict=True)  # a single row fits into the CPU's cache
    drawn = torch.cat([_draw(logits, row_ids, sampling, generator) for logits, row_ids, generator in rows])
    return drawn.where(~values[:, 0].isnan(), -1)  # NaN comes first


def nan_error(model: str | Path | None, tokens: int) -> FloatingPointError:
    """The error for logits that are NaN after this many new tokens. model: its directory."""
    name = "the model" if model is None else model
    return FloatingPointError(
        f"{name}: the logits are NaN after {tokens} new token(s): weights are NaN, or values exceed the dtype's range"
    )


def apply_repetition_penalty(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    return scores.where(~seen, torch.where(scores > 0, scores / penalty, scores * penalty))


def log_probabilities(local: torch.Tensor, tokens: torch.Tensor, count: int, ranks: Ranks) -> list[LogProbability]:
    """The log-probabilities, in nats, of the ids `tokens` (batch,) and of the `count` most likely ids in each row.

    They are computed in float64, and the same on every rank. Gathers 2 + 2 * count values per row and rank. local: this
    rank's slice of the logits (batch, width).
    """
    local, width = local.double(), local.shape[-1]
    index = tokens.to(local.device).unsqueeze(-1) - ranks.rank * width
    is_here = (index >= 0) & (index < width)
    chosen = local.gather(-1, index.clamp(0, width - 1)).masked_fill(~is_here, float("-inf"))
    values, ids = _largest(local, min(count, width)) if count else (local[:, :0], index[:, :0])
    own = torch.cat([local.logsumexp(-1, keepdim=True), chosen, values, (ids + ranks.rank * width).double()], dim=-1)
    parts = ranks.all_gather(own).cpu().split([1, 1, *2 * values.shape[-1:]], dim=-1)  # (ranks, batch, n) each
    total, chosen = parts[0].logsumexp(0), parts[1].amax(0)
    values, ids = (torch.cat(part.unbind(), dim=-1) for part in parts[2:])
    values, order = (values - total).sort(dim=-1, descending=True, stable=True)
    best = zip(ids.gather(-1, order)[:, :count].long().tolist(), values[:, :count].tolist(), strict=True)
    own_values = (chosen - total).flatten().tolist()
    return [(value, list(zip(*row, strict=True))) for value, row in zip(own_values, best, strict=True)]


def gather_candidates(values: torch.Tensor, ids: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather every rank's values and ids (batch, n) as (batch, ranks * n). Ids are sent in the dtype of the values."""
    if ranks.size == 1:
        return values, ids
    parts = ranks.all_gather(torch.stack([values, ids.to(values.dtype)]))
    values, ids = torch.cat(parts.unbind(), dim=-1)
    return values, ids.long()


def _greedy(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """(batch,) ids of the largest logits; ties go to the lowest id."""
    index = local.argmax(-1, keepdim=True)
    values, ids = gather_candidates(local.gather(-1, index), index + ranks.rank * local.shape[-1], ranks)
    best = values.argmax(-1, keepdim=True)  # NaN counts as the largest
    return ids.gather(-1, best).where(~values.gather(-1, best).isnan(), -1).squeeze(-1)


def _candidates(local: torch.Tensor, top_k: int | None, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and ids (batch, n) that may be drawn, all or the top_k, by descending logit, then by ascending id."""
    width = local.shape[-1]
    if top_k is None or top_k >= width * ranks.size:
        values, ids = local if ranks.size == 1 else gather_last(local, ranks), None
    else:
        values, index = _largest(local, min(top_k, width))
        values, ids = gather_candidates(values, index + ranks.rank * width, ranks)
    order = descending(values)[:, :top_k]  # a higher rank holds higher ids, so equal logits have the order of their ids
    return values.gather(-1, order), order if ids is None else ids.gather(-1, order)


def descending(values: torch.Tensor) -> torch.Tensor:
    """The indices (batch, n) of each row's values, by descending value, then by ascending index: n < 2^32.

    NumPy's sort of 64-bit integers is several times as fast as torch's stable sort, so values of up to 32 bits are packed
    with their indices into such integers. NaN comes first.
    """
    if not values.is_cpu or values.dtype is torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices
    keys = torch.empty(values.shape, dtype=torch.int64)
    for row, to in zip(values, keys, strict=True):
        numbers = row.float().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        bits = (numbers + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
        bits ^= bits >> 31 & 0x7FFFFFFF  # inverts negative numbers, which would be in reverse order
        torch.arange(len(row), out=to)
        to -= bits.long() << 32
    keys.numpy().sort(axis=-1)
    return keys.bitwise_and_(0xFFFFFFFF)


def _largest(local: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row and their indices, by descending value, then by ascending index."""
    values, index = local.topk(count, dim=-1)
    is_unique = values.diff(dim=-1).all() and (local >= values[:, -1:]).sum() == values.numel()
    if not is_unique:  # topk does not define the order of equal logits
        values, index = (t[:, :count] for t in local.sort(dim=-1, descending=True, stable=True))
    return values, index


def _draw(
    values: torch.Tensor, ids: torch.Tensor, sampling: Sampling, generator: torch.Generator | None
) -> torch.Tensor:
    """(1,) id of the candidates (n,): a uniform number is mapped through the inverse of their float64 distribution."""
    probability = torch.softmax(values.double() / sampling.temperature, dim=-1)
    if sampling.top_p is not None:
        below = probability.cumsum(-1) - probability
        probability = probability.masked_fill(below >= sampling.top_p, 0)
    if sampling.min_p is not None:
        probability = probability.masked_fill(probability < sampling.min_p * probability[0], 0)
    edges = probability.cumsum(-1)
    drawn = torch.rand(1, generator=generator, dtype=torch.float64)
    index = (edges <= drawn * edges[-1]).sum(-1, keepdim=True)
    return ids[index.clamp(max=len(ids) - 1)]


def draw_seed(model: Model) -> int:
    """A random number below 2^48, which the first rank draws for all ranks that make the model's calls."""
    seed = secrets.randbits(48)
    for group in model.generating_groups:
        seed = on_first(partial(int, seed), group, model.device)
    return seed
