"""What sequences leave behind, this rank's channels and heads only: convolution inputs, recurrent state, keys and values.

A `Cache` has one row (a slot) per sequence, and each row its own length, so that sequences may join and leave between
two calls: `select` names the rows that a call continues, `reset` frees a row, and a `Snapshot` is one row's state, to be
restored into any row, any number of times.
"""

from dataclasses import dataclass, field

import torch

ALL = slice(None)


@dataclass(frozen=True)
class BatchInfo:
    """What one call of the model tells every layer.

    mask: (batch, seq, 1), 0 where a row is padding (None: nowhere). decoding: the one token of each row continues a
    sequence (see `Mamba2Mixer`). rows: which rows of the cache are continued (a slice: consecutive ones, without a copy).
    positions: of models with attention (`attention.Positions`). begins: all rows are at their beginning.
    """

    mask: torch.Tensor | None = None
    decoding: bool = False
    rows: slice | torch.Tensor = field(default_factory=lambda: ALL)
    positions: object = None
    begins: bool = False


@dataclass
class LayerCache:
    """One layer's state; every tensor has one row per sequence.

    conv: (rows, K-1, this rank's convolved channels), the model's dtype: the convolution's inputs before the next token.
    state: at least fp32: (rows, N, channels) for Mamba-1, (rows, heads, N, head_dim) for Mamba-2.
    keys, values: (rows, capacity, key/value heads, head_dim), of layers that use the shared block; position p of a
    sequence, padding not counted, at index p.
    """

    conv: torch.Tensor
    state: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def read(self, rows=ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """conv and state of some rows."""
        return self.conv[rows], self.state[rows]

    def update(self, conv: torch.Tensor, state: torch.Tensor, rows=ALL) -> None:
        """Overwrite some rows in place: a cache tensor never moves. What was computed in place is there already."""
        for held, new in ((self.conv, conv), (self.state, state)):
            if held[rows].data_ptr() != new.data_ptr():
                held[rows] = new.detach()

    def append(self, keys, values, positions, longest, rows=ALL, padded=True) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values (batch, new, heads, head_dim) of some rows at `positions` (batch, new).

        padded: a negative position is padding and not stored (False: there is none, and the GPU is not waited for).
        Returns both from position 0 to `longest`: what the rows have.
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
    """One sequence's state on this rank after `length` tokens; `segments`: its keys and values, piece by piece.

    states: [conv, state] of each layer. A segment: [keys, values] (new, heads, head_dim) of each layer that has them.
    Segments are shared by the snapshots of longer prefixes and must not be written to.
    """

    length: int
    states: list[list[torch.Tensor]]
    segments: tuple[list[list[torch.Tensor]], ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        """Everything it holds."""
        pieces = [layer for segment in self.segments for layer in segment]
        return [tensor for layer in [*self.states, *pieces] for tensor in layer]


@dataclass
class Cache:
    """The state of sequences between two calls of the model; made by `model.new_cache`.

    lengths: (rows,) int64 on the CPU: the tokens each row has seen, padding not counted. max_length: the most that a
    model with attention may store (None: room is made as needed).
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
        """How many tokens a row has room for (None: any number, there is no attention)."""
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
        """Count a call's tokens; mask: (batch, tokens, 1), 0 where a row is padding."""
        self.lengths[self.rows] += tokens if mask is None else mask.sum((1, 2)).long().cpu()

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row; what is stored moves if there was less. ValueError beyond max_length."""
        if self.capacity is None or length <= self.capacity:
            return
        if self.max_length is not None:
            raise ValueError(f"a sequence of {length} tokens does not fit into a cache of max_length={self.max_length}")
        grown = [layer for layer in self.layers if layer.keys is not None]
        longer = [[_longer(t, length) for t in (layer.keys, layer.values)] for layer in grown]  # all of them, or none
        for layer, (keys, values) in zip(grown, longer, strict=True):
            layer.keys, layer.values = keys, values

    def reset(self, row: int) -> None:
        """Free a row: the start of a sequence."""
        for layer in self.layers:
            layer.conv[row] = 0
            layer.state[row] = 0
        self.lengths[row] = 0

    def reorder(self, rows) -> None:
        """Row i becomes what row rows[i] was (indices may repeat): how beams fork and die. In place."""
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
        """Row `target` becomes a copy of row `source`."""
        length = int(self.lengths[source])
        for layer in self.layers:
            layer.conv[target], layer.state[target] = layer.conv[source], layer.state[source]
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[target, :length] = tensor[source, :length]
        self.lengths[target] = length

    def snapshot(self, row: int, after: Snapshot | None = None) -> Snapshot:
        """A copy of a row's state. after: an earlier snapshot of the same sequence, whose keys and values are shared."""
        length, start = int(self.lengths[row]), after.length if after is not None else 0
        new = [
            [layer.keys[row, start:length].clone(), layer.values[row, start:length].clone()]
            for layer in self.layers
            if layer.keys is not None
        ]
        states = [[layer.conv[row].clone(), layer.state[row].clone()] for layer in self.layers]
        return Snapshot(length, states, (*(after.segments if after is not None else ()), new))

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a row where the snapshot was taken."""
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
