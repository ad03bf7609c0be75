"""Snapshots of prompts, found again by their tokens, within a bound of bytes."""

import hashlib
from array import array
from collections import Counter, OrderedDict

import torch

from megatron_ssm.layers.cache import Snapshot


class PrefixCache:
    """{prefix: (snapshot, this rank's logits after it)}; the least recently used are dropped beyond `max_bytes`.

    Keys and values that several snapshots share count once. Equal calls leave equal contents on every rank, since
    snapshots of a prefix have the same size on all of them.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[bytes, tuple[Snapshot, torch.Tensor]] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._holders: Counter[int] = Counter()  # of each tensor, by its id

    def __len__(self):
        return len(self._entries)

    def get(self, prefix) -> Snapshot | None:
        """The snapshot of exactly this prefix."""
        key = _digest(prefix)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def longest(self, tokens) -> tuple[Snapshot, torch.Tensor] | None:
        """The entry of the longest prefix of `tokens` that there is."""
        found, state, start = None, hashlib.sha256(), 0
        for length in sorted(n for n in self._lengths if n <= len(tokens)):
            state.update(array("q", tokens[start:length]).tobytes())
            start = length
            if state.digest() in self._entries:
                found = state.digest()
        if found is None:
            return None
        self._entries.move_to_end(found)
        return self._entries[found]

    def add(self, prefix, snapshot: Snapshot, logits: torch.Tensor) -> bool:
        """Keep a snapshot, unless it is larger than all there is room for; whether it was kept."""
        if sum(t.numel() * t.element_size() for t in [*snapshot.tensors(), logits]) > self.max_bytes:
            return False
        self._entries[_digest(prefix)] = snapshot, logits
        self._lengths[snapshot.length] += 1
        self._hold(snapshot, logits, 1)
        while self.nbytes > self.max_bytes:
            _, (old, old_logits) = self._entries.popitem(last=False)
            self._lengths -= Counter([old.length])
            self._hold(old, old_logits, -1)
        return True

    def _hold(self, snapshot, logits, change) -> None:
        """Count an entry's tensors in or out."""
        for tensor in [*snapshot.tensors(), logits]:
            before = self._holders[id(tensor)]
            self._holders[id(tensor)] += change
            if 0 in (before, before + change):
                self.nbytes += change * tensor.numel() * tensor.element_size()
            if before + change == 0:
                del self._holders[id(tensor)]


def _digest(tokens) -> bytes:
    return hashlib.sha256(array("q", tokens).tobytes()).digest()
