"""Reads the prompts of an `Engine` in chunks, and keeps snapshots of them in a prefix cache.

Where context ranks share the prompts, `Model.next_logits` divides each chunk over them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_ssm.layers.cache import Cache, Snapshot

from .prefix_cache import PrefixCache
from .sampling import log_probabilities
from .slot import Slot, run_model

SHORTEST_INTERVAL = 256  # tokens between snapshots
LONG_PROMPT = 4096  # tokens of a prompt whose snapshots should fit into a quarter of the prefix cache
SCORED = 128  # the most tokens of a prompt whose logits are computed at once, to limit memory


class PromptReader:
    """Reads up to `chunk` tokens (None: all) of each prompt per step into the rows of `cache`.

    With a prefix cache, it takes snapshots after every `block` tokens and at the end of a prompt.
    """

    def __init__(self, cache: Cache, prefix_cache: PrefixCache, chunk: int | None, block: int):
        self.cache, self.prefix_cache = cache, prefix_cache
        self.chunk, self.block = chunk, block
        self.tokens_read = 0  # the number of tokens read in all prompts

    def begin(self, slot: Slot) -> None:
        """Clear the slot's row, or restore the longest prefix of its prompt that the prefix cache has.

        A request for the log-probabilities or the embedding of its prompt starts at the beginning, because logits and hidden
        states are not cached.
        """
        self.cache.reset(slot.row)
        request = slot.request
        entry = None
        if request.options.prompt_logprobs:
            request.prompt_logprobs.append(None)
        elif request.options.pooling is None:
            entry = self.prefix_cache.longest(request.prompt, request.cache_key)
        if entry is not None:
            snapshot, logits = entry
            self.cache.restore(slot.row, snapshot)
            slot.tokens_read = request.reused = snapshot.length
            slot.snapshot, slot.logits = (snapshot, None) if slot.is_reading else (None, logits)

    def read(self, slots: Iterable[Slot], budget: int) -> None:
        """Read the next tokens of each prompt; slots whose prompt is then complete have logits or an embedding.

        It calls the model once for all chunks of the same length, separately for each adapter, for log-probabilities and for
        embeddings. budget: the most tokens of all prompts together, at least one per slot; see `fair_shares`.
        """
        slots = sorted(slots, key=lambda slot: slot.row)
        unread = {slot: len(slot.request.prompt) - slot.tokens_read for slot in slots}
        budgets = fair_shares({slot: min(self.chunk or n, n) for slot, n in unread.items()}, budget)
        while budgets:
            groups: dict[tuple[int, bool, bool, str], list[Slot]] = {}
            for slot, left in budgets.items():
                options = slot.request.options
                length = min(left, SCORED) if options.prompt_logprobs else left
                if self.prefix_cache.max_bytes:  # a chunk ends where a snapshot is taken
                    length = min(length, self.block - slot.tokens_read % self.block)
                kind = length, options.prompt_logprobs, options.pooling is not None, options.adapter
                groups.setdefault(kind, []).append(slot)
            for (length, with_logprobs, is_pooled, _), group in groups.items():
                read = self._read_hidden if is_pooled else self._read_with_logprobs if with_logprobs else self._read
                read(group, length)
                for slot in group:
                    budgets[slot] -= length
                    self._finish_chunk(slot, length)
            budgets = {slot: left for slot, left in budgets.items() if left}

    def _read(self, slots: Sequence[Slot], length: int) -> None:
        run_model(self.cache, slots, [slot.next_of_prompt(length) for slot in slots])

    def _read_with_logprobs(self, slots: Sequence[Slot], length: int) -> None:
        """`_read`, and add the log-probabilities of the tokens that follow the tokens read."""
        model, rows = slots[0].model, self.cache.select(slot.row for slot in slots)
        ids = torch.tensor([slot.next_of_prompt(length) for slot in slots], device=model.device)
        logits = model.local_logits(ids, None, rows, prompt=True)  # (batch, length, width)
        for slot, local in zip(slots, logits, strict=True):
            request, slot.logits = slot.request, local[-1]
            targets = torch.tensor(
                request.prompt[slot.tokens_read + 1 : slot.tokens_read + 1 + length], dtype=torch.int64
            )
            if len(targets):
                request.prompt_logprobs += log_probabilities(
                    local[: len(targets)], targets, request.options.logprobs or 0, model.ranks
                )

    def _read_hidden(self, slots: Sequence[Slot], length: int) -> None:
        """`_read` for embeddings, which need the hidden states in place of the logits."""
        model, rows = slots[0].model, self.cache.select(slot.row for slot in slots)
        ids = torch.tensor([slot.next_of_prompt(length) for slot in slots], device=model.device)
        for slot, hidden in zip(slots, model.hidden_states(ids, rows), strict=True):
            slot.pool(hidden)

    def _finish_chunk(self, slot: Slot, length: int) -> None:
        """Count a chunk that was read, and take a snapshot at the end of a block or of the prompt."""
        slot.tokens_read += length
        self.tokens_read += length
        if slot.request.options.pooling is not None:
            return
        if self.prefix_cache.max_bytes and (slot.tokens_read % self.block == 0 or not slot.is_reading):
            slot.snapshot = self._snapshot(slot)
        if slot.is_reading:
            slot.logits = None
        else:
            slot.snapshot = None  # the last one; from now on only the prefix cache holds it

    def _snapshot(self, slot: Slot) -> Snapshot | None:
        """The prefix cache's snapshot of the tokens read, taken now if it is missing; None if it is too large."""
        prefix = slot.request.prompt[: slot.tokens_read]
        snapshot = self.prefix_cache.get(prefix, slot.request.cache_key)
        if snapshot is not None:
            return snapshot
        assert slot.logits is not None, "a chunk has just been read"
        snapshot = self.cache.snapshot(slot.row, slot.snapshot)
        is_kept = self.prefix_cache.add(prefix, snapshot, slot.logits.clone(), slot.request.cache_key)
        return snapshot if is_kept else None


def snapshot_interval(state_bytes: int, prefix_bytes: int) -> int:
    """The number of tokens between two snapshots: the snapshots of a LONG_PROMPT fit into a quarter of the prefix cache.

    It is a power of two from SHORTEST_INTERVAL to LONG_PROMPT. state_bytes: bytes of a snapshot's states of constant size.
    """
    interval = SHORTEST_INTERVAL
    while interval < LONG_PROMPT and 4 * state_bytes * (LONG_PROMPT // interval) > prefix_bytes:
        interval *= 2
    return interval


def fair_shares(wanted: Mapping[Slot, int], budget: int | None) -> dict[Slot, int]:
    """The number of tokens that each slot may read: its wanted number, up to the largest common limit within `budget`.

    budget: the most tokens of all slots together, at least one per slot (None: unlimited).
    """
    if budget is None or sum(wanted.values()) <= budget:
        return dict(wanted)
    limit, left = 0, budget
    for index, count in enumerate(sorted(wanted.values())):
        limit = left // (len(wanted) - index)
        if count > limit:
            break
        left -= count
    return {slot: min(count, limit) for slot, count in wanted.items()}
