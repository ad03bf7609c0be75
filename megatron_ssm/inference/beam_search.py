"""Beam search as transformers does it: the beams of a sequence are rows of the cache, and a step reorders them.

Every rank normalizes its slice of the vocabulary by what all gathered, offers its best continuations, and all ranks
compute the same beams from the offers.
"""

from dataclasses import dataclass

import torch

from .language_model import LanguageModel
from .sampling import offers, penalize

WORST = -1e9  # the score of what must not be chosen


@dataclass(frozen=True)
class Beams:
    """transformers' arguments: num_beams, length_penalty, early_stopping (True, False or "never"), and so on."""

    num_beams: int
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    fill: int = -1  # what stands after the end of a shorter sequence
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    num_return_sequences: int = 1

    @property
    def kept(self) -> int:
        """Continuations looked at per step: enough that `num_beams` remain if every other one ends."""
        return max(2, 1 + len(self.eos)) * self.num_beams


@torch.no_grad()
def beam_search(model: LanguageModel, input_ids, attention_mask, beams: Beams) -> torch.Tensor:
    """(batch * num_return_sequences, new) int64 on the CPU: each row's best sequences, the best first, all ranks alike.

    Sends per step, beside the model's call, 1 and then 2 * kept numbers per beam and sequence.
    """
    search = _Search(model, input_ids, attention_mask, beams)
    local = search.prefill()
    for step in range(1, beams.max_new_tokens + 1):
        scores, parents, tokens = search.continuations(local, step)
        ended = torch.isin(tokens, torch.tensor(beams.eos, dtype=torch.int64)) | (step == beams.max_new_tokens)
        sequences = torch.cat([_rows(search.sequences, parents), tokens.unsqueeze(-1)], dim=-1)
        parents = search.keep_running(scores, sequences, parents, ended)
        search.keep_finished(scores, sequences, ended)
        if not search.may_improve(step) or ended.all():
            break
        local = search.advance(parents)
    return search.best()


class _Search:
    """Running and finished sequences, (batch, num_beams, ...) on the CPU, and the running ones' rows of the cache."""

    def __init__(self, model, input_ids, attention_mask, beams):
        self.model, self.beams = model, beams
        self.input_ids, self.attention_mask = input_ids, attention_mask
        self.batch, length = input_ids.shape
        shape = self.batch, beams.num_beams
        self.cache = model.new_cache(self.batch * beams.num_beams, length + beams.max_new_tokens - 1)
        self.sequences = torch.empty(*shape, 0, dtype=torch.int64)
        self.scores = torch.full(shape, WORST)
        self.scores[:, 0] = 0.0  # at first all beams are the same: only one counts
        self.finished = torch.full((*shape, beams.max_new_tokens), beams.fill)
        self.finished_scores = torch.full(shape, WORST)
        self.finished_lengths = torch.zeros(shape, dtype=torch.int64)
        self.improvable = torch.ones(self.batch, 1, dtype=torch.bool)
        self.seen = None
        if beams.repetition_penalty != 1:
            real = input_ids if attention_mask is None else input_ids.where(attention_mask.bool(), input_ids[:, -1:])
            prompt = real.repeat_interleave(beams.num_beams, 0)  # padding was not met
            self.seen = torch.zeros(len(prompt), model.config.vocab_size, dtype=torch.bool).scatter_(
                1, prompt.cpu(), True
            )

    def prefill(self):
        """Read each prompt once, and make its state that of all its beams; returns this rank's logits per beam."""
        rows = torch.arange(self.batch).repeat_interleave(self.beams.num_beams) * self.beams.num_beams
        cache = self.cache.select(range(0, len(rows), self.beams.num_beams))
        local = self.model.local_logits(self.input_ids, self.attention_mask, cache, logits_to_keep=1)[:, -1]
        self.cache.reorder(rows)
        return local.repeat_interleave(self.beams.num_beams, 0)

    def advance(self, parents):
        """One more token for each running beam, whose state is its parent's; returns this rank's logits."""
        first = torch.arange(self.batch).unsqueeze(1) * self.beams.num_beams
        rows = (parents + first).flatten()
        self.cache.reorder(rows)
        tokens = self.sequences[..., -1].reshape(-1, 1)
        if self.seen is not None:
            self.seen = self.seen[rows].scatter_(1, tokens, True)
        return self.model.local_logits(tokens.to(self.model.device), None, self.cache)[:, -1]

    def continuations(self, local, step):
        """The best `kept` of all beams' next tokens: (batch, kept) summed log-probabilities, parent beams, tokens."""
        ranks, width = self.model.ranks, local.shape[1]
        log_sums = ranks.gather(local.logsumexp(-1))
        scores = local - log_sums.logsumexp(0).unsqueeze(-1)
        first, stop = self.model.embeddings.start, self.model.embeddings.stop
        if self.seen is not None:
            seen = torch.nn.functional.pad(self.seen[:, first:stop], (0, width - (stop - first)))
            scores = penalize(scores, seen.to(scores.device), self.beams.repetition_penalty)
        if step <= self.beams.min_new_tokens:
            scores[:, [i - first for i in self.beams.eos if first <= i < stop]] = float("-inf")
        scores = (scores + self.scores.to(scores.device).view(-1, 1)).view(self.batch, -1)
        values, index = scores.topk(min(self.beams.kept, scores.shape[1]), dim=-1)
        index = index // width * (width * ranks.size) + ranks.rank * width + index % width  # among all ranks' columns
        values, index = (t.cpu() for t in offers(values.double(), index, ranks))
        order = (values.sort(dim=-1, descending=True, stable=True).indices)[:, : self.beams.kept]
        values, index = values.gather(1, order).float(), index.gather(1, order)
        return values, index // (width * ranks.size), index % (width * ranks.size)

    def keep_running(self, scores, sequences, parents, ended):
        """The best continuations that have not ended are the next running beams; returns their parents."""
        scores = scores + ended * WORST
        best = scores.topk(self.beams.num_beams, dim=-1).indices
        self.sequences, self.scores = _rows(sequences, best), scores.gather(1, best)
        return parents.gather(1, best)

    def keep_finished(self, scores, sequences, ended):
        """Those among the best num_beams continuations that ended compete with the finished ones, by score per length."""
        beams, length = self.beams, sequences.shape[-1]
        counts = ended & (torch.arange(scores.shape[1]) < beams.num_beams) & self.improvable
        if beams.early_stopping is True:
            counts &= ~(self.finished_scores > WORST / 2).all(-1, keepdim=True)
        scores = (scores / length**beams.length_penalty).masked_fill(~counts, WORST)
        padded = torch.nn.functional.pad(sequences, (0, beams.max_new_tokens - length), value=beams.fill)
        merged = torch.cat([self.finished_scores, scores], 1)
        best = merged.topk(beams.num_beams, dim=-1).indices
        self.finished_scores = merged.gather(1, best)
        self.finished = _rows(torch.cat([self.finished, padded], 1), best)
        lengths = torch.cat([self.finished_lengths, torch.full(scores.shape, length)], 1)
        self.finished_lengths = lengths.gather(1, best)

    def may_improve(self, length) -> bool:
        """Whether any running beam could still displace a finished one (transformers' heuristics)."""
        beams = self.beams
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = beams.max_new_tokens
        reachable = self.scores[:, :1] / length**beams.length_penalty
        done = self.finished_scores > WORST / 2
        worst = self.finished_scores.min(1, keepdim=True).values.where(done, WORST)
        self.improvable &= (reachable > worst).any(-1, keepdim=True)
        full = beams.early_stopping is True and bool(done.all())
        return bool(self.improvable.any()) and not full

    def best(self):
        """The finished sequences asked for, cut to the longest."""
        count = self.beams.num_return_sequences
        return self.finished[:, :count, : int(self.finished_lengths[:, :count].max())].flatten(0, 1)


def _rows(tensor, index):
    """tensor (batch, n, length), index (batch, m) -> (batch, m, length)."""
    return tensor.gather(1, index.unsqueeze(-1).expand(-1, -1, tensor.shape[-1]))
