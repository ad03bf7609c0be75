"""The prefix cache: snapshots of the cache after prefixes of prompts, found by the tokens and a key.

Prompts with different keys share nothing, because response times reveal whether a prefix was read before.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ssm.layers.cache import Snapshot


class PrefixCache:
    """{(key, prefix): (snapshot, this rank's logits after it)}, from which the least recently used entries are evicted.

    Sends nothing. Ranks that make the same calls keep the same prefixes, because snapshots of a prefix have the same size on
    all ranks.

    Attributes:
        max_bytes: The memory on this rank.
        nbytes: The memory of the entries. Keys and values that several snapshots share count once.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[bytes, tuple[Snapshot, torch.Tensor]] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # {length: number of prefixes}
        self._references: Counter[int] = Counter()  # {id of a tensor: number of entries that hold it}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, prefix: Sequence[int], key: str = "") -> Snapshot | None:
        """The snapshot of exactly this prefix, or None."""
        digest = _digest(prefix, key)
        if digest not in self._entries:
            return None
        self._entries.move_to_end(digest)
        return self._entries[digest][0]

    def longest(self, tokens: Sequence[int], key: str = "") -> tuple[Snapshot, torch.Tensor] | None:
        """The snapshot and the logits of the longest prefix of `tokens` that is kept, or None."""
        longest, state, start = None, _state(key), 0
        for length in sorted(n for n in self._lengths if n <= len(tokens)):
            state.update(array("q", tokens[start:length]).tobytes())
            start = length
            if state.digest() in self._entries:
                longest = state.digest()
        if longest is None:
            return None
        self._entries.move_to_end(longest)
        return self._entries[longest]

    def add(self, prefix: Sequence[int], snapshot: Snapshot, logits: torch.Tensor, key: str = "") -> bool:
        """Add an entry and return True, unless it is larger than `max_bytes`."""
        if sum(t.numel() * t.element_size() for t in [*snapshot.tensors(), logits]) > self.max_bytes:
            return False
        self._entries[_digest(prefix, key)] = snapshot, logits
        self._lengths[snapshot.length] += 1
        self._count(snapshot, logits, 1)
        while self.nbytes > self.max_bytes:
            _, (old, old_logits) = self._entries.popitem(last=False)
            self._lengths -= Counter([old.length])
            self._count(old, old_logits, -1)
        return True

    def _count(self, snapshot: Snapshot, logits: torch.Tensor, change: int) -> None:
        """Add `change` to the references of an entry's tensors; tensors with references count in `nbytes`."""
        for tensor in [*snapshot.tensors(), logits]:
            before = self._references[id(tensor)]
            self._references[id(tensor)] += change
            if 0 in (before, before + change):
                self.nbytes += change * tensor.numel() * tensor.element_size()
            if before + change == 0:
                del self._references[id(tensor)]


def _state(key: str) -> Any:
    text = key.encode()
    return hashlib.sha256(len(text).to_bytes(8, "little") + text)


def _digest(tokens: Sequence[int], key: str) -> bytes:
    """The hash of a prefix and its key, which `longest` computes incrementally."""
    state = _state(key)
    state.update(array("q", tokens).tobytes())
    return state.digest()
