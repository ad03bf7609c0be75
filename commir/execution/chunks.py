"""The chunks of a rank's tensors, of a plan that takes its steps for one chunk after the other."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from commir.ir.program import Operand
from commir.lowering.blocks import expand, flat, local_sizes, select
from commir.lowering.layouts import Piece

from .state import RankState

Tensor = torch.Tensor


class Chunks:
    """Where the chunks of a plan are in the tensors of a rank. state: the rank, with a plan that has chunks."""

    def __init__(self, state: RankState) -> None:
        self._plan, self._digits = state.plan, state.digits
        self._axis, self._number = self._digits.piece(str(state.plan.schedule.chunked))

    def take(self, operand: Operand, x: Tensor, number: int) -> Tensor:
        """A copy of a chunk of an operand that is at home; the operand itself, if it has no chunks."""
        if self._axis not in operand.axes:
            return x
        sizes = local_sizes(self._digits, operand, self._digits.home(operand))
        return flat(select(x, sizes, self._fixed(number)), sizes, self._fixed(number)).clone()

    def put(self, operand: Operand, whole: Tensor, x: Tensor, number: int) -> None:
        """Write a chunk of an output into the output at home."""
        sizes = local_sizes(self._digits, operand, self._digits.home(operand))
        select(whole, sizes, self._fixed(number)).copy_(expand(x, sizes, self._fixed(number)))

    def copied(self, names: Iterable[str]) -> set[str]:
        """Those of some operands that `take` copies."""
        return {name for name in names if self._axis in self._plan.program.operand(name).axes}

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """{operand: all its chunks} where a rank holds whole chunks, as it does if ranks divide the axis outside of them."""
        operands = {name: self._plan.program.operand(name) for name in parts[0]}
        return {
            name: torch.cat([part[name] for part in parts], operand.axes.index(self._axis))
            if self._axis in operand.axes
            else parts[0][name]
            for name, operand in operands.items()
        }

    def _fixed(self, number: int) -> dict[Piece, int]:
        return {(self._axis, self._number): number}
