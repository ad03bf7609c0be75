"""What one rank has while it takes the steps of a plan: registers, messages in flight, and what it has counted.

Steps are generators over this state. They yield messages to send and receive, and get a handle; they yield a handle, and
continue when its messages have arrived. The interpreter and the executor take the same steps, and deliver messages
differently.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from commir.ir.checks import shown
from commir.ir.program import Operand, Program
from commir.lowering.blocks import local_sizes
from commir.lowering.loops import loops_of, travelling
from commir.lowering.plan import Plan
from commir.lowering.steps import Key, Step, register_key
from commir.programs.tiles import Tile, TileInto, derive, tile_into, tile_of
from sparsefusion.collectives.counted import Counter
from sparsefusion.collectives.wire_formats import at_least_fp32

Tensor = torch.Tensor
Run = Generator[Any, Any, Any]  # yields Messages or handles; see the module's docstring


def without_autocast(inputs: Mapping[str, Tensor]) -> AbstractContextManager:
    """Autocast is off inside, because a plan computes and sends in the dtypes of its inputs."""
    return torch.autocast(next((x.device.type for x in inputs.values()), "cpu"), enabled=False)


@dataclass(frozen=True)
class Messages:
    """Messages to begin: [(tensor, rank to send it to)] and [(tensor to fill, rank it comes from)]."""

    sends: list[tuple[Tensor, int]]
    receives: list[tuple[Tensor, int]]


@dataclass
class Count:
    """What a rank has sent and held, in bytes. held: now, by a plan that runs. peak: the most at a time, of all runs."""

    sent: int = 0
    held: int = 0
    peak: int = 0

    def hold(self, *tensors: Tensor) -> None:
        """Count new tensors."""
        self.held += sum(x.nbytes for x in tensors)
        self.peak = max(self.peak, self.held)

    def drop(self, *tensors: Tensor) -> None:
        """Count tensors that are no longer needed."""
        self.held -= sum(x.nbytes for x in tensors)


def check_counts(count: Any, counter: Any) -> None:
    """ValueError unless each is None, or else a Count and a Counter."""
    for name, value, kind in (("count", count, Count), ("counter", counter, Counter)):
        if not isinstance(value, kind | None):
            raise ValueError(f"{name}={shown(value)}: it must be a {kind.__name__}, or None")


@dataclass(frozen=True)
class Kernels:
    """What computes tiles and derived inputs. derive: (program, operand, sources) -> the derived input.

    tile_into: None, or what computes a tile and combines it into the results of others.
    """

    tile: Tile
    derive: Callable[[Program, str, Sequence[Tensor]], Tensor] = derive
    tile_into: TileInto | None = None


class RankState:
    """One rank of a plan. inputs: its blocks at home. count: what it sends and holds. kernels: None are the plan's.

    copied: None, or, for the plan of a chunk, the inputs of which the rank has copies for this chunk, which are counted, and
    dropped when they are no longer needed. travels: {operand: the loops along which its blocks travel}. sizes:
    {operand: its local digits}. registers: {(operand, key): contiguous block}, with the key () for the block that the rank
    owns.
    in_flight: {message: (handle, tensors that arrive, tensors that leave)}. held_before: what `count` held before. saved: if
    it is a dictionary, the blocks of inputs before they are gathered, and those of outputs before they are brought home.
    taking: [(number, step)] of the step that the rank takes, or [] before and after its steps; chunks share it.
    """

    def __init__(
        self, plan: Plan, rank: int, inputs: Mapping[str, Tensor], count: Count | None = None,
        kernels: Kernels | None = None, copied: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.plan, self.digits, self.program = rank, plan, plan.digits, plan.program
        self.coordinates = plan.mesh.coordinates(rank)
        self.count = count or Count()
        self.loops, self.parallel = loops_of(self.digits), self.digits.parallel()
        self.travels = {each.name: travelling(self.digits, self.loops, each) for each in self.program.operands}
        self.sizes = {
            each.name: local_sizes(self.digits, each, self.digits.needed(each)) for each in self.program.operands
        }
        self.kernels = kernels or Kernels(
            tile_of(self.program, plan.schedule.kernel), tile_into=tile_into(self.program, plan.schedule.kernel)
        )
        self.registers: dict[tuple[str, Key], Tensor] = {(name, ()): x.contiguous() for name, x in inputs.items()}
        self.saved: dict[str, Tensor] | None = None
        self.taking: list[tuple[int, Step]] = []
        self.in_flight: dict[tuple[Any, ...], tuple[Any, list[Tensor], list[Tensor]]] = {}
        self._home = {id(x) for name, x in inputs.items() if name not in (copied or ())}
        self._dtype = inputs[_first_narrow(plan).name].dtype
        self.held_before = self.count.held
        self.count.hold(*(x for name, x in inputs.items() if copied is None or name in copied))
        self.count.hold(*(x for (name, _), x in self.registers.items() if x is not inputs[name]))

    @property
    def place(self) -> str:
        """The rank and the step that it takes, for errors."""
        (step,) = [f"steps[{number}], {step!r:.100}" for number, step in self.taking] or ["outside of its steps"]
        return f"rank {self.rank}, {step}"

    # Registers

    def read(self, names: Sequence[str], key: Key = ()) -> list[Tensor]:
        """The blocks of operands with this key."""
        return [self.registers[name, register_key(key)] for name in names]

    def replace(self, names: Sequence[str], new: Sequence[Tensor]) -> None:
        """Put new blocks, which are counted already, into the registers of operands, and drop what was there."""
        for name, x in zip(names, new, strict=True):
            self.drop(self.registers[name, ()])
            self.registers[name, ()] = x

    def drop(self, x: Tensor) -> None:
        """Count a block as no longer needed, unless it is an input at home, which its caller keeps."""
        if id(x) not in self._home:
            self.count.drop(x)

    def count_instead(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Count tensors that take the place of others, where they are not the same."""
        changed = [(x, y) for x, y in zip(old, new, strict=True) if x is not y]
        self.count.hold(*(y for _, y in changed))
        self.count.drop(*(x for x, _ in changed))

    def outputs(self, result: int) -> list[Operand]:
        """The outputs of a result of the program."""
        return [self.program.operand(name) for name in self.program.results[result].outputs]

    # Dtypes

    def on_wire(self, output: Operand, x: Tensor) -> Tensor:
        """x in the dtype in which partial results of an output travel."""
        return x.to(self.dtype_on_wire(output))

    def dtype_on_wire(self, output: Operand) -> torch.dtype:
        """The dtype in which partial results of an output travel."""
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
        outputs = {
            each.name: self.stored(each, like.new_empty(self.digits.local_shape(each, self.digits.home(each))))
            for each in self.program.outputs
        }
        self.count.hold(*outputs.values())
        return outputs

    # Messages

    def size(self, axis: str) -> int:
        """The number of ranks along a mesh axis."""
        return self.plan.mesh.size(axis)

    def peer(self, axis: str, distance: int) -> int:
        """The rank `distance` further along a mesh axis."""
        there = (self.coordinates[axis] + distance) % self.size(axis)
        return self.plan.mesh.rank_at({**self.coordinates, axis: there})

    def begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Messages:
        """Messages of contiguous tensors to begin, counted."""
        self.count.sent += sum(x.nbytes for x, _ in sends)
        return Messages(sends, receives)

    def begin_exchange(
        self, axis: str, leaving: Sequence[Tensor], distance: int, into: Sequence[Tensor | None] | None = None
    ) -> Run:
        """Begin to send tensors `distance` further along an axis; returns (handle, those of the rank as far before).

        into: contiguous tensors to receive into; None: a new one, which is counted, and which the caller drops.
        """
        arriving, new = [], []
        for x, place in zip(leaving, into or [None] * len(leaving), strict=True):
            if place is None:
                place = torch.empty_like(x, memory_format=torch.contiguous_format)
                new.append(place)
            arriving.append(place)
        self.count.hold(*new)
        to, source = self.peer(axis, distance), self.peer(axis, -distance)
        handle = yield self.begin([(x, to) for x in leaving], [(x, source) for x in arriving])
        return handle, arriving


def _first_narrow(plan: Plan) -> Operand:
    """The first input that a caller gives in the dtype of the results, or, if all are kept in at least fp32, the first."""
    given = plan.inputs()
    return next((each for each in given if not each.is_wide), given[0])
