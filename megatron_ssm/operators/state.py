"""The state of one operator between two calls of the model, for any operator: tensors with one row per sequence.

Tensors are of two kinds. Fixed ones have one size whatever the length of a sequence (the last inputs of a convolution, a
recurrent state). Per-token ones have an entry for each token (keys, values). Everything that is done to states without
computing (copies, snapshots, other rows) is done alike for every operator; see `Cache`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from megatron_ssm.parallel.recomputation import Recomputation

from .call import EVERY_ROW, Call, Rows


class Pending(Protocol):
    """Tokens that one or several operators have read, and that may be taken back; see `Cache.accept`."""

    def check(self, cache: Any) -> None:
        """RuntimeError unless `advance` is possible."""

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        """Advance the states by the first counts[i] >= 1 tokens of row i of the call."""


@dataclass
class State:
    """The tensors of one operator, with a row for each sequence.

    fixed: {name: (rows, ...)}. per_token: {name: (rows, capacity, ...)}; index p holds position p of the sequence, where
    padding is not counted. If context ranks share the sequences, a rank has the entries of some positions only, in the order
    in which it got them. pending: the tokens of a speculative call until they are accepted.
    """

    fixed: dict[str, torch.Tensor] = field(default_factory=dict)
    per_token: dict[str, torch.Tensor] = field(default_factory=dict)
    pending: Pending | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        return self.fixed[name] if name in self.fixed else self.per_token[name]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*self.fixed.values(), *self.per_token.values()]

    def update(self, rows: Rows, **new: torch.Tensor) -> None:
        """Overwrite some rows of fixed tensors in place; nothing to do for those that were computed in place."""
        for name, tensor in new.items():
            held = self.fixed[name]
            if held[rows].data_ptr() != tensor.data_ptr():
                held[rows] = tensor.detach()

    def append(
        self, positions: torch.Tensor, longest: int, rows: Rows = EVERY_ROW, padded: bool = True, **new: torch.Tensor
    ) -> list[torch.Tensor]:
        """Store new entries (batch, new, ...) of some rows at `positions` (batch, new).

        padded: negative positions are padding, which is not stored. False: there are none, so that the host need not wait
        for the GPU to find out. Returns the entries of these rows at positions 0 to longest - 1, of each tensor.
        """
        first = next(iter(self.per_token.values()))
        where = torch.arange(len(first), device=positions.device)[rows].unsqueeze(1).expand_as(positions)
        real = positions >= 0 if padded else None
        if real is not None and not real.all():
            where, positions = where[real], positions[real]
            new = {name: tensor[real] for name, tensor in new.items()}
        for name, tensor in new.items():
            held = self.per_token[name]
            held[where, positions] = tensor.detach().to(held.dtype)  # under autocast it may be narrower
        return [self.per_token[name][rows, :longest] for name in new]


@dataclass(frozen=True)
class Replay:
    """The tokens that an operator has read speculatively: it reads those that are kept once more.

    Rollback so needs no states after each token, and sends nothing: mix is the operator's, called with `projected`, what it
    was called with; the sums over ranks that it made are in `sums`, and are not made again.
    """

    mix: Callable[[Any, Call, State], Any]
    projected: Any
    call: Call
    state: State
    recomputation: Recomputation
    sums: list[torch.Tensor]

    def check(self, cache: Any) -> None:
        """See `Pending`: it is always possible."""

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        """See `Pending`. Rows of which as many tokens are kept are read together."""
        rows = torch.arange(cache.rows_held)[self.call.rows]
        for count in sorted(set(counts)):
            chosen = torch.tensor([index for index, each in enumerate(counts) if each == count])
            kept = _first_tokens(chosen, count)
            held = {name: tensor[rows[chosen]] for name, tensor in self.state.fixed.items()}
            scratch = State(held, {name: tensor[rows[chosen]] for name, tensor in self.state.per_token.items()})
            call = replace(self.call, rows=EVERY_ROW, positions=self._positions(chosen, count))
            with self.recomputation.replaying([kept(each) for each in self.sums]):
                self.mix(tree_map(kept, self.projected), call, scratch)
            for name, tensor in scratch.fixed.items():
                self.state.fixed[name][rows[chosen]] = tensor

    def _positions(self, chosen: torch.Tensor, count: int) -> Any:
        where = self.call.positions
        if where is None:
            return None
        mask = where.mask
        if mask is not None:
            mask = (mask if len(mask) == 1 else mask[chosen.to(mask.device)])[:, :, :count]
        return replace(where, new=where.new[chosen.to(where.new.device), :count], mask=mask)


def _first_tokens(rows: torch.Tensor, count: int) -> Callable[[Any], Any]:
    """A function that takes the first `count` tokens of some rows of a tensor (batch, seq, ...)."""
    return lambda t: t[rows.to(t.device), :count] if isinstance(t, torch.Tensor) else t


def read_speculatively(
    mix: Callable[[Any, Call, State], Any], projected: Any, call: Call, state: State, recomputation: Recomputation
) -> Any:
    """mix(projected, call, state) of an operator for tokens that may be taken back: its fixed tensors stay as they are."""
    before = {name: tensor[call.rows].clone() for name, tensor in state.fixed.items()}
    sums: list[torch.Tensor] = []
    with recomputation.recording(sums):
        result = mix(projected, call, state)
    state.update(call.rows, **before)
    state.pending = Replay(mix, projected, call, state, recomputation, sums)
    return result
