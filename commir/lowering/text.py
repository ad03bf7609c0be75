"""Plans as JSON text, which parses back, and their digest. Nothing in it is code."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from commir.ir.mesh import Mesh, MeshAxis
from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .steps import KINDS, Step

FORMAT, VERSION = "commir plan", 1
KEYS = ("format", "version", "program", "mesh", "schedule", "steps", "hash")  # of a text, which may have digests too


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


def parts(found: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, where it is, value) of what a plan's content consists of, except its steps: axes, operands, primitives, ..."""
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
    """{name: short digest} of the parts of a plan's content, by which an error names the one that was changed."""
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
    """(schedule, steps, hash, digests) of what `canonical(content(...) | {"hash": ..., "digests": ...})` wrote.

    The digests are those of the parts; None if the text has none, as those of earlier versions. ValueError, of one line: it
    is something else, or more or less than that.
    """
    try:
        found = _dict(json.loads(text, object_pairs_hook=_object), "the text")
        for key, value in (("format", FORMAT), ("version", VERSION)):
            if _value(type(value), found.get(key), key) != value:
                raise ValueError(f"{key} is {found[key]!r:.60}, not {value!r}")
        _check_keys(found, [*KEYS, *(["digests"] if "digests" in found else [])], "the text")
        if not re.fullmatch("[0-9a-f]{64}", expected := _value(str, found.pop("hash"), "hash")):
            raise ValueError(f"hash is {expected!r:.60}, which is no SHA-256 in hexadecimal")
        digests = _digests_from(found.pop("digests")) if "digests" in found else None
        schedule, steps = _schedule_from(found), _steps_from(found["steps"])
        if (written := canonical(content(schedule, steps))) != canonical(found):
            raise ValueError(_first_difference(found, json.loads(written)))
        return schedule, steps, expected, digests
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


def _digests_from(found: Any) -> dict[str, str]:
    return {name: _value(str, each, f"digests[{name!r}]") for name, each in _dict(found, "digests").items()}


def _schedule_from(found: dict[str, Any]) -> LoopNest:
    """The schedule of a plan's content. ValueError: the program, the mesh or a primitive is none; the message names it."""
    program = _dict(found["program"], "program")
    options = [list(option) for option in _dict(program.get("options"), "program.options").items()]
    mesh = Mesh.of_axes(_value(tuple[MeshAxis, ...], found["mesh"], "mesh"))
    schedule = LoopNest(_value(Program, program | {"options": options}, "program"), mesh)
    for number, primitive in enumerate(_list(found["schedule"], "schedule")):
        where = f"schedule[{number}]"
        for place, argument in enumerate(_list(primitive, where)):
            is_factor = place == 2 and primitive[0] == "tile"
            _value(int if is_factor else str, argument, f"{where}[{place}]")
        try:
            schedule = schedule.apply([primitive])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return schedule


def _steps_from(found: Any) -> tuple[Step, ...]:
    """The steps of a plan's content. ValueError: one of them is none; it is named by its number."""
    steps = []
    for number, step in enumerate(_list(found, "steps")):
        if len(_list(step, f"steps[{number}]")) != 2:
            raise ValueError(f"steps[{number}] is {step!r:.60}, not [kind, values]")
        kind, values = step
        steps.append(step_from(_value(str, kind, f"steps[{number}][0]"), values, f"steps[{number}]"))
    return tuple(steps)


def _first_difference(found: Any, written: Any, where: str = "") -> str:
    """The first place where a text differs from what is written for the same plan, and how; empty if there is none."""
    if isinstance(found, dict) and isinstance(written, dict) and found.keys() == written.keys():
        inner = [(f"{where}.{key}".lstrip("."), found[key], written[key]) for key in found]
    elif isinstance(found, list) and isinstance(written, list) and len(found) == len(written):
        inner = [(f"{where}[{n}]", *pair) for n, pair in enumerate(zip(found, written, strict=True))]
    else:
        same = canonical(found) == canonical(written)
        return "" if same else f"{where} is {found!r:.60}, but a plan is written with {written!r:.60}"
    return next(filter(None, (_first_difference(x, y, place) for place, x, y in inner)), "")


def step_from(kind: str, values: Any, where: str = "step") -> Step:
    """The step that `content` wrote as (kind, values). ValueError: it is not one. where: what the error calls it."""
    if kind not in KINDS:
        raise ValueError(f"{where}: {kind!r:.60} is none of the steps {', '.join(KINDS)}")
    step: Step = _value(KINDS[kind], values, f"{where}, {kind}")
    return step


def _value(kind: Any, found: Any, where: str) -> Any:
    """A value of the text as a field of this type: lists become tuples and dataclasses. ValueError: it does not fit.

    where: which value it is, for the error.
    """
    parts = get_args(kind)
    if NoneType in parts:  # `type | None`
        return None if found is None else _value(parts[0], found, where)
    if get_origin(kind) is tuple:
        return _tuple_from(parts, found, where)
    if is_dataclass(kind):
        return _dataclass_from(kind, found, where)
    if kind is Any:
        return found
    if type(found) is not kind or (kind is str and not found.isprintable()):
        raise ValueError(f"{where} is {found!r:.60}, which is no {kind.__name__}")
    return found


def _tuple_from(kinds: tuple[Any, ...], found: Any, where: str) -> tuple[Any, ...]:
    """kinds: the types of the elements; (type, ...) for any number of one type."""
    kinds = kinds[:1] * len(_list(found, where)) if kinds[1:] == (...,) else kinds
    if len(_list(found, where)) != len(kinds):
        raise ValueError(f"{where} has {len(found)} elements, not {len(kinds)}")
    return tuple(_value(kind, each, f"{where}[{n}]") for n, (kind, each) in enumerate(zip(kinds, found, strict=True)))


def _list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{where} is {found!r:.60}, which is no list")
    return found


def _dict(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {found!r:.60}, which is no object")
    return found


def _check_keys(found: dict[str, Any], names: Sequence[str], where: str) -> None:
    """ValueError: an object has more or fewer keys than these; the message names the first of them."""
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown := [key for key in found if key not in names]:
        raise ValueError(f"{where} has {unknown[0]!r:.60}, which is none of {', '.join(names)}")


def _dataclass_from(kind: Any, found: Any, where: str) -> Any:
    """A dataclass from {field: value}, or from the list of its values."""
    names = [each.name for each in fields(kind) if each.init]
    if isinstance(found, list) and len(found) == len(names):
        found = dict(zip(names, found, strict=True))
    if not isinstance(found, dict):
        raise ValueError(f"{where} needs exactly {', '.join(names) or 'no fields'}, not {found!r:.60}")
    _check_keys(found, names, where)
    types = get_type_hints(kind)
    values = {name: _value(types[name], found[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
