"""Plans as JSON text, which parses back, and their digest. Nothing in the text is code."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from commir.ir.mesh import Mesh, MeshAxis
from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .plan_steps import KINDS, Step

FORMAT, VERSION = "commir plan", 1
T = TypeVar("T")
KEYS = ("format", "version", "program", "mesh", "schedule", "steps", "hash")


def content(schedule: LoopNest, steps: Sequence[Step]) -> dict[str, Any]:
    """The parts of a plan as values of JSON, except the speeds of its mesh."""
    program = asdict(schedule.program)
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": {each.name: program[each.name] for each in fields(Program) if each.init}
        | {"options": dict(schedule.program.options)},
        "mesh": [asdict(axis) for axis in schedule.mesh.axes],
        "schedule": schedule.primitives(),
        "steps": [[type(step).__name__, _values(step)] for step in steps],
    }


def digest(schedule: LoopNest, steps: Sequence[Step]) -> str:
    """The SHA-256 of the content, in hexadecimal."""
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
    """Return (schedule, steps, hash) of the text of a plan. Raises a ValueError of one line if it is anything else."""
    try:
        saved = _expect(dict, json.loads(text), "the text")
        for key, value in (("format", FORMAT), ("version", VERSION)):
            if _expect(type(value), saved.get(key), key) != value:
                raise ValueError(f"{key} is {saved[key]!r:.60}: expected {value!r}")
        saved.pop("digests", None)  # of parts of the plan, which earlier versions wrote
        _check_keys(saved, KEYS, "the text")
        return _schedule_from(saved), _steps_from(saved["steps"]), _expect(str, saved["hash"], "hash")
    except Exception as error:  # a text from anywhere may raise anything
        raise ValueError(f"not a plan, or a damaged one: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _schedule_from(saved: dict[str, Any]) -> LoopNest:
    """The schedule of a plan's content. Raises ValueError naming the program, the mesh or the primitive that is wrong."""
    program = _expect(dict, saved["program"], "program")
    options = [list(option) for option in _expect(dict, program.get("options"), "program.options").items()]
    mesh = Mesh.of_axes(_value(tuple[MeshAxis, ...], saved["mesh"], "mesh"))
    schedule = LoopNest(_value(Program, program | {"options": options}, "program"), mesh)
    for number, primitive in enumerate(_expect(list, saved["schedule"], "schedule")):
        where = f"schedule[{number}]"
        for place, argument in enumerate(_expect(list, primitive, where)):
            is_factor = place == 2 and primitive[0] == "tile"
            _value(int if is_factor else str, argument, f"{where}[{place}]")
        try:
            schedule = schedule.apply([primitive])
        except (ValueError, TypeError) as error:  # TypeError: another number of arguments
            raise ValueError(f"{where}: {error}") from None
    return schedule


def _steps_from(value: Any) -> tuple[Step, ...]:
    """The steps of a plan's content. Raises ValueError with the number of a step that is wrong."""
    steps = []
    for number, step in enumerate(_expect(list, value, "steps")):
        kind, values = _value(tuple[str, Any], step, f"steps[{number}]")
        if kind not in KINDS:
            raise ValueError(f"steps[{number}]: unknown step {kind!r:.60}: expected {', '.join(KINDS)}")
        steps.append(_value(KINDS[kind], values, f"steps[{number}], {kind}"))
    return tuple(steps)


def _value(kind: Any, value: Any, where: str) -> Any:
    """Convert a value of JSON to a type: lists become tuples and dataclasses. `where` is its place, for errors."""
    parts = get_args(kind)
    if NoneType in parts:  # `type | None`
        return None if value is None else _value(parts[0], value, where)
    if get_origin(kind) is tuple:
        return _tuple_from(parts, value, where)
    if is_dataclass(kind):
        return _dataclass_from(kind, value, where)
    if kind is Any:
        return value
    return _expect(kind, value, where)


def _tuple_from(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """A tuple of these types; (type, ...) stands for any number of one type."""
    kinds = kinds[:1] * len(_expect(list, value, where)) if kinds[1:] == (...,) else kinds
    if len(_expect(list, value, where)) != len(kinds):
        raise ValueError(f"{where} has {len(value)} elements: expected {len(kinds)}")
    return tuple(_value(kind, each, f"{where}[{n}]") for n, (kind, each) in enumerate(zip(kinds, value, strict=True)))


def _expect(kind: type[T], value: Any, where: str) -> T:
    """Return a value of JSON if it has exactly this type. Texts must be printable, because errors show them."""
    if type(value) is not kind or (isinstance(value, str) and not value.isprintable()):
        raise ValueError(f"{where} is {value!r:.60}: expected {kind.__name__}")
    return value


def _check_keys(value: dict[str, Any], names: Sequence[str], where: str) -> None:
    """Raise ValueError, naming the first wrong key, if an object has more or fewer keys than these."""
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown := [key for key in value if key not in names]:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r:.60}: expected {', '.join(names)}")


def _dataclass_from(kind: Any, value: Any, where: str) -> Any:
    """A dataclass from {field: value}, or from the list of its values."""
    names = [each.name for each in fields(kind) if each.init]
    if isinstance(value, list) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}: expected {', '.join(names) or 'no fields'}")
    _check_keys(value, names, where)
    types = get_type_hints(kind)
    values = {name: _value(types[name], value[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
