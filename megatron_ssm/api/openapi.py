"""The OpenAPI description of the server, at /openapi.json."""

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
    "/v1/models": "The served model.",
    "/health": "Whether the process runs.",
    "/ready": "Whether requests are taken: 200, or 503.",
    "/metrics": "Metrics in Prometheus' text format.",
}


def description(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description, made from the table of parameters."""
    paths: dict[str, Any] = {f"/v1/{name}": {"post": _operation(name)} for name in BY_ENDPOINT}
    paths |= {path: {"get": {"summary": text, "responses": _responses({})}} for path, text in OTHERS.items()}
    return {"openapi": "3.1.0", "info": {"title": "megatron-ssm", "version": version}, "paths": paths}


def _operation(name: str) -> dict[str, Any]:
    """An endpoint that generates."""
    content = {"application/json": {"schema": body_schema(name)}}
    return {
        "summary": f"OpenAI's {name}.",
        "requestBody": {"required": True, "content": content},
        "responses": _responses(ERRORS),
    }


def _responses(errors: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": ERROR}}
    failures = {status: {"description": text, "content": content} for status, text in errors.items()}
    return {"200": {"description": "The reply."}, **failures}
