"""Generation: prefill once, then one token per sequence and step, the same on every rank.

No rank samples alone. Greedy: each rank offers its slice's (largest logit, id), 2 numbers per sequence; with top-k its
k best; otherwise its whole slice. From what they gathered, all ranks compute the same choice.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sparsefusion import collectives

from .layers import Ranks, gather_last
from .model import Model
from .text import TextStream, load_tokenizer


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature 0 is greedy; top_k, then top_p, cut the distribution (None: they do not)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 and finite")


def generate(model: Model, input_ids, attention_mask=None, max_new_tokens=64, temperature=0.0, top_k=None, top_p=None,
             repetition_penalty=1.0, stop_tokens=(), stop_strings=(), seed=None,
             pad_token_id=0) -> torch.Tensor:  # fmt: skip
    """The tokens that follow input_ids (batch, seq): (batch, new), int64, the same on every rank.

    attention_mask: (batch, seq), zeros only on the left. A row ends with the first of `stop_tokens` it produces, or the
    token that completes one of `stop_strings` (found in the text of the new tokens; needs the checkpoint's
    tokenizer.json), and is filled with pad_token_id; there are fewer columns when all rows have ended.
    Greedy takes the lowest id among equals. Sampling draws one uniform per token from a generator of the row's own,
    seeded seed + row (None: a fresh seed, the same on all ranks), so a row does not depend on its neighbours.
    """
    columns = list(
        stream(model, input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p, repetition_penalty,
               stop_tokens, stop_strings, seed, pad_token_id)
    )  # fmt: skip
    return torch.stack(columns, dim=1)


def stream(model: Model, input_ids, attention_mask=None, max_new_tokens=64, temperature=0.0, top_k=None, top_p=None,
           repetition_penalty=1.0, stop_tokens=(), stop_strings=(), seed=None,
           pad_token_id=0) -> Iterator[torch.Tensor]:  # fmt: skip
    """As `generate`, but yields each step's (batch,) tokens as soon as they are known. Every rank must draw as many."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    stops = Stops(model, input_ids.shape[0], stop_tokens, stop_strings)
    state = Decoding(model, input_ids, attention_mask, Sampling(temperature, top_k, top_p, repetition_penalty), seed)
    return _steps(state, stops, max_new_tokens, pad_token_id)


def _steps(state, stops, max_new_tokens, pad_token_id):
    tokens = state.prefill()
    for step in range(max_new_tokens):
        if step:
            tokens = state.advance(tokens)
        running = ~stops.ended
        yield tokens.where(running, pad_token_id)
        stops.observe(tokens)
        if stops.ended.all():
            return


class Stops:
    """Which rows have ended, and why they would."""

    def __init__(self, model: Model, batch: int, stop_tokens=(), stop_strings=()):
        self.ended = torch.zeros(batch, dtype=torch.bool)
        self.tokens = torch.tensor(
            [stop_tokens] if isinstance(stop_tokens, int) else sorted(stop_tokens), dtype=torch.int64
        )
        self.texts = []
        if stop_strings:
            if model.directory is None:
                raise ValueError("stop_strings need a tokenizer.json, and this model was not loaded from a directory")
            tokenizer = load_tokenizer(model.directory)
            self.texts = [TextStream(tokenizer, stop_strings) for _ in range(batch)]

    def observe(self, tokens: torch.Tensor) -> None:
        """Mark the rows that end with this step's tokens (batch,)."""
        for row, text in enumerate(self.texts):
            if not self.ended[row]:
                text.push(int(tokens[row]))
                self.ended[row] = text.stopped
        self.ended |= torch.isin(tokens, self.tokens)


class Decoding:
    """Sequences being continued: their cache on this rank, their generators, and the tokens they have seen."""

    def __init__(self, model: Model, input_ids, attention_mask=None, sampling=Sampling(), seed=None):
        self.model, self.sampling = model, sampling
        self.input_ids, self.attention_mask = input_ids, attention_mask
        batch = input_ids.shape[0]
        self.cache = model.new_cache(batch)
        self.generators = []
        if sampling.temperature > 0:
            seed = _agree_on_seed(seed, model.ranks)
            if not -(2**63) <= seed <= 2**64 - batch:
                raise ValueError(f"seed={seed} and those of the {batch} rows after it must fit in 64 bits")
            self.generators = [torch.Generator().manual_seed(seed + row) for row in range(batch)]
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(batch, model.embeddings.width, dtype=torch.bool, device=model.device)

    def prefill(self) -> torch.Tensor:
        """Read the prompts; returns the first new token of each, (batch,) on the CPU."""
        if self.seen is not None and self.input_ids.numel():
            mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
            for row, (ids, kept) in enumerate(zip(self.input_ids, mask, strict=True)):
                self._see(row, ids[kept.bool()])
        return self._choose(self._logits(self.input_ids, self.attention_mask))

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append each row's token; returns the next ones."""
        if self.seen is not None:
            for row, token in enumerate(tokens):
                self._see(row, token.view(1))
        return self._choose(self._logits(tokens.to(self.model.device).unsqueeze(1)))

    def _logits(self, ids, mask=None):
        with torch.no_grad():
            return self.model.local_logits(ids, mask, self.cache, logits_to_keep=1)[:, -1]

    def _see(self, row, ids):
        """Remember which of this rank's ids a row has met."""
        ids = ids.to(self.seen.device) - self.model.embeddings.start
        width = self.model.embeddings.stop - self.model.embeddings.start
        self.seen[row, ids[(ids >= 0) & (ids < width)]] = True

    def _choose(self, local):
        """(batch,) tokens from every rank's (batch, width) logits."""
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            local = local.where(~self.seen, torch.where(local > 0, local / penalty, local * penalty))
        model, sampling = self.model, self.sampling
        if not sampling.temperature:
            return _greedy(local, model.ranks).cpu()
        values, ids = _candidates(local, sampling.top_k, model.ranks)
        return _sample(values.cpu(), ids.cpu(), sampling, self.generators)


def _agree_on_seed(seed, ranks: Ranks) -> int:
    """The seed given, or a fresh one of rank 0's."""
    if seed is not None:
        return seed
    box = [int.from_bytes(os.urandom(6), "little")]
    if ranks.group is not None:
        dist.broadcast_object_list(box, group_src=0, group=ranks.group)
    return box[0]


def _offers(values, ids, ranks: Ranks):
    """Gather every rank's (batch, n) values and ids: (batch, ranks * n) each. Ids go as floats, exact below 2^24."""
    parts = collectives.all_gather(torch.stack([values, ids.to(values.dtype)]), ranks.group, ranks.counter)
    values, ids = torch.cat(parts, dim=-1)
    return values, ids.long()


def _greedy(local, ranks: Ranks):
    """(batch,) ids of the largest logits, the lowest id among equals. Sends 2 numbers per sequence."""
    index = local.argmax(-1, keepdim=True)
    values, ids = _offers(local.gather(-1, index), index + ranks.rank * local.shape[-1], ranks)
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
        values, ids = _offers(values, index + ranks.rank * width, ranks)
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
