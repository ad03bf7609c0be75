"""Checks of the arguments of the public functions, so that a wrong kind of object gets one clear error."""

import math
from typing import Any

HINTS = {
    "Program": "call the operator to get a Program, as in nearest()",
    "Mesh": "such as Mesh(gpu=4)",
    "Plan": "Schedule.lower() makes one, and search() a list of them",
    "Sequence": "such as the plans that search() returns",
    "GraphNode": "such as GraphNode(name, program, inputs)",
    "LoopNest": "Schedule(program, mesh) makes one",
}


def check_type(caller: str, value: Any, kind: type) -> None:
    """ValueError unless an argument of `caller` is of this type, one of HINTS."""
    if not isinstance(value, kind):
        raise ValueError(f"{caller} takes {kind.__name__} ({HINTS[kind.__name__]}), not {value!r:.60}")


def check_memory(memory: Any) -> None:
    """ValueError unless a limit of memory is a number of bytes, at least 0, or None."""
    if memory is not None and (type(memory) not in (int, float) or math.isnan(memory) or memory < 0):
        raise ValueError(f"memory={memory!r}: it must be a number of bytes of at least 0, or None for no limit")
