"""Proposals by the draft head of a model, from the hidden states that the cache keeps."""

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet

import torch

from megatron_ssm.layers.cache import Cache
from megatron_ssm.model.model import Model

from .prompt_reader import fair_shares
from .sampling import Sampling, choose_tokens
from .slot import Slot

AT_ONCE = 16  # `propose` reads up to this many unread tokens of a request; further ones are read before


class DraftByHead:
    """Proposes tokens by greedy search with the draft head of `model`; it has the methods of `speculation.Draft`.

    Keys and values of proposed tokens follow those of the request's own tokens in the cache, which also has the model's
    hidden states, and are overwritten later. chunk: the most tokens of a request that it reads in one call (None: any
    number).
    """

    def __init__(self, model: Model, cache: Cache, chunk: int | None):
        self.model, self._chunk = model, chunk
        # It shares the states; its lengths count the tokens that the head has read, without the first of each request.
        self._cache = replace(cache, lengths=torch.zeros_like(cache.lengths), max_length=None)
        self._known: WeakSet[Slot] = WeakSet()

    def read(self, slots: Sequence[Slot], budget: int | None) -> list[Slot]:
        """Read on in requests with many unread tokens, such as prompts; returns the slots that are ready to propose.

        budget: the most tokens of all slots together, at least one per slot (None: any number).
        """
        for slot in slots:
            if slot not in self._known:
                self._cache.lengths[slot.row] = 0
                self._known.add(slot)
        behind = {slot: self._unread(slot) - AT_ONCE for slot in slots}
        wanted = {slot: min(left, self._chunk or left) for slot, left in behind.items() if left > 0}
        for slot, count in fair_shares(wanted, budget).items():
            self._read([slot], count)
        return [slot for slot in slots if self._unread(slot) <= AT_ONCE]

    def _unread(self, slot: Slot) -> int:
        return slot.tokens - 1 - int(self._cache.lengths[slot.row])

    def propose(self, slots: Sequence[Slot], count: int) -> list[list[int]]:
        """`count` tokens for each slot that `read` has returned, the same on all ranks. Sends the messages of the calls."""
        model, columns = self.model, []
        hidden, rows = self._read(slots, AT_ONCE), self._cache.select(slot.row for slot in slots)
        for left in reversed(range(count)):
            local = model.draft_logits(hidden[:, -1])
            columns.append(choose_tokens(local, Sampling(), [], model.ranks).clamp(min=0))
            if left:
                hidden = model.draft_hidden(columns[-1].unsqueeze(1).to(model.device), hidden, rows)
                rows.advance(1)
        rows.advance(1 - count)  # the next call reads the request's new tokens instead
        return torch.stack(columns, dim=1).tolist()

    def _read(self, slots: Sequence[Slot], most: int) -> torch.Tensor:
        """Read up to `most` tokens of each slot; returns the head's last hidden states (batch, 1, hidden)."""
        model, cache = self.model, self._cache.select(slot.row for slot in slots)
        starts = cache.lengths[cache.rows].tolist()
        ids = [slot.tokens_from(1 + start, most) for slot, start in zip(slots, starts, strict=True)]
        counts = torch.tensor(list(map(len, ids)))
        padded = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), batch_first=True).to(model.device)
        before = cache.states["final"]["hidden"]
        rows = torch.tensor([slot.row for slot in slots]).unsqueeze(1)
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(padded.shape[1])
        out = model.draft_hidden(padded, before[rows, positions.clamp(max=before.shape[1] - 1)], cache)
        cache.lengths[cache.rows] += counts
        return out[torch.arange(len(slots)), counts - 1].unsqueeze(1)
