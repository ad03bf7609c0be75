"""The cache of generation: the states of all operators, for this rank's channels and heads.

A `Cache` has one row per sequence, and each row has its own length, so that sequences can join and leave between two
calls: `select` chooses the rows that a call continues, `reset` frees a row, and a `Snapshot` is the state of one row,
which can be restored into any row, any number of times.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .call import EVERY_ROW, Rows
from .state import Pending, State


@dataclass(frozen=True)
class Snapshot:
    """The state of one sequence on this rank after `length` tokens.

    Attributes:
        length: The number of tokens.
        fixed: The tensors whose size does not depend on the number of tokens, of all states, in order.
        segments: The per-token tensors of all states (tokens, ...), for consecutive parts of the sequence. Snapshots of
            longer prefixes of a sequence share segments, so segments must not be overwritten.
        kv_lengths: (ranks,), as in `Cache`.
    """

    length: int
    fixed: list[torch.Tensor]
    segments: tuple[list[torch.Tensor], ...] = ()
    kv_lengths: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the snapshot."""
        return [*self.fixed, *(tensor for segment in self.segments for tensor in segment)]


@dataclass(eq=False)
class SharedState:
    """State shared by all selections of a cache.

    version: changes when tensors are reallocated. pending: The speculative tokens that a tape has read and `accept` has not
    yet confirmed, or None.
    """

    version: int = 0
    pending: Pending | None = None


@dataclass
class Cache:
    """The state of sequences between two calls of the model, for this rank's channels and heads; see `model.new_cache`.

    Attributes:
        states: {path of an operator, such as "layers.3.mixer": its state}.
        lengths: (rows,) int64 on the CPU, the number of tokens that each row has read, without padding; equal on all ranks.
        max_length: The most tokens of a row that a model with attention can store; None: the cache grows as needed.
        rows: The rows that the next call of the model continues.
        kv_lengths: (context ranks, rows) int64 on the CPU, the number of keys and values of each row that each context rank
            holds; equal on all ranks. None: this rank holds all of them.
        context_rank: This rank's number among the context ranks.
        layout: See `SharedState`.
    """

    states: dict[str, State]
    lengths: torch.Tensor
    max_length: int | None = None
    rows: Rows = field(default_factory=lambda: EVERY_ROW)
    kv_lengths: torch.Tensor | None = None
    context_rank: int = 0
    layout: SharedState = field(default_factory=SharedState)

    def _fixed(self) -> Iterator[torch.Tensor]:
        for state in self.states.values():
            yield from state.fixed.values()

    def _per_token(self) -> Iterator[torch.Tensor]:
        for state in self.states.values():
            yield from state.per_token.values()

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of all states."""
        return [tensor for state in self.states.values() for tensor in state.tensors()]

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return next((tensor.device for tensor in self.tensors()), torch.device("cpu"))

    @property
    def state_bytes(self) -> int:
        """The bytes of the fixed tensors of a row."""
        return sum(tensor[:1].nbytes for tensor in self._fixed())

    @property
    def nbytes(self) -> int:
        """The bytes of the cache on this rank."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def rows_held(self) -> int:
        """The number of sequences that the cache has room for."""
        return len(self.lengths)

    @property
    def batch(self) -> int:
        """The number of sequences that a call continues."""
        return len(self.lengths[self.rows])

    @property
    def capacity(self) -> int | None:
        """The number of tokens of a row for which there is memory; None: no operator stores anything per token."""
        for state in self.states.values():
            for tensor in state.per_token.values():
                return tensor.shape[1]
        return None

    def select(self, rows: Iterable[int]) -> "Cache":
        """A view of some rows, which shares the storage of this cache. A call of the model continues the rows of the view.

        Raises ValueError unless they are distinct rows of a cache that is not itself a selection.
        """
        rows = list(map(int, rows))
        if not isinstance(self.rows, slice) or self.rows != EVERY_ROW:
            raise ValueError("select() of a selection: call it on the whole cache")
        if not rows or len({*rows}) < len(rows) or min(rows) < 0 or max(rows) >= len(self.lengths):
            raise ValueError(f"rows {rows}: expected distinct rows of a cache of {len(self.lengths)}, at least one")
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        selected = slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows)
        return replace(self, rows=selected)

    def advance(self, tokens: int, mask: torch.Tensor | None = None, new_per_rank: torch.Tensor | None = None) -> None:
        """Add the tokens of a call to the lengths. mask: (batch, tokens, 1) in any dtype, 0 at padding.

        new_per_rank: (ranks, batch), the number of keys and values that each context rank has stored.
        """
        # The sum of a mask in 16 bits would be rounded to 8 or 11 bits.
        added = tokens if mask is None else (mask != 0).sum((1, 2)).cpu()
        if isinstance(self.rows, slice):
            self.lengths[self.rows].add_(added)  # `+=` would copy the sums once more
        else:
            self.lengths[self.rows] += added
        if self.kv_lengths is not None and new_per_rank is not None:
            self.kv_lengths[:, self.rows] += new_per_rank

    def accept(self, counts: Sequence[int]) -> None:
        """After a speculative call, keep the first counts[i] tokens of row i and remove the others.

        The states are computed again from the states before the call, so they are exact. Raises RuntimeError, before
        anything changes, if tensors of the cache or of the model were reallocated since the call.
        """
        holders: tuple[Any, ...] = (*self.states.values(), self.layout)
        pending = [holder.pending for holder in holders if holder.pending is not None]
        for tokens in pending:
            tokens.check(self)
        for tokens in pending:
            tokens.advance(self, counts)
        for holder in holders:
            holder.pending = None
        self.lengths[self.rows] += torch.tensor(counts)

    def stored(self, row: int) -> int:
        """The number of keys and values of a row that this rank holds."""
        return int(self.lengths[row] if self.kv_lengths is None else self.kv_lengths[self.context_rank, row])

    def reserve(self, length: int) -> None:
        """Allocate memory for `length` tokens per row, if there is less, and copy the keys and values there.

        If context ranks split the rows, this rank allocates its share. Raises ValueError if `length` exceeds max_length.
        After any error the cache is unchanged.
        """
        if self.capacity is None:
            return
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens does not fit into a cache of max_length={self.max_length}")
        if self.kv_lengths is not None:  # a context rank holds two blocks of a chunk, each rounded up
            length = -(-length // len(self.kv_lengths)) + 1
        self.allocate(length)

    @torch.inference_mode(False)  # see `Model.new_cache`
    def allocate(self, length: int) -> None:
        """Allocate memory for `length` entries per row on this rank, if there is less."""
        if self.capacity is None or length <= self.capacity:
            return
        states = self.states.values()
        longer = [{name: _longer(t, length) for name, t in state.per_token.items()} for state in states]  # may fail
        for state, tensors in zip(states, longer, strict=True):
            state.per_token.update(tensors)
        self.layout.version += 1

    def reset(self, row: int) -> None:
        """Empty a row, so that a new sequence can start in it."""
        for tensor in self._fixed():
            tensor[row] = 0
        self.lengths[row] = 0
        if self.kv_lengths is not None:
            self.kv_lengths[:, row] = 0

    def reorder(self, rows: torch.Tensor | Sequence[int]) -> None:
        """Copy row rows[i] to row i, for all rows at once, in place. Rows may repeat."""
        rows = torch.as_tensor(rows)
        longest = max(map(self.stored, range(len(self.lengths))))
        device_rows = rows.to(self.device)
        for tensor in self._fixed():
            tensor.copy_(tensor[device_rows])
        for tensor in self._per_token():
            tensor[:, :longest] = tensor[device_rows, :longest]
        self.lengths.copy_(self.lengths[rows])
        if self.kv_lengths is not None:
            self.kv_lengths.copy_(self.kv_lengths[:, rows])

    def fork(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        stored = self.stored(source)
        for tensor in self._fixed():
            tensor[target] = tensor[source]
        for tensor in self._per_token():
            tensor[target, :stored] = tensor[source, :stored]
        self.lengths[target] = self.lengths[source]
        if self.kv_lengths is not None:
            self.kv_lengths[:, target] = self.kv_lengths[:, source]

    def snapshot(self, row: int, after: Snapshot | None = None) -> Snapshot:
        """A copy of the state of a row. after: an earlier snapshot of this sequence, whose segments are shared."""
        start = 0 if after is None else sum(len(segment[0]) for segment in after.segments if segment)
        new = [tensor[row, start : self.stored(row)].clone() for tensor in self._per_token()]
        kv_lengths = None if self.kv_lengths is None else self.kv_lengths[:, row].clone()
        return Snapshot(
            int(self.lengths[row]),
            [tensor[row].clone() for tensor in self._fixed()],
            (*(after.segments if after is not None else ()), new),
            kv_lengths,
        )

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Copy a snapshot into a row. Raises ValueError, before anything changes, if it exceeds max_length."""
        self.reserve(snapshot.length)
        if snapshot.kv_lengths is not None:
            self.allocate(int(snapshot.kv_lengths[self.context_rank]))
        for tensor, saved in zip(self._fixed(), snapshot.fixed, strict=True):
            tensor[row] = saved
        start = 0
        for segment in snapshot.segments:
            for tensor, saved in zip(self._per_token(), segment, strict=True):
                tensor[row, start : start + len(saved)] = saved
            start += len(segment[0]) if segment else 0
        self.lengths[row] = snapshot.length
        if self.kv_lengths is not None and snapshot.kv_lengths is not None:
            self.kv_lengths[:, row] = snapshot.kv_lengths


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """A copy with `length` entries in dimension 1; the new ones are zeros."""
    longer = tensor.new_zeros(tensor.shape[0], length, *tensor.shape[2:])
    longer[:, : tensor.shape[1]] = tensor
    return longer
