"""What was changed in a plan that someone saved: a part of its program, mesh or schedule, or a step."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .explain import operands_of
from .rules import steps_of_schedule
from .steps import Step
from .text import canonical, digests_of_parts, one_line, parts


def changed_part(content: dict[str, Any], saved: Mapping[str, str]) -> str:
    """The first axis, operand, primitive or other part whose digest differs from the saved one; empty if there is none."""
    found = digests_of_parts(content)
    for name, where, value in parts(content):
        if found[name] != saved.get(name):
            return f"{name}: {canonical(value):.200} is not what was saved ({where})"
    return next((f"{name} is missing" for name in saved if name not in found), "")


def changed_step(nest: LoopNest, steps: Sequence[Step]) -> str:
    """The first step that lowering the schedule does not give, in one line; empty if there is none."""
    expected = steps_of_schedule(nest)
    try:
        for number, (read, right) in enumerate(zip_longest(steps, expected)):
            if read != right:
                return f"steps[{number}]: {_difference(nest.program, read, right)}"
    except Exception as error:  # a changed schedule may raise anything
        return f"its schedule has no plan: {one_line(error)}"
    return ""


def _difference(program: Program, read: Step | None, right: Step | None) -> str:
    """How a step that was read differs from what the schedule gives; None: there is no step here."""
    if read is None or right is None or type(read) is not type(right):
        return f"{_words(program, read)}, where this schedule has {_words(program, right)}"
    name = next(each.name for each in fields(read) if getattr(read, each.name) != getattr(right, each.name))
    found, due = getattr(read, name), getattr(right, name)
    if name == "moves" and len(found) == len(due):
        found, due = next(pair for pair in zip(found, due, strict=True) if pair[0] != pair[1])
    return f"{_words(program, read)} has {name} {found!r:.80}; this schedule has {due!r:.80}"


def _words(program: Program, step: Step | None) -> str:
    """The kind of a step with its operands: Send of k, v."""
    if step is None:
        return "nothing"
    operands = operands_of(program, step)
    return type(step).__name__ + f" of {operands}" * bool(operands)
