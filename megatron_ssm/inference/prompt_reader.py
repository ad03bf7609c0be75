"""Reads the prompts of an `Engine` in chunks, and keeps snapshots of them in a prefix cache.

Where context ranks share the prompts, `LanguageModel.next_logits` divides each chunk over them.
"""

from collections.abc import Iterable

from megatron_ssm.layers.cache import Cache, Snapshot

from .language_model import LanguageModel
from .prefix_cache import PrefixCache
from .slot import Slot, run_model


class PromptReader:
    """Reads up to `chunk` tokens (None: all) of each prompt per step, into the rows of `cache`.

    block: with a prefix cache, snapshots are taken after every `block` tokens and at the end of a prompt.
    """

    def __init__(self, model: LanguageModel, cache: Cache, prefix_cache: PrefixCache, chunk: int | None, block: int):
        self.model, self.cache, self.prefix_cache = model, cache, prefix_cache
        self.chunk, self.block = chunk, block
        self.tokens_read = 0  # of all prompts

    def begin(self, slot: Slot) -> None:
        """Clear the slot's row, or restore the longest prefix of its prompt that the prefix cache has."""
        self.cache.reset(slot.row)
        entry = self.prefix_cache.longest(slot.request.prompt)
        if entry is not None:
            snapshot, logits = entry
            self.cache.restore(slot.row, snapshot)
            slot.tokens_read = slot.request.reused = snapshot.length
            slot.snapshot, slot.logits = (snapshot, None) if slot.is_reading else (None, logits)

    def read(self, slots: Iterable[Slot]) -> None:
        """Read the next tokens of each prompt; slots whose prompt is then complete have logits.

        Calls the model once for all chunks of the same length.
        """
        slots = sorted(slots, key=lambda slot: slot.row)
        budgets = {slot: self.chunk or len(slot.request.prompt) for slot in slots}
        while budgets:
            groups: dict[int, list[Slot]] = {}
            for slot, budget in budgets.items():
                groups.setdefault(self._chunk_length(slot, budget), []).append(slot)
            for length, group in groups.items():
                chunks = [slot.request.prompt[slot.tokens_read : slot.tokens_read + length] for slot in group]
                run_model(self.model, self.cache, group, chunks, prompt=True)
                for slot in group:
                    budgets[slot] -= length
                    self._finish_chunk(slot, length)
            budgets = {slot: budget for slot, budget in budgets.items() if budget and slot.is_reading}

    def _chunk_length(self, slot: Slot, budget: int) -> int:
        """How many tokens of a prompt to read in one call; a chunk ends where a snapshot is taken."""
        length = min(budget, len(slot.request.prompt) - slot.tokens_read)
        return min(length, self.block - slot.tokens_read % self.block) if self.prefix_cache.max_bytes else length

    def _finish_chunk(self, slot: Slot, length: int) -> None:
        """Count a chunk that was read, and take a snapshot if it ends where one is taken."""
        slot.tokens_read += length
        self.tokens_read += length
        if self.prefix_cache.max_bytes and (slot.tokens_read % self.block == 0 or not slot.is_reading):
            slot.snapshot = self._snapshot(slot)
        if slot.is_reading:
            slot.logits = None
        else:
            slot.snapshot = None  # no further one follows; the prefix cache alone decides how long it is kept

    def _snapshot(self, slot: Slot) -> Snapshot | None:
        """The prefix cache's snapshot of the tokens read, taken now if it has none; None if it is too large to be kept."""
        prefix = slot.request.prompt[: slot.tokens_read]
        snapshot = self.prefix_cache.get(prefix)
        if snapshot is not None:
            return snapshot
        assert slot.logits is not None, "a chunk has just been read"
        snapshot = self.cache.snapshot(slot.row, slot.snapshot)
        return snapshot if self.prefix_cache.add(prefix, snapshot, slot.logits.clone()) else None
