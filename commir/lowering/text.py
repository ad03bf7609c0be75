"""Plans as JSON text, which parses back, and their digest. Nothing in it is code."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from commir.ir.mesh import Mesh, MeshAxis
from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .steps import KINDS, Step

FORMAT, VERSION = "commir plan", 1


def content(schedule: LoopNest, steps: Sequence[Step]) -> dict[str, Any]:
    """Everything that a plan consists of, except the speeds of its mesh."""
    program = schedule.program
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": {
            "name": program.name,
            "axes": [asdict(axis) for axis in program.axes],
            "inputs": [asdict(operand) for operand in program.inputs],
            "outputs": [asdict(operand) for operand in program.outputs],
            "results": [asdict(result) for result in program.results],
            "tile": program.tile,
            "scan": None if program.scan is None else asdict(program.scan),
            "internal": [asdict(operand) for operand in program.internal],
            "options": dict(sorted(program.options)),
            "dtype": program.dtype,
        },
        "mesh": [asdict(axis) for axis in schedule.mesh.axes],
        "schedule": schedule.primitives(),
        "steps": [[type(step).__name__, _values(step)] for step in steps],
    }


def digest(schedule: LoopNest, steps: Sequence[Step]) -> str:
    """SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(canonical(content(schedule, steps)).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in which equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _values(step: Any) -> Any:
    """The fields of a step in order; places are (dim, outer)."""
    if is_dataclass(step):
        return [_values(value) for value in vars(step).values()]
    return [_values(value) for value in step] if isinstance(step, tuple) else step


def parse(text: str) -> tuple[LoopNest, tuple[Step, ...], str]:
    """(schedule, steps, hash) of what `canonical(content(...) | {"hash": ...})` wrote.

    ValueError, of one line: it is something else, or more or less than that.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object)
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError(f"it is {found['format']!r}, version {found['version']!r}")
        if not re.fullmatch("[0-9a-f]{64}", expected := found.pop("hash")):
            raise ValueError(f"{expected!r} is no hash")
        schedule, steps = _schedule_from(found), tuple(step_from(*step) for step in found["steps"])
        if canonical(content(schedule, steps)) != canonical(found):
            raise ValueError("it does not have exactly the keys and primitives that a plan is written with")
        return schedule, steps, expected
    except Exception as error:  # a text from anywhere may raise anything
        raise ValueError(f"this is no plan, or a damaged one: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the text. ValueError: a key is there twice, of which JSON would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one of the keys {', '.join(found)} is there twice")
    return found


def _schedule_from(found: dict[str, Any]) -> LoopNest:
    """The schedule of a plan's content."""
    program = found["program"]
    options = [list(option) for option in program["options"].items()]
    mesh = Mesh.of_axes(_value(tuple[MeshAxis, ...], found["mesh"]))
    for primitive in found["schedule"]:
        for argument in primitive:
            _value(int if isinstance(argument, int) else str, argument)
    return LoopNest(_value(Program, program | {"options": options}), mesh).apply(found["schedule"])


def step_from(kind: str, values: Sequence[Any]) -> Step:
    """The step that `content` wrote as (kind, values). ValueError: it is not one."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of the steps {', '.join(KINDS)}")
    step: Step = _value(KINDS[kind], values)
    return step


def _value(kind: Any, found: Any) -> Any:
    """A value of the text as a field of this type: lists become tuples and dataclasses. ValueError: it does not fit."""
    parts = get_args(kind)
    if NoneType in parts:  # `type | None`
        return None if found is None else _value(parts[0], found)
    if get_origin(kind) is tuple:
        return _tuple_from(parts, found)
    if is_dataclass(kind):
        return _dataclass_from(kind, found)
    if kind is Any:
        return found
    if type(found) is not kind or (kind is str and not found.isprintable()):
        raise ValueError(f"{found!r:.60} is no {kind.__name__}")
    return found


def _tuple_from(kinds: tuple[Any, ...], found: Any) -> tuple[Any, ...]:
    """kinds: the types of the elements; (type, ...) for any number of one type."""
    if not isinstance(found, list):
        raise ValueError(f"{found!r:.60} is no list")
    kinds = kinds[:1] * len(found) if kinds[1:] == (...,) else kinds
    return tuple(_value(kind, each) for kind, each in zip(kinds, found, strict=True))


def _dataclass_from(kind: Any, found: Any) -> Any:
    """A dataclass from {field: value}, or from the list of its values."""
    names = [each.name for each in fields(kind) if each.init]
    if isinstance(found, list):
        found = dict(zip(names, found, strict=True))
    if not isinstance(found, dict) or found.keys() != set(names):
        raise ValueError(f"{kind.__name__} needs exactly {', '.join(names) or 'no fields'}")
    types = get_type_hints(kind)
    return kind(**{name: _value(types[name], found[name]) for name in names})
