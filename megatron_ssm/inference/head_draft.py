"""Proposals by the draft head of a model, from the hidden states that the cache keeps."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from megatron_ssm.operators.cache import Cache

from .language_model import LanguageModel
from .prompt_reader import fair_shares
from .sampling import Sampling, choose_tokens
from .slot import Slot

AT_ONCE = 16  # tokens of each request that are read when it proposes; more are read before


class HeadDraft:
    """Proposes tokens by greedy search with the draft head of `model`; it has the methods of `speculation.Draft`.

    cache: the engine's, with the model's hidden states, and the head's keys and values. Those of proposed tokens stand
    behind those of the request's own tokens, which later overwrite them. chunk: how many tokens of a request it reads in
    one call (None: any number).
    """

    def __init__(self, model: LanguageModel, cache: Cache, chunk: int | None):
        self.model, self._cache, self._chunk = model, cache, chunk
        self._tokens_read: WeakKeyDictionary[Slot, int] = WeakKeyDictionary()

    def read(self, slots: Sequence[Slot], budget: int | None) -> list[Slot]:
        """Read on in the requests that have much unread, such as their prompts; returns the slots that then have not.

        budget: how many tokens of all of them together, at least one per slot (None: any number).
        """
        for slot in slots:
            self._tokens_read.setdefault(slot, 1)  # the first token has no hidden state before it
        behind = {slot: slot.tokens - self._tokens_read[slot] - AT_ONCE for slot in slots}
        wanted = {slot: min(left, self._chunk or left) for slot, left in behind.items() if left > 0}
        for slot, count in fair_shares(wanted, budget).items():
            self._read([slot], count)
        return [slot for slot in slots if slot.tokens - self._tokens_read[slot] <= AT_ONCE]

    def propose(self, slots: Sequence[Slot], count: int) -> list[list[int]]:
        """`count` tokens for each slot that `read` has returned, the same on all ranks.

        Sends what the calls of the head and the choices send.
        """
        model, columns = self.model, []
        hidden = self._read(slots, AT_ONCE)
        rows = torch.tensor([slot.row for slot in slots])
        positions = torch.tensor([[slot.tokens] for slot in slots], device=model.device)
        for left in reversed(range(count)):
            local = model.scaled_logits(hidden)[:, -1]
            columns.append(choose_tokens(local, Sampling(), [], None, model.ranks).clamp(min=0))
            if left:
                embeddings = model.embedded(columns[-1].unsqueeze(1).to(model.device))
                hidden = model.draft_head(embeddings, hidden, positions, self._cache, rows)
                positions = positions + 1
        return torch.stack(columns, dim=1).tolist()

    def _read(self, slots: Sequence[Slot], most: int) -> torch.Tensor:
        """Read up to `most` tokens of each slot; the head's hidden state after its last one, (batch, 1, hidden)."""
        model, starts = self.model, [self._tokens_read[slot] for slot in slots]
        counts = [min(most, slot.tokens - start) for slot, start in zip(slots, starts, strict=True)]
        longest = max(counts)
        ids = [slot.tokens_from(start, count) for slot, start, count in zip(slots, starts, counts, strict=True)]
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in ids], device=model.device)
        rows = torch.tensor([slot.row for slot in slots])
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(longest)
        before = self._cache.states["final"]["hidden"]
        hidden = before[rows.unsqueeze(1), (positions - 1).clamp(max=before.shape[1] - 1)]
        out = model.draft_head(model.embedded(padded), hidden, positions.to(model.device), self._cache, rows)
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self._tokens_read[slot] = start + count
        return out[torch.arange(len(slots)), torch.tensor(counts) - 1].unsqueeze(1)
