"""The state of one operator between two calls of the model: tensors with one row per sequence.

Fixed tensors have the same size for sequences of any length (the last inputs of a convolution, a recurrent state).
Per-token tensors have an entry for each token (keys, values). Copies, snapshots and selections of rows work alike for the
states of all operators; see `Cache`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from megatron_ssm.parallel.recomputation import Recomputation

from .call import EVERY_ROW, Call, Rows


class Pending(Protocol):
    """Speculative tokens that operators have read, and some of which may be rejected; see `Cache.accept`."""

    def check(self, cache: Any) -> None:
        """Raise RuntimeError if `advance` is impossible."""

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        """Advance the states by the first counts[i] >= 1 tokens of row i of the call."""


@dataclass
class State:
    """The tensors of one operator, with a row for each sequence.

    Attributes:
        fixed: {name: (rows, ...)}.
        per_token: {name: (rows, capacity, ...)}. Entry p belongs to position p of the sequence, where padding is not
            counted. If context ranks split the sequences, a rank has only its entries, in the order of addition.
        pending: The tokens of a speculative call until some of them are accepted.
    """

    fixed: dict[str, torch.Tensor] = field(default_factory=dict)
    per_token: dict[str, torch.Tensor] = field(default_factory=dict)
    pending: Pending | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fixed[name] if name in self.fixed else self.per_token[name]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.fixed.values(), *self.per_token.values()]

    def update(self, rows: Rows, **new: torch.Tensor) -> None:
        """Overwrite some rows of fixed tensors in place, unless the kernel has already updated them."""
        for name, tensor in new.items():
            old = self.fixed[name]
            if old[rows].data_ptr() != tensor.data_ptr():
                old[rows] = tensor.detach()

    def append(
        self, positions: torch.Tensor, longest: int, rows: Rows = EVERY_ROW, padded: bool = True, **new: torch.Tensor
    ) -> list[torch.Tensor]:
        """Store new entries (batch, new, ...) of some rows at `positions` (batch, new).

        Args:
            positions: The positions of the entries. Negative ones are padding, which is not stored.
            longest: The number of entries of each row to return.
            rows: The rows of the state.
            padded: False if there is no padding; then the host need not wait for the GPU to find out.
            new: {name of a per-token tensor: its new entries}.

        Returns:
            Positions 0 to longest - 1 of these rows, of each tensor.
        """
        first = next(iter(self.per_token.values()))
        row_indices = torch.arange(len(first), device=positions.device)[rows].unsqueeze(1).expand_as(positions)
        real = positions >= 0 if padded else None
        if real is not None and not real.all():
            row_indices, positions = row_indices[real], positions[real]
            new = {name: tensor[real] for name, tensor in new.items()}
        for name, tensor in new.items():
            entries = self.per_token[name]
            entries[row_indices, positions] = tensor.detach().to(entries.dtype)  # under autocast it may be narrower
        return [self.per_token[name][rows, :longest] for name in new]


@dataclass(frozen=True)
class Replay:
    """The speculative tokens of one operator. To accept some of them, the operator reads these once more.

    So no state after each token is stored, and no message is sent again: `mix` is called with the same `projected`, and
    `sums` has the results of the messages that it sent.
    """

    mix: Callable[[Any, Call, State], Any]
    projected: Any
    call: Call
    state: State
    recomputation: Recomputation
    sums: list[torch.Tensor]

    def check(self, cache: Any) -> None:
        """See `Pending`; always possible."""

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        """See `Pending`. Rows with equal counts are read together."""
        rows = torch.arange(cache.rows_held)[self.call.rows]
        for count in sorted(set(counts)):
            chosen = torch.tensor([row for row, accepted in enumerate(counts) if accepted == count])
            first_tokens = _first_tokens(chosen, count)
            fixed = {name: tensor[rows[chosen]] for name, tensor in self.state.fixed.items()}
            scratch = State(fixed, {name: tensor[rows[chosen]] for name, tensor in self.state.per_token.items()})
            call = replace(self.call, rows=EVERY_ROW, positions=self._positions(chosen, count))
            with self.recomputation.replaying([first_tokens(total) for total in self.sums]):
                self.mix(tree_map(first_tokens, self.projected), call, scratch)
            for name, tensor in scratch.fixed.items():
                self.state.fixed[name][rows[chosen]] = tensor

    def _positions(self, chosen: torch.Tensor, count: int) -> Any:
        positions = self.call.positions
        if positions is None:
            return None
        mask = positions.mask
        if mask is not None:
            mask = (mask if len(mask) == 1 else mask[chosen.to(mask.device)])[:, :, :count]
        return replace(positions, new=positions.new[chosen.to(positions.new.device), :count], mask=mask)


def _first_tokens(rows: torch.Tensor, count: int) -> Callable[[Any], Any]:
    """A function that selects the first `count` tokens of some rows of a tensor (batch, seq, ...)."""
    return lambda t: t[rows.to(t.device), :count] if isinstance(t, torch.Tensor) else t


def read_speculatively(
    mix: Callable[[Any, Call, State], Any], projected: Any, call: Call, state: State, recomputation: Recomputation
) -> Any:
    """mix(projected, call, state) for tokens that may be rejected: the fixed tensors of the state do not change."""
    before = {name: tensor[call.rows].clone() for name, tensor in state.fixed.items()}
    sums: list[torch.Tensor] = []
    with recomputation.recording(sums):
        result = mix(projected, call, state)
    state.update(call.rows, **before)
    state.pending = Replay(mix, projected, call, state, recomputation, sums)
    return result
