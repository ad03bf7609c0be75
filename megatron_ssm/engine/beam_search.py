"""Beam search as transformers does it: the beams of a sequence are rows of the cache, and each step reorders them.

Every rank normalizes its slice of the logits with the sums of all ranks, and finds the best continuations in its slice. The
ranks gather these candidates, and compute the same beams from them.
"""

from dataclasses import dataclass

import torch

from megatron_ssm.model.model import Model

from .sampling import apply_repetition_penalty, gather_candidates, nan_error

WORST_SCORE = -1e9  # the score of continuations that must not be chosen


@dataclass(frozen=True)
class BeamSettings:
    """transformers' arguments of beam search; early_stopping is True, False or "never".

    end_tokens: The ids that end a sequence. fill: the padding id after the end of a shorter sequence.
    """

    num_beams: int
    max_new_tokens: int
    end_tokens: tuple[int, ...] = ()
    fill: int = -1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    num_return_sequences: int = 1

    @property
    def num_candidates(self) -> int:
        """The number of continuations of a sequence in a step: enough that `num_beams` go on if all others end."""
        return max(2, 1 + len(self.end_tokens)) * self.num_beams


class BeamSearch:
    """A beam search. The constructor allocates all its memory and sends nothing; `run` searches.

    Attributes (tensors on the CPU):
        sequences, scores: The running sequences (batch, num_beams, length), and their scores (batch, num_beams).
        finished, finished_lengths: The finished sequences (batch, num_beams, max_new_tokens), and their lengths.
        finished_scores: Their scores, divided by their length to the power of length_penalty.
        improvable: (batch, 1) True where a running beam can still displace a finished sequence.
        cache: The cache, with a row for each running sequence.
    """

    def __init__(
        self, model: Model, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, settings: BeamSettings
    ):
        self.model, self.settings = model, settings
        self.input_ids, self.attention_mask = input_ids, attention_mask
        self.batch, length = input_ids.shape
        shape = self.batch, settings.num_beams
        self.cache = model.new_cache(self.batch * settings.num_beams, length + settings.max_new_tokens - 1)
        self.sequences = torch.empty(*shape, 0, dtype=torch.int64)
        self.scores = torch.full(shape, WORST_SCORE)
        self.scores[:, 0] = 0.0  # at first all beams are equal, so only the first one counts
        self.finished = torch.full((*shape, settings.max_new_tokens), settings.fill)
        self.finished_scores = torch.full(shape, WORST_SCORE)
        self.finished_lengths = torch.zeros(shape, dtype=torch.int64)
        self.improvable = torch.ones(self.batch, 1, dtype=torch.bool)
        self.seen = self._ids_in_prompts() if settings.repetition_penalty != 1 else None

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """(batch * num_return_sequences, new) int64 on the CPU: the best sequences of each row, best first.

        The same on every rank. A step sends the messages of a call of the model, and gathers from each rank 1 value per
        beam (its log-sum-exp) and 2 * num_candidates values per sequence (scores and ids).
        """
        settings = self.settings
        local = self._read_prompts()
        for step in range(1, settings.max_new_tokens + 1):
            scores, parents, tokens = self._candidates(local, step)
            if scores[:, 0].isnan().any():
                raise nan_error(self.model.directory, step - 1)
            is_last = step == settings.max_new_tokens
            ended = torch.isin(tokens, torch.tensor(settings.end_tokens, dtype=torch.int64)) | is_last
            sequences = torch.cat([_rows(self.sequences, parents), tokens.unsqueeze(-1)], dim=-1)
            running_scores = scores + ended * WORST_SCORE  # of the best continuations, those that have not ended go on
            best = running_scores.topk(settings.num_beams, dim=-1).indices
            self.sequences, self.scores = _rows(sequences, best), running_scores.gather(1, best)
            self._keep_finished(scores, sequences, ended)
            if not self._can_improve(step) or ended.all():
                break
            local = self._advance(parents.gather(1, best))
        finished, lengths = (t[:, : settings.num_return_sequences] for t in (self.finished, self.finished_lengths))
        return finished[..., : int(lengths.max())].flatten(0, 1)

    def _ids_in_prompts(self) -> torch.Tensor:
        """(batch * num_beams, vocab) bool: the ids that the prompt of each beam contains, without padding."""
        ids, mask = self.input_ids, self.attention_mask
        ids = ids if mask is None else ids.where(mask.bool(), ids[:, -1:])
        prompts = ids.repeat_interleave(self.settings.num_beams, 0).cpu()
        seen = torch.zeros(len(prompts), self.model.config.vocab_size, dtype=torch.bool)
        return seen.scatter_(1, prompts, True)

    def _read_prompts(self) -> torch.Tensor:
        """Read each prompt once, and copy its state to all its beams; returns this rank's logits per beam."""
        beams = self.settings.num_beams
        rows = torch.arange(self.batch).repeat_interleave(beams) * beams
        cache = self.cache.select(range(0, len(rows), beams))
        local = self.model.next_logits(self.input_ids, self.attention_mask, cache)
        self.cache.reorder(rows)
        return local.repeat_interleave(beams, 0)

    def _advance(self, parents: torch.Tensor) -> torch.Tensor:
        """Read the last token of each running beam, which continues the state of its parent; returns this rank's logits."""
        first = torch.arange(self.batch).unsqueeze(1) * self.settings.num_beams
        rows = (parents + first).flatten()
        self.cache.reorder(rows)
        tokens = self.sequences[..., -1].reshape(-1, 1)
        if self.seen is not None:
            self.seen = self.seen[rows].scatter_(1, tokens, True)
        return self.model.next_logits(tokens.to(self.model.device), None, self.cache)

    def _candidates(self, local: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best continuations: (batch, num_candidates) sums of log-probabilities, parent beams and tokens."""
        settings, ranks, width = self.settings, self.model.ranks, local.shape[1]
        scores = self._log_probabilities(local, step)
        scores = (scores + self.scores.to(scores.device).view(-1, 1)).view(self.batch, -1)  # (batch, num_beams * width)
        values, index = scores.topk(min(settings.num_candidates, scores.shape[1]), dim=-1)
        index = index // width * (width * ranks.size) + ranks.rank * width + index % width  # among all ranks' columns
        values, index = (t.cpu() for t in gather_candidates(values.double(), index, ranks))
        order = (values.sort(dim=-1, descending=True, stable=True).indices)[:, : settings.num_candidates]
        values, index = values.gather(1, order).float(), index.gather(1, order)
        return values, index // (width * ranks.size), index % (width * ranks.size)

    def _log_probabilities(self, local: torch.Tensor, step: int) -> torch.Tensor:
        """This rank's slice of the next token's log-probabilities; the repetition penalty and min_new_tokens are applied."""
        settings, width = self.settings, local.shape[1]
        log_sums = self.model.ranks.all_gather(local.logsumexp(-1))
        scores = local - log_sums.logsumexp(0).unsqueeze(-1)
        first, stop = self.model.embeddings.start, self.model.embeddings.stop
        if self.seen is not None:
            seen = torch.nn.functional.pad(self.seen[:, first:stop], (0, width - (stop - first)))
            scores = apply_repetition_penalty(scores, seen.to(scores.device), settings.repetition_penalty)
        if step <= settings.min_new_tokens:
            scores[:, [i - first for i in settings.end_tokens if first <= i < stop]] = float("-inf")
        return scores

    def _keep_finished(self, scores, sequences, ended) -> None:
        """Merge the ended continuations among the best num_beams into the finished sequences, by score per length."""
        settings, length = self.settings, sequences.shape[-1]
        counts = ended & (torch.arange(scores.shape[1]) < settings.num_beams) & self.improvable
        if settings.early_stopping is True:
            counts &= ~(self.finished_scores > WORST_SCORE / 2).all(-1, keepdim=True)
        scores = (scores / length**settings.length_penalty).masked_fill(~counts, WORST_SCORE)
        padded = torch.nn.functional.pad(sequences, (0, settings.max_new_tokens - length), value=settings.fill)
        merged = torch.cat([self.finished_scores, scores], 1)
        best = merged.topk(settings.num_beams, dim=-1).indices
        self.finished_scores = merged.gather(1, best)
        self.finished = _rows(torch.cat([self.finished, padded], 1), best)
        lengths = torch.cat([self.finished_lengths, torch.full(scores.shape, length)], 1)
        self.finished_lengths = lengths.gather(1, best)

    def _can_improve(self, length: int) -> bool:
        """Return True if any running beam can still displace a finished one, by transformers' heuristics."""
        settings = self.settings
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = settings.max_new_tokens
        reachable = self.scores[:, :1] / length**settings.length_penalty
        is_finished = self.finished_scores > WORST_SCORE / 2
        worst = self.finished_scores.min(1, keepdim=True).values.where(is_finished, WORST_SCORE)
        self.improvable &= (reachable > worst).any(-1, keepdim=True)
        is_full = settings.early_stopping is True and bool(is_finished.all())
        return bool(self.improvable.any()) and not is_full


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor (batch, n, length), index (batch, m) -> (batch, m, length)."""
    return tensor.gather(1, index.unsqueeze(-1).expand(-1, -1, tensor.shape[-1]))
