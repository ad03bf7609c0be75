"""`Schedule.lower`: from a schedule to a plan. `schedule_steps` has the rules from which the steps follow."""

import math
from dataclasses import fields, replace

from commir.ir.mesh import Mesh
from commir.programs.operators import Operator
from commir.scheduling.loop_nest import LoopNest
from commir.scheduling.placements import Placement, place

from .operand_layouts import block_sizes
from .plan import Plan
from .schedule_steps import steps_of_schedule


class Schedule(LoopNest):
    """A program on a mesh, transformed by primitives: `Schedule(program, mesh).tile(...).parallelize(...).lower()`.

    The primitives and their legality rules are methods of `LoopNest`.
    """

    @classmethod
    def of(cls, operator: Operator, mesh: Mesh, /, dtype: str = "float32", **sizes: int) -> "Schedule":
        """The schedule that the annotations of an operator describe: `parallel`, `shift` and `replicate`.

        Args:
            operator: a function that `commir.operator` has read; each axis of the mesh has a loop.
            mesh: the ranks.
            dtype, sizes: as in a call of the operator.

        Raises:
            IllegalSchedule: as the primitives do.
            ValueError: as a call of the operator does.
        """
        nest = cls(operator(dtype, **sizes), mesh)
        for operand, mesh_axis in operator.replicated:
            nest = nest.replicate(operand, mesh_axis)
        placed = {m: Placement(axis, bool(shifted), shifted or None) for m, axis, shifted in operator.placements}
        return place(nest, **placed)

    def lower(self) -> Plan:
        """The plan of this schedule.

        Raises:
            IllegalSchedule: a mesh axis has no digit, or the cuts of an axis do not fit.
        """
        nest = LoopNest(**{each.name: getattr(self, each.name) for each in fields(self)})
        if (scan := self.program.scan) is not None:
            nest = replace(nest, program=self.program.resized(**{scan.blocks: math.prod(block_sizes(nest))}))
        return Plan(nest, tuple(steps_of_schedule(nest)))
