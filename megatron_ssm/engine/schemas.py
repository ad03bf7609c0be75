"""The parts of a JSON schema that are schemas themselves. Loads no torch."""

from collections.abc import Callable
from typing import Any

NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("const", "enum", "default", "examples", "x-guidance"))  # keys whose values are not schemas


def map_schema(schema: Any, function: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a copy of a schema with `function(copy)` in place of each schema in it, the innermost ones first."""
    if isinstance(schema, list):
        return [map_schema(each, function) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            copy[name] = {each: map_schema(part, function) for each, part in value.items()}
        else:
            copy[name] = value if name in VALUES else map_schema(value, function)
    return function(copy)
