"""The cache of generation: convolution inputs, recurrent states, keys and values, for this rank's channels and heads.

A `Cache` has one row per sequence, and each row has its own length, so that sequences can join and leave between two
calls: `select` chooses the rows that a call continues, `reset` frees a row, and a `Snapshot` is the state of one row,
which can be restored into any row, any number of times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from megatron_ssm.context.token_sharding import KeyValuePlacement, TokenSharding

from .pending_tokens import KeptTokens, Pending

if TYPE_CHECKING:
    from .shared_attention import Positions

ALL = slice(None)

Rows = slice | torch.Tensor  # rows of a cache: consecutive ones, or (batch,) int64 indices


@dataclass(frozen=True)
class BatchInfo:
    """What every layer must know about the tokens of one call of the model.

    mask: (batch, seq, 1), 0 at padding; None: there is no padding. decoding: whether the tokens continue sequences one
    by one (see `Mamba2Mixer.forward`). rows: the rows of the cache that are continued; consecutive ones are a slice, which
    needs no copy. positions: those of the tokens, in models with attention. begins: whether all rows are empty.

    sharding: how the tokens are sharded over context ranks (None: every rank has all of them). placement: in models with
    attention and with a cache that context ranks share, where the keys and values are kept. lengths: how many keys and
    values this rank then holds of each sequence, before the call.

    speculative: whether the tokens may be taken back: layers then leave their states as they are, and keep what advances
    them (`PendingTokens`).
    """

    mask: torch.Tensor | None = None
    decoding: bool = False
    rows: Rows = field(default_factory=lambda: ALL)
    positions: "Positions | None" = None
    begins: bool = False
    sharding: TokenSharding | None = None
    placement: KeyValuePlacement | None = None
    lengths: list[int] | None = None
    speculative: bool = False


@dataclass
class LayerCache:
    """The state of one layer; every tensor has one row per sequence.

    conv: (rows, K-1, this rank's channels) in the model's dtype, the last inputs of the convolution of K taps. state: at
    least fp32; (rows, N, this rank's channels) for Mamba-1, (rows, this rank's heads, N, head_dim) for Mamba-2. keys,
    values: in layers that use the shared attention block, (rows, capacity, this rank's key/value heads, head_dim) in the
    model's dtype; index p holds position p of the sequence, where padding is not counted. If context ranks share the
    sequences, a rank has the keys and values of some positions only, in the order in which it got them. pending: the tokens
    of a speculative call until they are accepted, those of several layers with the first.
    """

    conv: torch.Tensor
    state: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    pending: Pending | None = None

    def read(self, rows: Rows = ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv and state of some rows."""
        return self.conv[rows], self.state[rows]

    def update(self, conv: torch.Tensor, state: torch.Tensor, rows: Rows = ALL) -> None:
        """Overwrite the conv and state of some rows in place; nothing to do if they were computed in place."""
        for held, new in ((self.conv, conv), (self.state, state)):
            if held[rows].data_ptr() != new.data_ptr():
                held[rows] = new.detach()

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
        rows: Rows = ALL,
        padded: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (batch, new, heads, head_dim) of some rows at `positions` (batch, new).

        padded: negative positions are padding, which is not stored. False: there are none, so that the host need not wait
        for the GPU to find out. Returns the keys and values of these rows at positions 0 to longest - 1.
        """
        assert self.keys is not None and self.values is not None, "the layer has no attention"
        where = torch.arange(len(self.conv), device=positions.device)[rows].unsqueeze(1).expand_as(positions)
        if padded and not (real := positions >= 0).all():
            where, positions, keys, values = where[real], positions[real], keys[real], values[real]
        self.keys[where, positions] = keys.detach().to(self.keys.dtype)  # under autocast they may be narrower
        self.values[where, positions] = values.detach().to(self.values.dtype)
        return self.keys[rows, :longest], self.values[rows, :longest]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of this layer."""
        return [self.conv, self.state, *self.keys_and_values()]

    def keys_and_values(self) -> list[torch.Tensor]:
        """[keys, values], or [] in a layer without attention."""
        return [tensor for tensor in (self.keys, self.values) if tensor is not None]


@dataclass(frozen=True)
class Snapshot:
    """The state of one sequence on this rank after `length` tokens.

    states: [conv, state] of each layer. segments: the keys and values, for consecutive parts of the sequence; a segment is
    [keys, values] (tokens, heads, head_dim) of each layer that has them. Snapshots of longer prefixes of the same sequence
    share segments, so these must not be overwritten. kv_lengths: as in `Cache`, (ranks,).
    """

    length: int
    states: list[list[torch.Tensor]]
    segments: tuple[list[list[torch.Tensor]], ...] = ()
    kv_lengths: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the snapshot."""
        pieces = [layer for segment in self.segments for layer in segment]
        return [tensor for layer in [*self.states, *pieces] for tensor in layer]


@dataclass
class Cache:
    """The state of sequences between two calls of the model, for this rank's channels and heads; see `model.new_cache`.

    lengths: (rows,) int64 on the CPU, how many tokens each row has read, without padding; the same on all ranks. max_length:
    how many tokens a model with attention can store per row; None: the cache grows as needed. rows: those that the next call
    of the model continues.

    kv_lengths: if context ranks share the sequences, (ranks, rows) int64 on the CPU, how many keys and values each of them
    holds of each row; the same on all ranks. None: this rank holds all. context_rank: this rank's number among them.
    """

    layers: list[LayerCache]
    lengths: torch.Tensor
    max_length: int | None = None
    rows: Rows = field(default_factory=lambda: ALL)
    kv_lengths: torch.Tensor | None = None
    context_rank: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the cache on this rank."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    @property
    def batch(self) -> int:
        """How many sequences a call continues."""
        return len(self.lengths[self.rows])

    @property
    def capacity(self) -> int | None:
        """How many tokens a row can hold; None: any number, because the model has no attention."""
        return next((layer.keys.shape[1] for layer in self.layers if layer.keys is not None), None)

    def select(self, rows: Iterable[int]) -> "Cache":
        """A view of some rows, which a call of the model then continues; the storage is shared.

        ValueError unless they are distinct rows of a cache that is not itself a selection.
        """
        rows = [int(row) for row in rows]
        if not isinstance(self.rows, slice) or self.rows != ALL:
            raise ValueError("rows are selected from a whole cache, not from a selection")
        if not rows or len({*rows}) < len(rows) or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"rows {rows} are not one or more distinct rows of a cache of {len(self.lengths)}")
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        where = slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows)
        return replace(self, rows=where)

    def advance(self, tokens: int, mask: torch.Tensor | None = None, new_per_rank: torch.Tensor | None = None) -> None:
        """Add the tokens of a call to the lengths. mask: (batch, tokens, 1) in any dtype, 0 at padding.

        new_per_rank: (ranks, batch), how many keys and values each context rank has got.
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
        """After a speculative call: keep the first counts[i] tokens of row i, as if it had decoded only these.

        The others are taken back exactly: states are computed again from those before the call, by the recurrence alone.
        Where C computed layers: RuntimeError, with nothing done, if tensors of the cache, or those that the model had
        during the call, have moved in memory since then.
        """
        first = self.layers[0].conv
        assert self.layers[0].pending is not None, "no call was speculative"
        kept = KeptTokens.of(counts, first.shape[1], first.device)
        pending = [(index, layer.pending) for index, layer in enumerate(self.layers) if layer.pending is not None]
        for _, each in pending:
            each.check(self)
        for index, each in pending:
            each.advance_cache(self, index, kept)
            self.layers[index].pending = None
        self.lengths[self.rows] += torch.tensor(counts)

    def stored(self, row: int) -> int:
        """How many keys and values this rank holds of a row."""
        return int(self.lengths[row] if self.kv_lengths is None else self.kv_lengths[self.context_rank, row])

    def reserve(self, length: int) -> None:
        """Allocate memory for `length` tokens per row, and copy the keys and values there, unless there is enough.

        If context ranks share the rows, that is for this rank's part of them. ValueError if `length` exceeds max_length.
        After any error the cache is as it was.
        """
        if self.capacity is None:
            return
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens does not fit into a cache of max_length={self.max_length}")
        self.allocate(length if self.kv_lengths is None else share_of_rank(length, len(self.kv_lengths)))

    @torch.inference_mode(False)  # see `Model.new_cache`
    def allocate(self, length: int) -> None:
        """Allocate memory for `length` keys and values per row on this rank, unless there is enough."""
        if self.capacity is None or length <= self.capacity:
            return
        grown = [layer for layer in self.layers if layer.keys is not None]
        longer = [[_longer(t, length) for t in layer.keys_and_values()] for layer in grown]  # all of them, or none
        for layer, (keys, values) in zip(grown, longer, strict=True):
            layer.keys, layer.values = keys, values

    def reset(self, row: int) -> None:
        """Empty a row, so that a new sequence can start in it."""
        for layer in self.layers:
            layer.conv[row] = 0
            layer.state[row] = 0
        self.lengths[row] = 0
        if self.kv_lengths is not None:
            self.kv_lengths[:, row] = 0

    def reorder(self, rows: torch.Tensor | Sequence[int]) -> None:
        """Copy row rows[i] to row i, for all rows at once, in place. Rows may repeat: a beam may have several successors."""
        rows = torch.as_tensor(rows)
        longest = max(map(self.stored, range(len(self.lengths))))
        where = rows.to(self.layers[0].conv.device)
        for layer in self.layers:
            for tensor in (layer.conv, layer.state):
                tensor.copy_(tensor[where])
            for tensor in layer.keys_and_values():
                tensor[:, :longest] = tensor[where, :longest]
        self.lengths.copy_(self.lengths[rows])
        if self.kv_lengths is not None:
            self.kv_lengths.copy_(self.kv_lengths[:, rows])

    def fork(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        stored = self.stored(source)
        for layer in self.layers:
            layer.conv[target], layer.state[target] = layer.conv[source], layer.state[source]
            for tensor in layer.keys_and_values():
                tensor[target, :stored] = tensor[source, :stored]
        self.lengths[target] = self.lengths[source]
        if self.kv_lengths is not None:
            self.kv_lengths[:, target] = self.kv_lengths[:, source]

    def snapshot(self, row: int, after: Snapshot | None = None) -> Snapshot:
        """A copy of the state of a row. after: an earlier snapshot of this sequence, whose keys and values are shared."""
        start = 0 if after is None else sum(len(segment[0][0]) for segment in after.segments if segment)
        new = [
            [tensor[row, start : self.stored(row)].clone() for tensor in layer.keys_and_values()]
            for layer in self.layers
            if layer.keys is not None
        ]
        states = [[layer.conv[row].clone(), layer.state[row].clone()] for layer in self.layers]
        kv_lengths = None if self.kv_lengths is None else self.kv_lengths[:, row].clone()
        return Snapshot(
            int(self.lengths[row]), states, (*(after.segments if after is not None else ()), new), kv_lengths
        )

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Copy a snapshot into a row. ValueError, before anything changes, if it exceeds max_length."""
        self.reserve(snapshot.length)
        if snapshot.kv_lengths is not None:
            self.allocate(int(snapshot.kv_lengths[self.context_rank]))
        for layer, (conv, state) in zip(self.layers, snapshot.states, strict=True):
            layer.conv[row], layer.state[row] = conv, state
        with_keys = [layer for layer in self.layers if layer.keys is not None]
        start = 0
        for segment in snapshot.segments if with_keys else ():
            stop = start + len(segment[0][0])
            for layer, saved in zip(with_keys, segment, strict=True):
                for tensor, part in zip(layer.keys_and_values(), saved, strict=True):
                    tensor[row, start:stop] = part
            start = stop
        self.lengths[row] = snapshot.length
        if self.kv_lengths is not None and snapshot.kv_lengths is not None:
            self.kv_lengths[:, row] = snapshot.kv_lengths


def keep_last_inputs(x: torch.Tensor, sharding: TokenSharding, rows: Rows, cache: LayerCache) -> None:
    """Keep the last inputs of the convolution, of a sharded chunk: x (batch, tokens of this rank, channels)."""
    last = sharding.gather_last(x, cache.conv.shape[1])
    cache.conv[rows] = torch.cat([cache.conv[rows], last], dim=1)[:, last.shape[1] :]


def share_of_rank(length: int, ranks: int) -> int:
    """The most tokens that one of several context ranks holds of a sequence of `length` tokens, if it came in one chunk."""
    return -(-length // ranks) + 1  # two blocks, each rounded up


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """A copy whose dimension 1 has `length` elements, zeros after those of the tensor."""
    longer = tensor.new_zeros(tensor.shape[0], length, *tensor.shape[2:])
    longer[:, : tensor.shape[1]] = tensor
    return longer
