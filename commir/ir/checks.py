"""Checks of the arguments of the public functions, so that a wrong kind of object gets one clear error."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

HINTS = {
    "Program": "call the operator to get a Program, as in nearest()",
    "Mesh": "such as Mesh(gpu=4)",
    "Plan": "Schedule.lower() makes one, and search() a list of them",
    "Sequence": "such as the plans that search() returns",
    "GraphNode": "such as GraphNode(name, program, inputs)",
    "LoopNest": "Schedule(program, mesh) makes one",
}


def shown(value: Any) -> str:
    """The first 60 characters of a value's repr in one line, as errors show it; that of an array or tensor may have several.

    A number of another library, such as NumPy's int64, is followed by "(not Python's int)".
    """
    text = " ".join(line.strip() for line in repr(value).splitlines())[:60]
    is_foreign = isinstance(value, Real) and not isinstance(value, int | float)
    return f"{text} (not Python's {'int' if isinstance(value, Integral) else 'float'})" if is_foreign else text


def is_among(name: Any, names: Iterable[str]) -> bool:
    """Whether a value that may be no text, for example an array, is one of some names."""
    return isinstance(name, str) and name in names


def as_name(value: Any) -> str:
    """A printable text as it is; another value as `shown`."""
    return value if isinstance(value, str) and value.isprintable() else shown(value)


def call_text(name: str, *arguments: Any) -> str:
    """A call, as errors name it: tile(q, 2)."""
    return f"{name}({', '.join(map(as_name, arguments))})"


def check_type(caller: str, value: Any, kind: type) -> None:
    """ValueError unless an argument of `caller` is of this type, one of HINTS."""
    if not isinstance(value, kind):
        raise ValueError(f"{caller} takes {kind.__name__} ({HINTS[kind.__name__]}), not {shown(value)}")


def check_fields(value: object, name: str) -> None:
    """ValueError unless the fields of a dataclass have the types of their annotations. name: what the error calls it."""
    for key, kind, fits in _types(type(value)):  # type: ignore[arg-type]  # a class has a hash
        if not fits(getattr(value, key)):
            words = str(kind).replace("commir.ir.program.", "") if get_args(kind) else kind.__name__
            raise ValueError(f"{name}: {key} is {shown(getattr(value, key))}, and no {words}")


@lru_cache
def _types(kind: type) -> list[tuple[str, Any, Callable[[Any], bool]]]:
    """(field, its type, whether a value has this type) of the arguments of a dataclass."""
    types = get_type_hints(kind)
    return [(each.name, types[each.name], _test_of(types[each.name])) for each in fields(kind) if each.init]


def _test_of(kind: Any) -> Callable[[Any], bool]:
    """Whether a value has the type of an annotation, as a function: a search checks thousands of values."""
    parts = [_test_of(part) for part in get_args(kind) if part is not ...]
    if get_origin(kind) is tuple and ... in get_args(kind):
        (of_each,) = parts
        return lambda value: isinstance(value, tuple) and all(map(of_each, value))
    if get_origin(kind) is tuple:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(fits(each) for fits, each in zip(parts, value, strict=True))
        )
    if get_origin(kind) is Mapping:
        of_key, of_value = parts
        return lambda value: (
            isinstance(value, Mapping) and all(of_key(key) and of_value(each) for key, each in value.items())
        )
    if parts:  # one of several
        return lambda value: any(fits(value) for fits in parts)
    return lambda value: kind is Any or isinstance(value, kind)


def check_call(name: str, function: Callable[..., Any], arguments: Iterable[Any]) -> Callable[..., Any]:
    """The function, if it takes so many arguments. ValueError: it does not. name: what the error calls it."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return function


def check_rows(name: str, value: Any) -> list[tuple[Any, ...]]:
    """An iterable of iterables as a list of tuples. ValueError: it is none. name: what the error calls it."""
    try:
        return [tuple(each) for each in value]
    except TypeError:
        raise ValueError(f"{name} are given as lists in a list, not {shown(value)}") from None


def check_sizes(where: str = "", /, **sizes: Any) -> None:
    """ValueError unless each is an int of at least 1; it names the first that is none. where: the error's beginning."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{where}{name}={shown(size)}: it must be a whole number of at least 1")


def check_flags(**flags: Any) -> None:
    """ValueError unless each is True or False; the error names the first that is not."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name}={shown(flag)}: it must be True or False")


def check_memory(memory: Any) -> None:
    """ValueError unless a limit of memory is a number of bytes, at least 0, or None."""
    if memory is not None and (type(memory) not in (int, float) or not memory >= 0):  # or NaN
        raise ValueError(f"memory={shown(memory)}: it must be a number of bytes of at least 0, or None for no limit")


def check_name(what: str, name: Any) -> None:
    """ValueError unless a name is an identifier. what: whose name it is, for the error."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{shown(name)} is no name for {what}: it must be an identifier")


def check_options(options: Iterable[tuple[str, Any]]) -> None:
    """ValueError: an option is no finite number, string or None, or is there twice."""
    for name, value in options:
        check_name("an option", name)
        is_finite = not isinstance(value, float) or math.isfinite(value)  # as JSON, and so a plan's hash, needs it
        if not isinstance(value, bool | int | float | str | None) or not is_finite:
            raise ValueError(f"option {name} is {shown(value)}; it must be a finite number, a string or None")
    refuse_duplicates("option", (name for name, _ in options))


def refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    """ValueError: a name is there twice. kind: what is called so."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two {'axes' if kind == 'axis' else kind + 's'} are called {name}")
        seen.add(name)
