"""Checks of the arguments of the public functions, so that a wrong kind of object gets one clear error."""

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

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


def check_fields(value: object, name: str) -> None:
    """ValueError unless the fields of a dataclass have the types of their annotations. name: what the error calls it."""
    for key, kind in _types(type(value)).items():  # type: ignore[arg-type]  # a class has a hash
        if not _fits(getattr(value, key), kind):
            words = str(kind).replace("commir.ir.program.", "") if get_args(kind) else kind.__name__
            raise ValueError(f"{name}: {key} is {getattr(value, key)!r:.60}, and no {words}")


@lru_cache
def _types(kind: type) -> dict[str, Any]:
    """{field: its type} of the arguments of a dataclass."""
    types = get_type_hints(kind)
    return {each.name: types[each.name] for each in fields(kind) if each.init}


def _fits(value: Any, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[1:] == (...,):
            return all(_fits(each, parts[0]) for each in value)
        return len(value) == len(parts) and all(_fits(each, part) for each, part in zip(value, parts, strict=True))
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            return False
        return all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in value.items())
    if parts:  # one of several
        return any(_fits(value, part) for part in parts)
    return kind is Any or isinstance(value, kind)


def check_sizes(**sizes: Any) -> None:
    """ValueError unless each is a whole number of at least 1; the error names the first that is none."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1")


def check_memory(memory: Any) -> None:
    """ValueError unless a limit of memory is a number of bytes, at least 0, or None."""
    if memory is not None and (type(memory) not in (int, float) or math.isnan(memory) or memory < 0):
        raise ValueError(f"memory={memory!r}: it must be a number of bytes of at least 0, or None for no limit")
