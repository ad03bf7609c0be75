"""A plan: the steps of a schedule, as data that is equal on all ranks, can be saved, and runs in any process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from commir.ir.checks import as_name, check_type, shown
from commir.ir.mesh import Mesh
from commir.ir.program import Operand, Program
from commir.scheduling.known_schedules import known_as
from commir.scheduling.loop_nest import Digit, LoopNest
from sparsefusion.collectives.wire_formats import at_least_fp32

from .accounting import Account, account
from .blocks import block, check_tensor, chosen, positions, put_block, reordered
from .changes import changed_part, changed_step
from .explain import lines_of_messages
from .layouts import Digits, Piece, digits_of, digits_of_chunk
from .scans import takes_slices
from .steps import Compute, Step
from .text import canonical, content, digest, digests_of_parts, parse
from .timeline import check_tile, seconds

Tensors = Mapping[str, torch.Tensor]
BY_CALLER = "the caller made this schedule"
FROM_JSON = "not recorded, as the plan was read from JSON"
CHANGED = "not recorded, as sizes, options, speeds or times were changed after the choice"


@dataclass(frozen=True)
class Plan:
    """What every rank of a mesh does, step by step: the result of `Schedule.lower`.

    schedule: the program, the mesh, and which rank computes what. steps: the same for every rank; peers are relative. If the
    schedule has chunks, a rank takes the steps for each of them, one after the other. tile_seconds: the measured time of a
    tile (0: only messages are counted). overlap: see `search`. reason: why `search` has chosen this plan.
    """

    schedule: LoopNest
    steps: tuple[Step, ...]
    tile_seconds: float = field(default=0.0, compare=False)
    overlap: float = field(default=1.0, compare=False)
    reason: str = field(default=BY_CALLER, compare=False)

    @property
    def program(self) -> Program:
        """What is computed."""
        return self.schedule.program

    @property
    def mesh(self) -> Mesh:
        """The ranks that compute it."""
        return self.schedule.mesh

    @cached_property
    def digits(self) -> Digits:
        """The digits of every loop, between all cuts."""
        return digits_of(self.schedule)

    @cached_property
    def of_one_chunk(self) -> "Plan":
        """The plan of a chunk by itself; this plan, if it has no chunks."""
        return replace(self, schedule=digits_of_chunk(self.schedule).nest) if self.schedule.chunked else self

    def of_chunk(self, number: int) -> "Plan":
        """The plan of one chunk by itself, with the chunk's elements of the whole tensor; remembered."""
        if number not in self._chunks:
            axis, digit = self.digits.piece(str(self.schedule.chunked))
            chunk = self._chunks[number] = replace(self, schedule=self.of_one_chunk.schedule)
            chunk._positions[axis] = self.elements(axis, {(axis, digit): number})
        return self._chunks[number]

    @cached_property
    def hash(self) -> str:
        """A digest of program, mesh, schedule and steps; equal plans have equal hashes in every process."""
        return digest(self.schedule, self.steps)

    @cached_property
    def account(self) -> Account:
        """What the steps send and hold."""
        if self.schedule.chunked is None:
            return account(self.digits, self.steps)
        axis = self.schedule.digit(self.schedule.chunked).axis
        owned = [each.name for each in self.inputs() if axis in each.axes]
        kept = sum(
            math.prod(self.digits.local_shape(each, self.digits.home(each))) * self.program.itemsize(each)
            for each in (*self.inputs(), *self.program.outputs)
            if axis in each.axes
        )
        return account(self.of_one_chunk.digits, self.steps, owned).in_chunks(self.schedule.chunks, kept)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that a rank sends, with elements of the program's dtype.

        In a `Swap`, some ranks have nothing to send; with several of them, every rank may have sent less than this.
        """
        return self.account.sent

    @property
    def memory(self) -> int:
        """Bytes that a rank holds at most: its inputs, blocks on their way with the copies that are sent, and results.

        It is what the plan's own steps hold, without the temporaries of a kernel and the copy of an input that is not
        contiguous. attention2d, on which `execute` runs grids, holds more for several sequences.
        """
        return self.account.peak

    @cached_property
    def seconds(self) -> float:
        """The predicted time, from the speeds of the mesh, `tile_seconds` and `overlap`."""
        sent = self.of_one_chunk.account.by_step
        return self.schedule.chunks * seconds(self.mesh, self.steps, sent, self.tile_seconds, self.overlap)

    def positions(self, axis: str) -> torch.Tensor:
        """(size,) int64: the element of the whole tensor that has each number along an axis, in the order of ranks."""
        if axis not in self._positions:
            self._positions[axis] = positions(self.digits, axis)
        return self._positions[axis]

    def elements(self, axis: str, fixed: Mapping[Piece, int]) -> torch.Tensor:
        """The elements of the whole tensor, along an axis, that have these blocks of some digits; remembered."""
        key = axis, tuple(sorted(fixed.items()))
        if key not in self._elements:
            self._elements[key] = chosen(self.positions(axis), self.digits, axis, fixed)
        return self._elements[key]

    @cached_property
    def _positions(self) -> dict[str, torch.Tensor]:
        return {}

    @cached_property
    def _chunks(self) -> dict[int, "Plan"]:
        return {}

    @cached_property
    def _elements(self) -> dict[object, torch.Tensor]:
        return {}

    @property
    def messages(self) -> int:
        """The number of messages that a rank sends."""
        return self.account.messages

    def inputs(self) -> tuple[Operand, ...]:
        """The inputs that a caller gives; the others are derived from them."""
        return tuple(operand for operand in self.program.inputs if not operand.source)

    def explain(self) -> str:
        """What is computed where, what each operand sends along each mesh axis and by which rule, and why it was chosen."""
        name = known_as(self.schedule)
        time = f"{self.seconds:.3g} s by prediction; " if self.mesh.speeds else ""
        totals = (
            f"{time}a rank sends {self.bytes_per_rank:,} bytes in {self.messages} messages and holds {self.memory:,}"
        )
        sent = self.of_one_chunk.account.by_step
        messages = lines_of_messages(self.schedule, self.steps, sent, self.schedule.chunks)
        lines = [str(self.schedule) + f" ({name})" * bool(name), totals]
        return "\n".join([*lines, *messages, f"chosen: {self.reason}"])

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads."""
        found = content(self.schedule, self.steps)
        return canonical(found | {"hash": self.hash, "digests": digests_of_parts(found)})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote. ValueError: it is something else, or was changed.

        The error of a change names the axis, operand, primitive or other part that was changed, by the digests of parts that
        the text has, or the first step that does not follow from the schedule.

        What was measured or predicted is not saved, nor is the reason of the choice: `on_mesh` and `with_tile` give the
        speeds of the mesh and the times of a tile again.
        """
        schedule, steps, expected, digests = parse(text)
        plan = Plan(schedule, steps, reason=FROM_JSON)
        part = "" if digests is None else changed_part(content(schedule, steps), digests)
        if plan.hash != expected:
            what = part or changed_step(schedule, steps) or f"its hash is {plan.hash[:12]}, not {expected[:12]}"
            raise ValueError(f"this plan was changed after it was saved: {what}")
        if part:
            raise ValueError(
                f"this plan was changed after it was saved: its digests are not those of its parts: {part}"
            )
        return plan

    def at(self, /, **sizes: int) -> "Plan":
        """The same steps for other sizes of the named axes, without times of a tile, which `with_tile` gives again.

        ValueError: the digits or the homes do not divide them, a scan's states would pass in its other form (`scans`), or
        another number of a scan's blocks is asked for, which the schedule gives.
        """
        resized, scan = self.program.resized(**sizes), self.program.scan
        if scan is not None and resized.axis(scan.blocks) != self.program.axis(scan.blocks):
            given, count = resized.axis(scan.blocks).size, self.program.axis(scan.blocks).size
            raise ValueError(f"axis {scan.blocks} of {given}: the schedule divides {scan.axis} into {count} blocks")
        nest, digits = self.schedule, list[Digit]()
        bound = {*dict(nest.parallel), *dict(nest.shifts), *nest.order}
        for axis in dict.fromkeys(digit.axis for digit in self.schedule.digits):
            *outer, last = self.schedule.digits_of(axis)
            inner, rest = divmod(resized.axis(axis).size, math.prod(digit.size for digit in outer))
            if rest or not inner or (last.name in bound and inner != last.size):
                raise ValueError(f"axis {axis} of {resized.axis(axis).size} does not divide by the schedule's digits")
            digits += [*outer, replace(last, size=inner)]
        found = self._changed(replace(self.schedule, program=resized, digits=tuple(digits)))
        digits_of_chunk(found.schedule)
        if takes_slices(found.digits) != takes_slices(self.digits):
            old, new = (program.axis("heads").size for program in (self.program, resized))
            raise ValueError(
                f"axis heads of {new}: states would pass in another form than with {old} heads, as the steps do"
            )
        return found

    def with_options(self, /, **options: object) -> "Plan":
        """The same steps with other options of the tile, such as causal=False, without its times (see `with_tile`)."""
        return self._changed(replace(self.schedule, program=self.program.with_options(**options)))

    def on_mesh(self, mesh: Mesh) -> "Plan":
        """The same steps with the speeds of another mesh, whose axes are the plan's, or those that a search split into them.

        ValueError: its axes are others.
        """
        check_type("on_mesh", mesh, Mesh)
        if not self.mesh.refines(mesh):
            raise ValueError(f"the plan is for {self.mesh.in_words()}, not for {mesh.in_words()}")
        mesh = Mesh.of_axes(self.mesh.axes).with_speeds(mesh.speeds)
        return self._changed(replace(self.schedule, mesh=mesh), self.tile_seconds, self.overlap)

    def with_tile(self, point_seconds: float, call_seconds: float, overlap: float = 1.0) -> "Plan":
        """The same steps, predicted with these times of a tile; see `search`. ValueError as there."""
        check_tile(point_seconds, call_seconds, overlap)
        turns = sum(isinstance(step, Compute) for step in self.steps) * self.schedule.chunks
        points = self.program.points / turns / self.mesh.ranks
        return self._changed(self.schedule, call_seconds + points * point_seconds, overlap)

    def _changed(self, schedule: LoopNest, tile_seconds: float = 0.0, overlap: float = 1.0) -> "Plan":
        """The same steps with another prediction, for which a search may have chosen another plan; or this plan itself."""
        if (schedule, tile_seconds, overlap) == (self.schedule, self.tile_seconds, self.overlap):
            return self
        reason = self.reason if self.reason in (BY_CALLER, FROM_JSON) else CHANGED
        return Plan(schedule, self.steps, tile_seconds, overlap, reason)

    def shard(self, inputs: Tensors, rank: int) -> dict[str, torch.Tensor]:
        """What rank `rank` of the mesh holds of each input at home, from the whole inputs. ValueError: a shape is wrong."""
        return self._blocks(self._numbered(inputs), rank)

    def shard_all(self, inputs: Tensors) -> list[dict[str, torch.Tensor]]:
        """`shard` for every rank of the mesh, in the order of ranks."""
        numbered = self._numbered(inputs)
        return [self._blocks(numbered, rank) for rank in range(self.mesh.ranks)]

    def _numbered(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Whole inputs with the elements of each axis in the order in which ranks hold them. ValueError as in `check`."""
        self.check(inputs)
        return {each.name: reordered(each, inputs[each.name], self._orders(each)) for each in self.inputs()}

    def _blocks(self, numbered: Tensors, rank: int) -> dict[str, torch.Tensor]:
        """A rank's block of each numbered input."""
        coordinates = self.mesh.coordinates(rank)
        return {
            each.name: block(self.digits, each, numbered[each.name], self.digits.home(each), coordinates).contiguous()
            for each in self.inputs()
        }

    def _orders(self, operand: Operand) -> dict[str, torch.Tensor]:
        """{axis: its elements in the order in which ranks hold them} for the axes of an operand that are not in order."""
        axes = [self.program.axis(name) for name in operand.axes if name in self.digits.sizes]
        return {axis.name: self.positions(axis.name) for axis in axes if axis.order != "contiguous"}

    def unshard(self, parts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Whole operands (outputs or inputs) from what each rank holds, in the order of ranks.

        ValueError: a part is missing, has another shape than the rank's block at home or another dtype than that of rank 0,
        or is none.
        """
        if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
            raise ValueError(f"unshard takes {{name: block}} of each rank in a list, not {shown(parts)}")
        if len(parts) != self.mesh.ranks:
            raise ValueError(
                f"unshard: {len(parts)} part{'s' * (len(parts) != 1)} for a mesh of {self.mesh.ranks} ranks"
            )
        found = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            operand = self.program.operand(name)
            layout = self.digits.home(operand)
            shape = self.digits.local_shape(operand, layout)
            for rank, part in enumerate(parts):
                x: Any = part.get(name)
                is_tensor = isinstance(x, torch.Tensor)
                given = tuple(x.shape) if is_tensor else shown(x) if name in part else "missing"
                if not is_tensor or given != shape:
                    raise ValueError(
                        f"unshard: {name} of rank {rank} is {given}; its block of {name} has shape {shape}"
                    )
                if x.dtype != (first := parts[0][name].dtype):
                    raise ValueError(f"unshard: {name} of rank {rank} is {x.dtype}, and of rank 0 {first}")
            whole = parts[0][name].new_empty(self.program.shape(operand))
            for rank, part in enumerate(parts):
                put_block(self.digits, operand, whole, part[name], layout, self.mesh.coordinates(rank))
            inverses = {axis: order.argsort() for axis, order in self._orders(operand).items()}
            found[name] = reordered(operand, whole, inverses)
        return found

    def check(self, inputs: Tensors, is_local: bool = False) -> None:
        """ValueError: an input is missing, unknown, no dense tensor, has the wrong shape, or has another dtype.

        Dtypes are those of ITEMSIZES. All inputs have one, except that those which are kept in at least fp32
        (`Operand.is_wide`) have fp32 beside narrower ones, because results are converted to it. is_local: they are a rank's
        blocks at home.
        """
        expected = {operand.name: operand for operand in self.inputs()}
        if not isinstance(inputs, Mapping):
            raise ValueError(f"inputs are {{name: tensor}}, not {shown(inputs)}")
        if inputs.keys() != expected.keys():
            given = ", ".join(map(as_name, inputs)) or "nothing"
            raise ValueError(f"{self.program.name} takes {', '.join(expected)}, not {given}")
        for name, operand in expected.items():
            layout = self.digits.home(operand) if is_local else {}
            shape = self.digits.local_shape(operand, layout)
            check_tensor(name, inputs[name])
            if tuple(inputs[name].shape) != shape:
                what = "this rank's block of" if is_local else "the whole"
                raise ValueError(f"{name} has shape {tuple(inputs[name].shape)}; {what} {name} has shape {shape}")
        self._check_dtypes({name: inputs[name].dtype for name in expected})

    def _check_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """ValueError: the inputs that are not wide have different dtypes, or those that are have another wide dtype."""
        given = self.inputs()
        narrow = [each.name for each in given if not each.is_wide]
        first = (narrow or list(dtypes))[0]
        for name in narrow:
            if dtypes[name] != dtypes[first]:
                both = f"{first} is {dtypes[first]}, and {name} {dtypes[name]}"
                raise ValueError(f"{both}; the inputs of {self.program.name} must have one dtype")
        wide = at_least_fp32(dtypes[first])
        for name in (each.name for each in given if each.is_wide):
            if dtypes[name] != wide:
                beside = f"beside {first} in {dtypes[first]} " * (name != first)
                raise ValueError(f"{name} is {dtypes[name]}; {beside}it is kept in {wide}")
