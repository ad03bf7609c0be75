"""Checks JSON values against the part of JSON Schema that the table of parameters uses; errors name the value."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import bad_request

KINDS: dict[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict, "null": type(None)
}  # fmt: skip
NOT_IMPLEMENTED = "x-not-implemented"  # a keyword: values beside those of `enum` are not implemented
SHOWN = 60  # characters of a wrong value in the error

# {keyword: (the rule for a value and the keyword's bound, what a value must be)}
RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, bound: value >= bound, "at least {}"),
    "maximum": (lambda value, bound: value <= bound, "at most {}"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "above {}"),
    "minLength": (lambda value, bound: len(value) >= bound, "at least {} character(s) long"),
    "maxLength": (lambda value, bound: len(value) <= bound, "at most {} characters long"),
    "minItems": (lambda value, bound: len(value) >= bound, "a list of at least {} element(s)"),
    "maxItems": (lambda value, bound: len(value) <= bound, "a list of at most {} elements"),
    "maxProperties": (lambda value, bound: len(value) <= bound, "an object with at most {} fields"),
    "enum": (lambda value, choices: any(_is_same(value, each) for each in choices), "one of {}"),
}


def check(value: Any, schema: Mapping[str, Any], name: str) -> None:
    """ApiError 400 that names the value, its place `name` and the rule that it breaks, unless it matches the schema.

    Fields of objects that are null count as left out. Those that `additionalProperties` describes must not be null: their
    names are data, so they have no default.
    """
    if "anyOf" in schema:
        return _check_alternatives(value, schema, name)
    if "type" in schema and not _has_type(value, schema["type"]):
        raise bad_request(f"{name}={_shown(value)} must be of type {schema['type']}", name)
    for keyword, (holds, text) in RULES.items():
        if keyword in schema and not holds(value, schema[keyword]):
            if NOT_IMPLEMENTED in schema:
                raise bad_request(f"{name} is not implemented", name)
            bound = schema[keyword]
            bound = ", ".join(map(json.dumps, bound)) if keyword == "enum" else bound
            raise bad_request(f"{name}={_shown(value)} must be {text.format(bound)}", name)
    if isinstance(value, list) and "items" in schema:
        for index, element in enumerate(value):
            check(element, schema["items"], f"{name}[{index}]")
    if isinstance(value, dict):
        _check_fields(value, schema, name)


def _check_alternatives(value: Any, schema: Mapping[str, Any], name: str) -> None:
    """Check a value against the alternative that it comes closest to: one of its type, with elements of its type."""
    if not any(_fits(value, each) for each in schema["anyOf"]):
        raise bad_request(f"{name}={_shown(value)} must be {schema['description']}", name)
    check(value, next(each for each in schema["anyOf"] if _fits(value, each)), name)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether the value and, in a list, its first element have the schema's type."""
    if not _has_type(value, schema["type"]):
        return False
    return not isinstance(value, list) or not value or "items" not in schema or _fits(value[0], schema["items"])


def _check_fields(value: dict[str, Any], schema: Mapping[str, Any], name: str) -> None:
    """Check the fields of an object."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for field in schema.get("required", ()):
        if value.get(field) is None:
            raise bad_request(f"{name} needs the field {field}", f"{name}.{field}")
    for field, element in value.items():
        rule = properties.get(field, others)
        if element is None and (field in properties or rule is False):
            continue
        if rule is False:
            raise bad_request(f"{name}.{_shown(field)} is not implemented", f"{name}.{field}")
        if isinstance(rule, Mapping):
            check(element, rule, f"{name}.{field}")


def _has_type(value: Any, kind: str) -> bool:
    """Whether a JSON value has a type of JSON Schema. 1.0 is no integer, and an infinite number has no type."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS[kind]) and not (isinstance(value, float) and not math.isfinite(value))


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: Any) -> str:
    """The beginning of a value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
