"""Plans as JSON text, which parses back, their digest, and which part of a saved plan was changed. Nothing in it is code."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from itertools import zip_longest
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from commir.ir.mesh import Mesh, MeshAxis
from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .explain import operands_of
from .plan_steps import KINDS, Step
from .schedule_steps import steps_of_schedule

FORMAT, VERSION = "commir plan", 1
T = TypeVar("T")
KEYS = ("format", "version", "program", "mesh", "schedule", "steps", "hash")  # a text may also have digests


def content(schedule: LoopNest, steps: Sequence[Step]) -> dict[str, Any]:
    """The parts of a plan as values of JSON, except the speeds of its mesh."""
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
    """The SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(canonical(content(schedule, steps)).encode()).hexdigest()


def parts(found: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, place in the text, value) of the axes, operands, primitives and other parts of a plan, except its steps."""
    program = found["program"]
    for kind, key in (("axis", "axes"), ("operand", "inputs"), ("operand", "outputs"), ("operand", "internal")):
        for number, each in enumerate(program[key]):
            yield f"{kind} {each['name']}", f"program.{key}[{number}]", each
    for number, each in enumerate(program["results"]):
        yield f"result {', '.join(each['outputs'])}", f"program.results[{number}]", each
    for name, value in program["options"].items():
        yield f"option {name}", f"program.options.{name}", value
    for key in ("name", "tile", "scan", "dtype"):
        yield key, f"program.{key}", program[key]
    for number, each in enumerate(found["mesh"]):
        yield f"mesh axis {each['name']}", f"mesh[{number}]", each
    for number, each in enumerate(found["schedule"]):
        yield f"primitive {number}", f"schedule[{number}]", each


def digests_of_parts(found: dict[str, Any]) -> dict[str, str]:
    """{name: short digest} of the parts of a plan, by which an error names the part that was changed."""
    return {
        name: hashlib.sha256(canonical([where, value]).encode()).hexdigest()[:8] for name, where, value in parts(found)
    }


def canonical(value: Any) -> str:
    """JSON in which equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _values(step: Any) -> Any:
    """The fields of a step in order; places are (dim, outer)."""
    if is_dataclass(step):
        return [_values(value) for value in vars(step).values()]
    return [_values(value) for value in step] if isinstance(step, tuple) else step


def parse(text: str) -> tuple[LoopNest, tuple[Step, ...], str, dict[str, str] | None]:
    """Return (schedule, steps, hash, digests) of the text of a plan. A text of an earlier version has no digests: None.

    Raises a ValueError of one line if the text is anything else.
    """
    try:
        found = _expect(dict, json.loads(text), "the text")
        for key, value in (("format", FORMAT), ("version", VERSION)):
            if _expect(type(value), found.get(key), key) != value:
                raise ValueError(f"{key} is {found[key]!r:.60}: expected {value!r}")
        _check_keys(found, [*KEYS, *(["digests"] if "digests" in found else [])], "the text")
        expected = _expect(str, found.pop("hash"), "hash")
        digests = _digests_from(found.pop("digests")) if "digests" in found else None
        return _schedule_from(found), _steps_from(found["steps"]), expected, digests
    except Exception as error:  # a text from anywhere may raise anything
        raise ValueError(f"not a plan, or a damaged one: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _digests_from(found: Any) -> dict[str, str]:
    return {name: _value(str, each, f"digests[{name!r}]") for name, each in _expect(dict, found, "digests").items()}


def _schedule_from(found: dict[str, Any]) -> LoopNest:
    """The schedule of a plan's content. Raises ValueError naming the program, the mesh or the primitive that is wrong."""
    program = _expect(dict, found["program"], "program")
    options = [list(option) for option in _expect(dict, program.get("options"), "program.options").items()]
    mesh = Mesh.of_axes(_value(tuple[MeshAxis, ...], found["mesh"], "mesh"))
    schedule = LoopNest(_value(Program, program | {"options": options}, "program"), mesh)
    for number, primitive in enumerate(_expect(list, found["schedule"], "schedule")):
        where = f"schedule[{number}]"
        for place, argument in enumerate(_expect(list, primitive, where)):
            is_factor = place == 2 and primitive[0] == "tile"
            _value(int if is_factor else str, argument, f"{where}[{place}]")
        try:
            schedule = schedule.apply([primitive])
        except (ValueError, TypeError) as error:  # TypeError: another number of arguments
            raise ValueError(f"{where}: {error}") from None
    return schedule


def _steps_from(found: Any) -> tuple[Step, ...]:
    """The steps of a plan's content. Raises ValueError with the number of a step that is wrong."""
    steps = []
    for number, step in enumerate(_expect(list, found, "steps")):
        kind, values = _value(tuple[str, Any], step, f"steps[{number}]")
        steps.append(step_from(kind, values, f"steps[{number}]"))
    return tuple(steps)


def step_from(kind: str, values: Any, where: str = "step") -> Step:
    """The step that `content` wrote as (kind, values). `where` is its place, for errors."""
    if kind not in KINDS:
        raise ValueError(f"{where}: unknown step {kind!r:.60}: expected {', '.join(KINDS)}")
    step: Step = _value(KINDS[kind], values, f"{where}, {kind}")
    return step


def _value(kind: Any, found: Any, where: str) -> Any:
    """Convert a value of JSON to a type: lists become tuples and dataclasses. `where` is its place, for errors."""
    parts = get_args(kind)
    if NoneType in parts:  # `type | None`
        return None if found is None else _value(parts[0], found, where)
    if get_origin(kind) is tuple:
        return _tuple_from(parts, found, where)
    if is_dataclass(kind):
        return _dataclass_from(kind, found, where)
    if kind is Any:
        return found
    return _expect(kind, found, where)


def _tuple_from(kinds: tuple[Any, ...], found: Any, where: str) -> tuple[Any, ...]:
    """A tuple of these types; (type, ...) stands for any number of one type."""
    kinds = kinds[:1] * len(_expect(list, found, where)) if kinds[1:] == (...,) else kinds
    if len(_expect(list, found, where)) != len(kinds):
        raise ValueError(f"{where} has {len(found)} elements: expected {len(kinds)}")
    return tuple(_value(kind, each, f"{where}[{n}]") for n, (kind, each) in enumerate(zip(kinds, found, strict=True)))


def _expect(kind: type[T], found: Any, where: str) -> T:
    """Return a value of JSON if it has exactly this type. Texts must be printable, because errors show them."""
    if type(found) is not kind or (isinstance(found, str) and not found.isprintable()):
        raise ValueError(f"{where} is {found!r:.60}: expected {kind.__name__}")
    return found


def _check_keys(found: dict[str, Any], names: Sequence[str], where: str) -> None:
    """Raise ValueError, naming the first wrong key, if an object has more or fewer keys than these."""
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown := [key for key in found if key not in names]:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r:.60}: expected {', '.join(names)}")


def _dataclass_from(kind: Any, found: Any, where: str) -> Any:
    """A dataclass from {field: value}, or from the list of its values."""
    names = [each.name for each in fields(kind) if each.init]
    if isinstance(found, list) and len(found) == len(names):
        found = dict(zip(names, found, strict=True))
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {found!r:.60}: expected {', '.join(names) or 'no fields'}")
    _check_keys(found, names, where)
    types = get_type_hints(kind)
    values = {name: _value(types[name], found[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def changed_part(content: dict[str, Any], saved: Mapping[str, str]) -> str:
    """The first axis, operand, primitive or other part whose digest differs from the saved one; "" if there is none."""
    found = digests_of_parts(content)
    for name, where, value in parts(content):
        if found[name] != saved.get(name):
            return f"{name}: {canonical(value):.200} is not what was saved ({where})"
    return next((f"{name} is missing" for name in saved if name not in found), "")


def changed_step(nest: LoopNest, steps: Sequence[Step]) -> str:
    """The first step that lowering the schedule does not give, in one line; "" if there is none."""
    expected = steps_of_schedule(nest)
    try:
        for number, (read, right) in enumerate(zip_longest(steps, expected)):
            if read != right:
                return f"steps[{number}]: {_difference(nest.program, read, right)}"
    except Exception as error:  # a changed schedule may raise anything
        return f"its schedule has no plan: {one_line(error)}"
    return ""


def _difference(program: Program, read: Step | None, right: Step | None) -> str:
    """Describe how a step that was read differs from that of the schedule; None: there is no step here."""
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
