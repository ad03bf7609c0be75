"""Plans as JSON text, which parses back, and their digest. Nothing in it is code."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from commir.ir.mesh import Mesh
from commir.ir.program import Axis, Operand, Program, Result, Scan
from commir.scheduling.loop_nest import LoopNest

from .steps import KINDS, Place, Step

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


def parse(text: str) -> tuple[LoopNest, tuple[Step, ...], Any]:
    """(schedule, steps, hash) of what `canonical(content(...) | {"hash": ...})` wrote. ValueError: it is something else."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError(f"it is {found['format']!r}, version {found['version']!r}")
        schedule = LoopNest(_program_from(found["program"]), _mesh_from(found["mesh"])).apply(found["schedule"])
        return schedule, tuple(step_from(kind, values) for kind, values in found["steps"]), found["hash"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is no plan, or a damaged one: {type(error).__name__}: {error}") from None


def _program_from(fields: dict[str, Any]) -> Program:
    def operand(each: dict[str, Any]) -> Operand:
        lists = {name: tuple(each[name]) for name in ("axes", "source")}
        return Operand(**each | lists | {"groups": tuple(map(tuple, each["groups"]))})

    parts = {
        "axes": tuple(Axis(**each) for each in fields["axes"]),
        "inputs": tuple(map(operand, fields["inputs"])),
        "outputs": tuple(map(operand, fields["outputs"])),
        "results": tuple(Result(each["monoid"], tuple(each["outputs"])) for each in fields["results"]),
        "options": tuple(fields["options"].items()),
        "scan": None if fields["scan"] is None else Scan(**fields["scan"]),
        "internal": tuple(map(operand, fields["internal"])),
    }
    return Program(**fields | parts)


def _mesh_from(axes: list[dict[str, Any]]) -> Mesh:
    """The mesh with these axes, of which consecutive ones of one level are parts of an axis."""
    levels: dict[str, dict[str, int]] = {}
    for each in axes:
        levels.setdefault(each["level"], {})[each["name"]] = each["size"]
    mesh = Mesh(None, **{level: math.prod(parts.values()) for level, parts in levels.items()})
    for level, parts in levels.items():
        if list(parts) != [level]:
            mesh = mesh.split(level, **parts)
    return mesh


def step_from(kind: str, values: Sequence[Any]) -> Step:
    """The step that `content` wrote as (kind, values). ValueError: it is not one."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of the steps {', '.join(KINDS)}")
    fields: dict[str, Any] = dict(zip(KINDS[kind].__dataclass_fields__, values, strict=True))
    if "moves" in fields:
        fields["moves"] = tuple((name, *(Place(*place) for place in places)) for name, *places in fields["moves"])
    make: Callable[..., Step] = KINDS[kind]
    return make(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
