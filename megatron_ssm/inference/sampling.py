"""The choice of the next token, the same on every rank.

No rank samples alone. Greedy: each rank offers its slice's (largest logit, id), 2 numbers per sequence; with top-k its
k best; otherwise its whole slice. From what they gathered, all ranks compute the same choice.
"""

import math
from dataclasses import dataclass

import torch

from megatron_ssm.parallel.layers import Ranks, gather_last


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature 0 is greedy; top_k, then top_p, cut the distribution (None: they do not)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) or (name == "top_p" and value is None)):
                raise ValueError(f"{name}={value!r} must be a number")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and finite")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be an integer, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 and finite")


def choose(local, sampling: Sampling, generators, seen, ranks: Ranks) -> torch.Tensor:
    """(batch,) token ids on the CPU, from every rank's (batch, width) slice of the logits.

    generators: one per row (not used at temperature 0). seen: (batch, width) bool, the ids each row has met (None: no
    repetition penalty).
    """
    if seen is not None:
        local = penalize(local, seen, sampling.repetition_penalty)
    if not sampling.temperature:
        return _greedy(local, ranks).cpu()
    values, ids = _candidates(local, sampling.top_k, ranks)
    return _sample(values.cpu(), ids.cpu(), sampling, generators)


def penalize(scores, seen, penalty: float):
    """Scores with those of the ids already met moved down: divided by the penalty, or multiplied where negative."""
    return scores.where(~seen, torch.where(scores > 0, scores / penalty, scores * penalty))


def offers(values, ids, ranks: Ranks):
    """Gather every rank's (batch, n) values and ids: (batch, ranks * n) each. Ids go as the values' floats."""
    parts = ranks.gather(torch.stack([values, ids.to(values.dtype)]))
    values, ids = torch.cat(parts.unbind(), dim=-1)
    return values, ids.long()


def _greedy(local, ranks: Ranks):
    """(batch,) ids of the largest logits, the lowest id among equals. Sends 2 numbers per sequence."""
    index = local.argmax(-1, keepdim=True)
    values, ids = offers(local.gather(-1, index), index + ranks.rank * local.shape[-1], ranks)
    return ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)


def _candidates(local, top_k, ranks: Ranks):
    """Logits and ids (batch, n) that may be drawn, by falling logit, then id: all, or the top_k of all.

    Sends the whole slice, or 2 top_k numbers per sequence.
    """
    width = local.shape[-1]
    if top_k is None or top_k >= width * ranks.size:
        values, ids = gather_last(local, ranks), None
    else:
        values, index = _largest(local, min(top_k, width))
        values, ids = offers(values, index + ranks.rank * width, ranks)
    values, order = values.sort(dim=-1, descending=True, stable=True)  # ranks hold rising ids: equals stay in order
    return values[:, :top_k], (order if ids is None else ids.gather(-1, order))[:, :top_k]


def _largest(local, count):
    """The `count` largest of each row and their places, by falling value, then place."""
    values, index = local.topk(count, dim=-1)
    exact = values.diff(dim=-1).all() and (local >= values[:, -1:]).sum() == values.numel()
    if not exact:  # equal logits, whose order topk leaves open
        values, index = (t[:, :count] for t in local.sort(dim=-1, descending=True, stable=True))
    return values, index


def _sample(values, ids, sampling: Sampling, generators):
    """(batch,) ids: each row's uniform, inverted through its float64 distribution over the candidates."""
    probability = torch.softmax(values.double() / sampling.temperature, dim=-1)
    below = probability.cumsum(-1) - probability
    if sampling.top_p is not None:
        probability = probability.masked_fill(below >= sampling.top_p, 0)
    edges = probability.cumsum(-1)
    drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    place = (edges <= (drawn * edges[:, -1]).unsqueeze(-1)).sum(-1, keepdim=True)
    return ids.gather(-1, place.clamp(max=ids.shape[-1] - 1)).squeeze(-1)
