"""The state of a rank while it takes the steps of a plan: registers, messages in flight, and counts.

Steps are generators over this state. They yield `Messages` and get a handle; they yield a handle, and continue when its
messages have arrived. The interpreter and the executor take the same steps, and deliver messages differently.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.program import Operand, Program
from commir.lowering.plan import Plan
from commir.lowering.plan_steps import Key, Step, register_key
from commir.lowering.rank_view import RankView
from commir.programs.tiles import Tile, TileInto, derive, tile_into, tile_of

Tensor = torch.Tensor
Run = Generator[Any, Any, Any]  # yields Messages or handles; see the module's docstring


def without_autocast(inputs: Mapping[str, Tensor]) -> AbstractContextManager:
    """Turn autocast off, because a plan computes and sends in the dtypes of its inputs."""
    return torch.autocast(next((x.device.type for x in inputs.values()), "cpu"), enabled=False)


@dataclass(frozen=True)
class Messages:
    """Messages to begin: [(tensor, rank to send it to)] and [(tensor to fill, rank it comes from)]."""

    sends: list[tuple[Tensor, int]]
    receives: list[tuple[Tensor, int]]


@dataclass
class Count:
    """The bytes that a rank has sent and held.

    Attributes:
        sent: in all runs.
        held: now, by a plan that runs.
        peak: the most at a time, in any run.
    """

    sent: int = 0
    held: int = 0
    peak: int = 0

    def hold(self, *tensors: Tensor) -> None:
        self.held += sum(x.nbytes for x in tensors)
        self.peak = max(self.peak, self.held)

    def drop(self, *tensors: Tensor) -> None:
        self.held -= sum(x.nbytes for x in tensors)


@dataclass(frozen=True)
class Kernels:
    """The functions that compute tiles and derived inputs.

    Attributes:
        tile: computes a tile.
        derive: (program, operand, sources) -> a derived input.
        tile_into: computes a tile and combines it into earlier results, or None.
    """

    tile: Tile
    derive: Callable[[Program, str, Sequence[Tensor]], Tensor] = derive
    tile_into: TileInto | None = None


class RankState(RankView):
    """One rank of a plan that runs.

    Args:
        inputs: its blocks at home.
        count: counts what it sends and holds.
        kernels: the functions that compute tiles (None: those of the plan).
        copied: for the plan of a chunk, the inputs that are copies for this chunk, which are counted, and dropped when they
            are no longer needed; None otherwise.

    Attributes:
        registers: {(operand, key): contiguous block}, with the key () for the block that the rank owns.
        in_flight: {message: (handle, tensors that arrive, tensors that leave)}.
        held_before: the bytes that `count` held before.
        saved: None, or a dictionary that receives the blocks of inputs before they are gathered, and those of outputs before
            they are brought home.
        current_step: [(number, step)] of the present step, or [] before and after the steps; chunks share it.
    """

    def __init__(
        self, plan: Plan, rank: int, inputs: Mapping[str, Tensor], count: Count | None = None,
        kernels: Kernels | None = None, copied: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan.digits, rank)
        self.rank, self.plan, self.count = rank, plan, count or Count()
        kernel = self.program, plan.schedule.kernel
        self.kernels = kernels or Kernels(tile_of(*kernel), tile_into=tile_into(*kernel))
        self.registers: dict[tuple[str, Key], Tensor] = {(name, ()): x.contiguous() for name, x in inputs.items()}
        self.saved: dict[str, Tensor] | None = None
        self.current_step: list[tuple[int, Step]] = []
        self.in_flight: dict[tuple[Any, ...], tuple[Any, list[Tensor], list[Tensor]]] = {}
        self._home = {id(x) for name, x in inputs.items() if name not in (copied or ())}
        given = plan.inputs()  # the first that is not wide has the dtype of the results
        self._dtype = inputs[next((x for x in given if not x.is_wide), given[0]).name].dtype
        self.held_before = self.count.held
        self.count.hold(*(x for name, x in inputs.items() if copied is None or name in copied))
        self.count.hold(*(x for (name, _), x in self.registers.items() if x is not inputs[name]))

    @property
    def place(self) -> str:
        """The rank and its present step, for errors."""
        (step,) = [f"steps[{number}], {step!r:.100}" for number, step in self.current_step] or ["outside of its steps"]
        return f"rank {self.rank}, {step}"

    # Registers

    def read(self, names: Sequence[str], key: Key = ()) -> list[Tensor]:
        return [self.registers[name, register_key(key)] for name in names]

    def replace(self, names: Sequence[str], new: Sequence[Tensor]) -> None:
        """Put new blocks, which are counted already, into the registers of operands, and drop the old ones."""
        for name, x in zip(names, new, strict=True):
            self.drop(self.registers[name, ()])
            self.registers[name, ()] = x

    def drop(self, x: Tensor) -> None:
        """Count a block as no longer needed, unless it is an input at home, which the caller keeps."""
        if id(x) not in self._home:
            self.count.drop(x)

    def count_instead(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Count tensors in place of others, where they are not the same."""
        changed = [(x, y) for x, y in zip(old, new, strict=True) if x is not y]
        self.count.hold(*(y for _, y in changed))
        self.count.drop(*(x for x, _ in changed))

    # Dtypes

    def on_wire(self, output: Operand, x: Tensor) -> Tensor:
        """x in the dtype in which partial results of an output travel."""
        return x.to(self.dtype_on_wire(output))

    def dtype_on_wire(self, output: Operand) -> torch.dtype:
        return self._wide if output.is_wide or output.has_wide_partials else self._dtype

    def stored(self, output: Operand, x: Tensor) -> Tensor:
        """x in the dtype in which a caller gets an output."""
        return x.to(self._wide if output.is_wide else self._dtype)

    @property
    def _wide(self) -> torch.dtype:
        return at_least_fp32(self._dtype)

    def new_outputs(self) -> dict[str, Tensor]:
        """{output: an uninitialized block at home}, counted."""
        like = next(iter(self.registers.values()))
        shapes = {x: self.digits.local_shape(x, self.digits.home(x)) for x in self.program.outputs}
        outputs = {x.name: self.stored(x, like.new_empty(shape)) for x, shape in shapes.items()}
        self.count.hold(*outputs.values())
        return outputs

    # Messages

    def begin_exchange(
        self, leaving: Sequence[Tensor], to: int, source: int, into: Sequence[Tensor | None] | None = None
    ) -> Run:
        """Begin to send tensors to one rank, and to receive others like them; return (handle, the tensors that arrive).

        into: contiguous tensors to receive into; None: a new one, which is counted, and which the caller drops.
        """
        arriving = list[Tensor]()
        for x, place in zip(leaving, into or [None] * len(leaving), strict=True):
            arriving.append(torch.empty_like(x, memory_format=torch.contiguous_format) if place is None else place)
            if place is None:
                self.count.hold(arriving[-1])
        self.count.sent += sum(x.nbytes for x in leaving)
        handle = yield Messages([(x, to) for x in leaving], [(x, source) for x in arriving])
        return handle, arriving
