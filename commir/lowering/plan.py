"""A plan: the steps of a schedule, as data that is equal on all ranks, can be saved, and runs in any process."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.mesh import Mesh
from commir.ir.program import ITEMSIZES, Operand, Program
from commir.scheduling.known_schedules import known_as
from commir.scheduling.loop_nest import Digit, LoopNest

from .accounting import Account, account
from .explain import lines_of_messages
from .operand_layouts import Digits, Piece, digits_of, digits_of_chunk
from .plan_steps import Compute, Step
from .plan_text import canonical, content, digest, parse
from .scan_messages import takes_slices
from .source import source_of_chunks, source_of_steps
from .tensor_blocks import block, chosen, positions, put_block, reordered
from .timeline import check_tile, seconds

Tensors = Mapping[str, torch.Tensor]
BY_CALLER = "the caller made this schedule"
FROM_JSON = "not recorded, as the plan was read from JSON"
CHANGED = "not recorded, as sizes, options, speeds or times were changed after the choice"


@dataclass(frozen=True)
class Plan:
    """The steps of every rank of a mesh: the result of `Schedule.lower`.

    Attributes:
        schedule: the program, the mesh, and which rank computes what.
        steps: the same for every rank, because peers are relative. If the schedule has chunks, a rank takes the steps for
            each of them, one after the other.
        tile_seconds: the measured time of a tile (0: only messages are counted).
        overlap: the share of a tile or message that the other hides; see `search`.
        reason: why `search` has chosen this plan.
    """

    schedule: LoopNest
    steps: tuple[Step, ...]
    tile_seconds: float = field(default=0.0, compare=False)
    overlap: float = field(default=1.0, compare=False)
    reason: str = field(default=BY_CALLER, compare=False)
    _positions: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _elements: dict[object, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunks: dict[int, "Plan"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def program(self) -> Program:
        return self.schedule.program

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    @cached_property
    def digits(self) -> Digits:
        """The digits of every loop, between all cuts."""
        return digits_of(self.schedule)

    @cached_property
    def of_one_chunk(self) -> "Plan":
        """The plan of one chunk by itself; this plan if it has no chunks."""
        return replace(self, schedule=digits_of_chunk(self.schedule).nest) if self.schedule.chunked else self

    def of_chunk(self, number: int) -> "Plan":
        """The plan of chunk `number` by itself, with its elements of the whole tensor; remembered."""
        if number not in self._chunks:
            axis, digit = self.digits.piece(str(self.schedule.chunked))
            chunk = self._chunks[number] = replace(self, schedule=self.of_one_chunk.schedule)
            chunk._positions[axis] = self.elements(axis, {(axis, digit): number})
        return self._chunks[number]

    @cached_property
    def hash(self) -> str:
        """A digest of program, mesh, schedule and steps. Equal plans have equal hashes in every process."""
        return digest(self.schedule, self.steps)

    @cached_property
    def account(self) -> Account:
        """The bytes that the steps send and hold."""
        if self.schedule.chunked is None:
            return account(self.digits, self.steps)
        axis = self.schedule.digit(self.schedule.chunked).axis
        owned = [operand.name for operand in self.inputs() if axis in operand.axes]
        kept = sum(
            math.prod(self.digits.local_shape(x, self.digits.home(x))) * self.program.itemsize(x)
            for x in (*self.inputs(), *self.program.outputs)
            if axis in x.axes
        )
        return account(self.of_one_chunk.digits, self.steps, owned).in_chunks(self.schedule.chunks, kept)

    @property
    def bytes_per_rank(self) -> int:
        """The bytes that a rank sends, with elements of the program's dtype.

        In a `Swap` some ranks have nothing to send; with several of them, every rank may send less than this.
        """
        return self.account.sent

    @property
    def memory(self) -> int:
        """The most bytes that a rank holds: its inputs, blocks on their way with the copies that are sent, and results.

        These are the bytes of the plan's own steps, without the temporaries of a kernel and the copy of an input that is not
        contiguous. attention2d, on which `execute` runs grids, holds more for several sequences.
        """
        return self.account.peak

    @cached_property
    def seconds(self) -> float:
        """The predicted time, from the speeds of the mesh, `tile_seconds` and `overlap`."""
        sent = self.of_one_chunk.account.by_step
        return self.schedule.chunks * seconds(self.mesh, self.steps, sent, self.tile_seconds, self.overlap)

    def positions(self, axis: str) -> torch.Tensor:
        """(size,) int64: the elements of the whole tensor along an axis, in the order in which ranks hold them."""
        if axis not in self._positions:
            self._positions[axis] = positions(self.digits, axis)
        return self._positions[axis]

    def elements(self, axis: str, fixed: Mapping[Piece, int]) -> torch.Tensor:
        """The elements of the whole tensor along an axis that lie in these blocks of some digits; remembered."""
        key = axis, tuple(sorted(fixed.items()))
        if key not in self._elements:
            self._elements[key] = chosen(self.positions(axis), self.digits, axis, fixed)
        return self._elements[key]

    @property
    def messages(self) -> int:
        """The number of messages that a rank sends."""
        return self.account.messages

    def inputs(self) -> tuple[Operand, ...]:
        """The inputs that a caller gives; the program derives the others."""
        return self.program.given

    def explain(self) -> str:
        """Describe which rank computes what, the messages along each mesh axis, and why the plan was chosen."""
        name = known_as(self.schedule)
        time = f"{self.seconds:.3g} s by prediction; " if self.mesh.speeds else ""
        sends = f"a rank sends {self.bytes_per_rank:,} bytes in {self.messages} messages and holds {self.memory:,}"
        sent = self.of_one_chunk.account.by_step
        messages = lines_of_messages(self.schedule, self.steps, sent, self.schedule.chunks)
        head = str(self.schedule) + f" ({name})" * bool(name)
        return "\n".join([head, time + sends, *messages, f"chosen: {self.reason}"])

    def source(self, rank: int = 0) -> str:
        """Return what a rank does as a Python program: blocks and their shapes, messages and their peers, and tiles.

        It has all steps in their order, for the program's sizes and dtype; `commir.lowering.source` lists its words. Plans
        that are grids of `attention2d` send the same messages, but `execute` runs them on `attention2d`.

        Raises:
            ValueError: the mesh has no such rank.
        """
        coordinates = self.mesh.coordinates(rank)
        where = ", ".join(f"{axis} {coordinates[axis]}" for axis in self.mesh.names)
        name = known_as(self.schedule)
        head = f"# {self.schedule}" + f" ({name})" * bool(name) + f"\n# rank {rank} of {self.mesh.ranks}: {where}"
        if self.schedule.chunked is None:
            return "\n".join([head, source_of_steps(f"rank_{rank}", self.digits, self.steps, rank, self.elements)])
        axis = self.schedule.digit(self.schedule.chunked).axis
        chunks = (
            source_of_steps(f"chunk_{number}", chunk.digits, self.steps, rank, chunk.elements, axis)
            for number, chunk in enumerate(map(self.of_chunk, range(self.schedule.chunks)))
        )
        return "\n\n\n".join([head, *chunks, source_of_chunks(f"rank_{rank}", self.digits, rank)])

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads."""
        return canonical(content(self.schedule, self.steps) | {"hash": self.hash})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan that `to_json` wrote.

        Measured and predicted times are not saved, nor is the reason of the choice: `on_mesh` and `with_tile` give the
        speeds of the mesh and the times of a tile again.

        Raises:
            ValueError: the text is something else, or was changed.
        """
        schedule, steps, expected = parse(text)
        plan = Plan(schedule, steps, reason=FROM_JSON)
        if plan.hash != expected:
            raise ValueError(
                f"this plan was changed after it was saved: its hash is {plan.hash[:12]}, not {expected[:12]}"
            )
        return plan

    def at(self, /, **sizes: int) -> "Plan":
        """The same steps for other sizes of the named axes, without times of a tile (see `with_tile`).

        Raises:
            ValueError: the digits or the homes do not divide the sizes, or the states of a scan would pass in another way.
        """
        resized = self.program.resized(**sizes)
        nest, digits = self.schedule, list[Digit]()
        bound = {*dict(nest.parallel), *dict(nest.shifts), *nest.order}
        for axis in dict.fromkeys(digit.axis for digit in self.schedule.digits):
            *outer, last = self.schedule.digits_of(axis)
            inner, rest = divmod(resized.axis(axis).size, math.prod(digit.size for digit in outer))
            if rest or not inner or (last.name in bound and inner != last.size):
                raise ValueError(f"axis {axis} of {resized.axis(axis).size} does not divide by the schedule's digits")
            digits += [*outer, replace(last, size=inner)]
        plan = self._changed(replace(self.schedule, program=resized, digits=tuple(digits)))
        digits_of_chunk(plan.schedule)
        if takes_slices(plan.digits) != takes_slices(self.digits):
            old, new = (program.axis("heads").size for program in (self.program, resized))
            raise ValueError(
                f"axis heads of {new}: states would pass in another form than with {old} heads, as the steps do"
            )
        return plan

    def with_options(self, /, **options: object) -> "Plan":
        """The same steps with other options of the tile, such as causal=False, without its times (see `with_tile`)."""
        return self._changed(replace(self.schedule, program=self.program.with_options(**options)))

    def on_mesh(self, mesh: Mesh) -> "Plan":
        """The same steps with the speeds of another mesh, whose axes are the plan's or those that a search split into them.

        Raises:
            ValueError: the axes are others.
        """
        if not self.mesh.refines(mesh):
            raise ValueError(f"the plan is for {self.mesh.in_words()}, not for {mesh.in_words()}")
        mesh = Mesh.of_axes(self.mesh.axes).with_speeds(mesh.speeds)
        return self._changed(replace(self.schedule, mesh=mesh), self.tile_seconds, self.overlap)

    def with_tile(self, point_seconds: float, call_seconds: float, overlap: float = 1.0) -> "Plan":
        """The same steps, predicted with these times of a tile. Arguments and errors as in `search`."""
        check_tile(point_seconds, call_seconds, overlap)
        turns = sum(isinstance(step, Compute) for step in self.steps) * self.schedule.chunks
        points = self.program.points / turns / self.mesh.ranks
        return self._changed(self.schedule, call_seconds + points * point_seconds, overlap)

    def _changed(self, schedule: LoopNest, tile_seconds: float = 0.0, overlap: float = 1.0) -> "Plan":
        """The same steps with another prediction, for which a search may choose another plan; or this plan itself."""
        if (schedule, tile_seconds, overlap) == (self.schedule, self.tile_seconds, self.overlap):
            return self
        reason = self.reason if self.reason in (BY_CALLER, FROM_JSON) else CHANGED
        return Plan(schedule, self.steps, tile_seconds, overlap, reason)

    def shard(self, inputs: Tensors, rank: int) -> dict[str, torch.Tensor]:
        """The blocks of the whole inputs that rank `rank` of the mesh holds at home. Raises ValueError for a wrong shape."""
        return self._shards(inputs, [rank])[0]

    def shard_all(self, inputs: Tensors) -> list[dict[str, torch.Tensor]]:
        """`shard` for every rank of the mesh, in the order of ranks."""
        return self._shards(inputs, range(self.mesh.ranks))

    def _shards(self, inputs: Tensors, ranks: Iterable[int]) -> list[dict[str, torch.Tensor]]:
        self.check(inputs)
        numbered = {x: reordered(x, inputs[x.name], self._orders(x)) for x in self.inputs()}

        def of(x: Operand, rank: int) -> torch.Tensor:
            return block(self.digits, x, numbered[x], self.digits.home(x), self.mesh.coordinates(rank)).contiguous()

        return [{x.name: of(x, rank) for x in numbered} for rank in ranks]

    def _orders(self, operand: Operand) -> dict[str, torch.Tensor]:
        """{axis: its elements in the order in which ranks hold them} for the axes of an operand that are not contiguous."""
        axes = [self.program.axis(name) for name in operand.axes if name in self.digits.sizes]
        return {axis.name: self.positions(axis.name) for axis in axes if axis.order != "contiguous"}

    def unshard(self, parts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join whole operands (outputs or inputs) from the blocks of each rank, in the order of ranks.

        Raises:
            ValueError: the number of parts is not that of the ranks, or a block has another shape than at home.
        """
        if len(parts) != self.mesh.ranks:
            raise ValueError(f"unshard needs the blocks of {self.mesh.ranks} ranks, not of {len(parts)}")
        wholes = {}
        for name in parts[0]:
            operand = self.program.operand(name)
            layout = self.digits.home(operand)
            shape = self.digits.local_shape(operand, layout)
            whole = parts[0][name].new_empty(self.program.shape(operand))
            for rank, part in enumerate(parts):
                if part[name].shape != shape:
                    given = tuple(part[name].shape)
                    raise ValueError(f"{name} of rank {rank} has shape {given}: expected {shape}, its block at home")
                put_block(self.digits, operand, whole, part[name], layout, self.mesh.coordinates(rank))
            inverses = {axis: order.argsort() for axis, order in self._orders(operand).items()}
            wholes[name] = reordered(operand, whole, inverses)
        return wholes

    def check(self, inputs: Tensors, is_local: bool = False) -> None:
        """Check the inputs of a call.

        All have one floating dtype. Those that are kept in at least fp32 (`Operand.is_wide`) are fp32 beside narrower ones,
        because results are converted to the narrow dtype.

        Args:
            inputs: {name: tensor}.
            is_local: the tensors are a rank's blocks at home.

        Raises:
            ValueError: an input is missing or unknown, or has another shape or dtype.
        """
        expected = {operand.name: operand for operand in self.inputs()}
        if inputs.keys() != expected.keys():
            given = ", ".join(map(str, inputs)) or "nothing"
            raise ValueError(f"{self.program.name} takes {', '.join(expected)}, not {given}")
        first = next((operand.name for operand in expected.values() if not operand.is_wide), next(iter(expected)))
        narrow = inputs[first].dtype
        if str(narrow).removeprefix("torch.") not in ITEMSIZES:
            raise ValueError(f"{first} has dtype {narrow}: expected {', '.join(ITEMSIZES)}")
        for name, operand in expected.items():
            shape = self.digits.local_shape(operand, self.digits.home(operand) if is_local else {})
            if inputs[name].shape != shape:
                block = ", this rank's block" if is_local else ""
                raise ValueError(f"{name} has shape {tuple(inputs[name].shape)}: expected {shape}{block}")
            dtype = at_least_fp32(narrow) if operand.is_wide else narrow
            if inputs[name].dtype != dtype:
                raise ValueError(f"{name} has dtype {inputs[name].dtype}: expected {dtype}, as {first} is {narrow}")


def check_plan(plan: object) -> None:
    """Raise ValueError unless this is a `Plan`, and neither a schedule nor the list that a search returns."""
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise ValueError(f"expected a Plan (from Schedule.lower(), or one of those that search() returns), not {kind}")
