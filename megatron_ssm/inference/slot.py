"""A running request of an `Engine`: a row of the cache, and what choosing its next token needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ssm.layers.cache import Cache, Snapshot

from .language_model import LanguageModel
from .request import Request
from .text import TextStream


@dataclass(eq=False)
class Slot:
    """A request in row `row` of the cache.

    vocabulary: the ids in this rank's slice of the vocabulary. generator: for sampled tokens, else None. text: finds stop
    strings; None if there are none. seen: (width,) bool, which ids of this rank's slice the repetition penalty applies to;
    None without a penalty. tokens_read: how many tokens of the prompt are in the cache. logits: this rank's (width,), from
    which the next token is to be chosen. snapshot: while the prompt is read, the last one taken of it or restored for it.
    """

    row: int
    request: Request
    vocabulary: range
    generator: torch.Generator | None = None
    text: TextStream | None = None
    seen: torch.Tensor | None = None
    tokens_read: int = 0
    logits: torch.Tensor | None = None
    snapshot: Snapshot | None = None

    @classmethod
    def of(cls, row: int, request: Request, model: LanguageModel, tokenizer: Any) -> "Slot":
        """A slot for a request whose prompt is still to be read."""
        slot = cls(row, request, range(model.embeddings.start, model.embeddings.stop))
        if request.sampling.temperature:
            assert request.seed is not None, "a queued request has a seed"
            slot.generator = torch.Generator().manual_seed(request.seed)
        if request.stop_strings:
            slot.text = TextStream(tokenizer, request.stop_strings)
        if request.sampling.repetition_penalty != 1:
            slot.seen = torch.zeros(model.embeddings.width, dtype=torch.bool, device=model.device)
            slot._mark(slot.seen, request.prompt)
        return slot

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.tokens_read < len(self.request.prompt)

    def allowed_logits(self) -> torch.Tensor:
        """The logits of a slot that has some; -inf for the stop tokens until the request has `min_new_tokens` tokens."""
        assert self.logits is not None, "the prompt has not been read"
        if len(self.request.tokens) >= self.request.min_new_tokens:
            return self.logits
        banned = torch.zeros(len(self.logits), dtype=torch.bool, device=self.logits.device)
        self._mark(banned, self.request.stop_tokens)
        return self.logits.masked_fill(banned, float("-inf"))

    def append(self, token: int) -> None:
        """Add the chosen token to the request; sets `request.finished` if it is the last one."""
        request, self.logits = self.request, None
        request.tokens.append(token)
        if self.seen is not None:
            self._mark(self.seen, [token])
        if self.text is not None:
            self.text.push(token)
        if token in request.stop_tokens or (self.text is not None and self.text.stopped):
            request.finished = "stop"
        elif len(request.tokens) == request.max_new_tokens:
            request.finished = "length"

    def _mark(self, mask: torch.Tensor, ids: Iterable[int]) -> None:
        """Set the entries of those `ids` that are in this rank's slice of the vocabulary."""
        local = [i - self.vocabulary.start for i in ids if i in self.vocabulary]
        mask[torch.tensor(local, dtype=torch.int64, device=mask.device)] = True


def run_model(
    model: LanguageModel, cache: Cache, slots: Sequence[Slot], ids: Sequence[Sequence[int]], prompt: bool
) -> None:
    """Continue the sequence of each slot by its row of `ids` (the same number for all); leaves the last logits in the slots.

    prompt: whether the tokens are part of prompts (see `LanguageModel.next_logits`). Sends what one call of the model
    sends.
    """
    if slots:
        rows = cache.select(slot.row for slot in slots)
        local = model.next_logits(torch.tensor(ids, device=model.device), None, rows, prompt)
        for slot, logits in zip(slots, local, strict=True):
            slot.logits = logits
