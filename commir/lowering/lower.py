"""`Schedule.lower`: from a schedule to a plan. `schedule_steps` has the rules from which the steps follow."""

import math
from dataclasses import fields, replace

from commir.scheduling.loop_nest import LoopNest

from .operand_layouts import block_sizes
from .plan import Plan
from .schedule_steps import steps_of_schedule


class Schedule(LoopNest):
    """A program on a mesh, transformed by primitives: `Schedule(program, mesh).tile(...).parallelize(...).lower()`.

    The primitives and their legality rules are methods of `LoopNest`.
    """

    def lower(self) -> Plan:
        """The plan of this schedule.

        Raises:
            IllegalSchedule: a mesh axis has no digit, or the cuts of an axis do not fit.
        """
        nest = LoopNest(**{each.name: getattr(self, each.name) for each in fields(self)})
        if (scan := self.program.scan) is not None:
            nest = replace(nest, program=self.program.resized(**{scan.blocks: math.prod(block_sizes(nest))}))
        return Plan(nest, tuple(steps_of_schedule(nest)))
