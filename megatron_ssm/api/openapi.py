"""The OpenAPI description of the server, at /openapi.json."""

import re
from typing import Any

from .parameters import BY_ENDPOINT, body_schema

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    "400": "A parameter is unknown, not implemented, or out of range; `param` names it.",
    "401": "There is no valid API key.",
    "403": "The header Host or Origin names a host that is not allowed.",
    "404": "There is no such model.",
    "408": "The body has not arrived in time.",
    "413": "The body is too large.",
    "429": "Too many requests are waiting; Retry-After says when to try again.",
    "503": "The server is shutting down, or has lost a rank.",
    "504": "The reply has taken too long.",
}
OTHERS = {
    "/": "A chat page for browsers.",
    "/v1/models": "The served model, in a list.",
    "/v1/models/{model}": "The served model.",
    "/health": "Whether the process runs.",
    "/ready": "Whether requests are taken: 200, or 503.",
    "/metrics": "Metrics in Prometheus' text format.",
}


def description(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description, made from the table of parameters."""
    paths: dict[str, Any] = {f"/v1/{name}": {"post": _operation(name)} for name in BY_ENDPOINT}
    paths |= {path: {"get": _reading(path, text)} for path, text in OTHERS.items()}
    return {"openapi": "3.1.0", "info": {"title": "megatron-ssm", "version": version}, "paths": paths}


def _operation(name: str) -> dict[str, Any]:
    """An endpoint that generates."""
    content = {"application/json": {"schema": _published(body_schema(name))}}
    return {
        "summary": f"OpenAI's {name}.",
        "requestBody": {"required": True, "content": content},
        "responses": _responses(ERRORS),
    }


def _reading(path: str, summary: str) -> dict[str, Any]:
    """A path that is only read."""
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    applies = {"401": path.startswith("/v1/"), "404": bool(names)}
    responses = _responses({status: text for status, text in ERRORS.items() if applies.get(status)})
    return {"summary": summary, **({"parameters": parameters} if names else {}), "responses": responses}


def _published(schema: dict[str, Any], is_nullable: bool = False) -> dict[str, Any]:
    """A schema in which null is a value of the fields that may be left out, as `schema.check` has it."""
    made, required = dict(schema), schema.get("required", ())
    if "properties" in schema:
        fields = schema["properties"].items()
        made["properties"] = {name: _published(each, name not in required) for name, each in fields}
    if "items" in schema:
        made["items"] = _published(schema["items"])
    if "anyOf" in schema:
        made["anyOf"] = [*map(_published, schema["anyOf"]), *([{"type": "null"}] if is_nullable else [])]
    if is_nullable and "type" in schema:
        made["type"] = [schema["type"], "null"]
    if is_nullable and "enum" in schema:
        made["enum"] = [*schema["enum"], None]
    return made


def _responses(errors: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": ERROR}}
    failures = {status: {"description": text, "content": content} for status, text in errors.items()}
    return {"200": {"description": "The reply."}, **failures}
