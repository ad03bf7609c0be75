"""The cache of generation: convolution inputs, recurrent states, keys and values, for this rank's channels and heads.

A `Cache` has one row per sequence, and each row has its own length, so that sequences can join and leave between two
calls: `select` chooses the rows that a call continues, `reset` frees a row, and a `Snapshot` is the state of one row,
which can be restored into any row, any number of times.
"""

from dataclasses import dataclass, field

import torch

ALL = slice(None)


@dataclass(frozen=True)
class BatchInfo:
    """What every layer must know about the tokens of one call of the model.

    mask: (batch, seq, 1), 0 at padding; None: there is none. decoding: there is one token per row, which continues a
    sequence (see `Mamba2Mixer`). rows: which rows of the cache are continued; a slice selects consecutive ones without
    a copy. positions: for models with attention, `shared_attention.Positions`. begins: all rows are at their beginning.
    """

    mask: torch.Tensor | None = None
    decoding: bool = False
    rows: slice | torch.Tensor = field(default_factory=lambda: ALL)
    positions: object = None
    begins: bool = False


@dataclass
class LayerCache:
    """The state of one layer; every tensor has one row per sequence.

    conv: (rows, K-1, this rank's channels), in the model's dtype: the last inputs of the convolution. state: at least
    fp32, (rows, N, channels) for Mamba-1, (rows, heads, N, head_dim) for Mamba-2. keys, values: (rows, capacity,
    key/value heads, head_dim), in layers that use the shared attention block; index p holds position p of the sequence,
    without padding.
    """

    conv: torch.Tensor
    state: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def read(self, rows=ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv and state of some rows."""
        return self.conv[rows], self.state[rows]

    def update(self, conv: torch.Tensor, state: torch.Tensor, rows=ALL) -> None:
        """Overwrite some rows in place, unless they were computed in place: the tensors of a cache never move."""
        for held, new in ((self.conv, conv), (self.state, state)):
            if held[rows].data_ptr() != new.data_ptr():
                held[rows] = new.detach()

    def append(self, keys, values, positions, longest, rows=ALL, padded=True) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (batch, new, heads, head_dim) of some rows at `positions` (batch, new).

        padded: negative positions are padding, and are not stored; False: there are none, so the host need not wait for
        the GPU. Returns all keys and values of these rows, from position 0 to `longest`.
        """
        where = torch.arange(len(self.conv), device=positions.device)[rows].unsqueeze(1).expand_as(positions)
        if padded and not (real := positions >= 0).all():
            where, positions, keys, values = where[real], positions[real], keys[real], values[real]
        self.keys[where, positions] = keys.detach()
        self.values[where, positions] = values.detach()
        return self.keys[rows, :longest], self.values[rows, :longest]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of this layer."""
        return [t for t in (self.conv, self.state, self.keys, self.values) if t is not None]


@dataclass(frozen=True)
class Snapshot:
    """The state of one sequence on this rank after `length` tokens.

    states: [conv, state] of each layer. segments: its keys and values, piece by piece; a segment is [keys, values]
    (new, heads, head_dim) of each layer that has them. Snapshots of longer prefixes share segments, which must not be
    overwritten.
    """

    length: int
    states: list[list[torch.Tensor]]
    segments: tuple[list[list[torch.Tensor]], ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the snapshot."""
        pieces = [layer for segment in self.segments for layer in segment]
        return [tensor for layer in [*self.states, *pieces] for tensor in layer]


@dataclass
class Cache:
    """The state of sequences between two calls of the model; made by `model.new_cache`.

    lengths: (rows,) int64 on the CPU: how many tokens each row has seen, without padding. max_length: how many tokens a
    model with attention can store per row; None: the cache grows as needed.
    """

    layers: list[LayerCache]
    lengths: torch.Tensor
    max_length: int | None = None
    rows: slice | torch.Tensor = field(default_factory=lambda: ALL)

    @property
    def nbytes(self) -> int:
        """Bytes this rank holds."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    @property
    def batch(self) -> int:
        """How many sequences a call continues."""
        return len(self.lengths[self.rows])

    @property
    def capacity(self) -> int | None:
        """How many tokens a row can hold; None: any number, because the model has no attention."""
        return next((layer.keys.shape[1] for layer in self.layers if layer.keys is not None), None)

    def select(self, rows) -> "Cache":
        """A view of some rows (distinct indices), to be continued by one call; the storage is shared."""
        rows = [int(row) for row in rows]
        if self.rows != ALL:
            raise ValueError("rows are selected from a whole cache, not from a selection")
        if not rows or len({*rows}) < len(rows) or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"rows {rows} are not one or more distinct rows of a cache of {len(self.lengths)}")
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        where = slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows)
        return Cache(self.layers, self.lengths, self.max_length, where)

    def advance(self, tokens: int, mask=None) -> None:
        """Count the tokens of a call. mask: (batch, tokens, 1), 0 at padding."""
        self.lengths[self.rows] += tokens if mask is None else mask.sum((1, 2)).long().cpu()

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row; this moves the keys and values. ValueError: it exceeds max_length."""
        if self.capacity is None or length <= self.capacity:
            return
        if self.max_length is not None:
            raise ValueError(f"a sequence of {length} tokens does not fit into a cache of max_length={self.max_length}")
        grown = [layer for layer in self.layers if layer.keys is not None]
        longer = [[_longer(t, length) for t in (layer.keys, layer.values)] for layer in grown]  # all of them, or none
        for layer, (keys, values) in zip(grown, longer, strict=True):
            layer.keys, layer.values = keys, values

    def reset(self, row: int) -> None:
        """Free a row, so that a new sequence can start in it."""
        for layer in self.layers:
            layer.conv[row] = 0
            layer.state[row] = 0
        self.lengths[row] = 0

    def reorder(self, rows) -> None:
        """Copy row rows[i] to row i, for all rows at once, in place. Indices may repeat, as when beams fork."""
        rows = torch.as_tensor(rows)
        longest = int(self.lengths.max())
        where = rows.to(self.layers[0].conv.device)
        for layer in self.layers:
            for tensor in (layer.conv, layer.state):
                tensor.copy_(tensor[where])
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[:, :longest] = tensor[where, :longest]
        self.lengths.copy_(self.lengths[rows])

    def fork(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        length = int(self.lengths[source])
        for layer in self.layers:
            layer.conv[target], layer.state[target] = layer.conv[source], layer.state[source]
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[target, :length] = tensor[source, :length]
        self.lengths[target] = length

    def snapshot(self, row: int, after: Snapshot | None = None) -> Snapshot:
        """Copy the state of a row. after: an earlier snapshot of the same sequence, whose keys and values are shared."""
        length, start = int(self.lengths[row]), after.length if after is not None else 0
        new = [
            [layer.keys[row, start:length].clone(), layer.values[row, start:length].clone()]
            for layer in self.layers
            if layer.keys is not None
        ]
        states = [[layer.conv[row].clone(), layer.state[row].clone()] for layer in self.layers]
        return Snapshot(length, states, (*(after.segments if after is not None else ()), new))

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Write a snapshot into a row."""
        self.reserve(snapshot.length)
        for layer, (conv, state) in zip(self.layers, snapshot.states, strict=True):
            layer.conv[row], layer.state[row] = conv, state
        with_keys = [layer for layer in self.layers if layer.keys is not None]
        start = 0
        for segment in snapshot.segments if with_keys else ():
            stop = start + len(segment[0][0])
            for layer, (keys, values) in zip(with_keys, segment, strict=True):
                layer.keys[row, start:stop], layer.values[row, start:stop] = keys, values
            start = stop
        self.lengths[row] = snapshot.length


def _longer(tensor, length):
    """A copy with room for `length` positions (dimension 1)."""
    longer = tensor.new_zeros(tensor.shape[0], length, *tensor.shape[2:])
    longer[:, : tensor.shape[1]] = tensor
    return longer
