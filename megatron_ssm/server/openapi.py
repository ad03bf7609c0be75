"""The OpenAPI description of the server, at /openapi.json."""

import re
from typing import Any

from pydantic import BaseModel

from .reply_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeReply,
    EmbeddingReply,
    ErrorReply,
    ModelCard,
    ModelList,
    Status,
    TokenizeReply,
)
from .request_models import Body, ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from .response_models import ModelResponse, ResponseEvent
from .response_request import ResponseRequest

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
# {path: (body of the request, reply, event of a stream)}
GENERATING: dict[str, tuple[type[Body | ResponseRequest], type[BaseModel], type[BaseModel]]] = {
    "/v1/completions": (CompletionRequest, Completion, Completion),
    "/v1/chat/completions": (ChatRequest, ChatCompletion, ChatCompletionChunk),
    "/v1/responses": (ResponseRequest, ModelResponse, ResponseEvent),
}
# {path: (body of the request, reply)}
COMPUTING: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "/v1/embeddings": (EmbeddingRequest, EmbeddingReply),
    "/tokenize": (TokenizeRequest, TokenizeReply),
    "/detokenize": (DetokenizeRequest, DetokenizeReply),
}
# {path: (summary, media type, the JSON of the reply, errors)}
READING: dict[str, tuple[str, str, type[BaseModel] | None, tuple[str, ...]]] = {
    "/": ("A chat page for browsers.", "text/html", None, ()),
    "/v1/models": ("The served model and its adapters.", "application/json", ModelList, ("401",)),
    "/v1/models/{model}": ("The served model, or one of its adapters.", "application/json", ModelCard, ("401", "404")),
    "/health": ("Status 200 while the process runs.", "application/json", Status, ()),
    "/ping": ("Another name of /health.", "application/json", Status, ()),
    "/version": ("The version of the package.", "application/json", None, ()),
    "/ready": ("Status 200 while requests are taken, else 503.", "application/json", Status, ()),
    "/metrics": ("Metrics in Prometheus' text format.", "text/plain", None, ()),
}


def description(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description, made from the models of requests and replies."""
    paths: dict[str, Any] = {path: {"post": _generating(path, *models)} for path, models in GENERATING.items()}
    paths |= {path: {"post": _computing(path, *models)} for path, models in COMPUTING.items()}
    paths |= {path: {"get": _reading(path, *row)} for path, row in READING.items()}
    return {"openapi": "3.1.0", "info": {"title": "megatron-ssm", "version": version}, "paths": paths}


def _generating(path: str, body: type[BaseModel], reply: type[BaseModel], event: type[BaseModel]) -> dict[str, Any]:
    """The operation of an endpoint that generates."""
    content = _content("application/json", reply) | _content("text/event-stream", event)
    return {
        "summary": f"OpenAI's {path.removeprefix('/v1/')}.",
        "requestBody": {"required": True, "content": _content("application/json", body)},
        "responses": _responses(content, tuple(ERRORS)),
    }


def _computing(path: str, body: type[BaseModel], reply: type[BaseModel]) -> dict[str, Any]:
    """The operation of an endpoint whose reply is a JSON object."""
    name = path.rpartition("/")[2]
    return {
        "summary": f"OpenAI's {name}." if path.startswith("/v1/") else f"vLLM's {name}.",
        "requestBody": {"required": True, "content": _content("application/json", body)},
        "responses": _responses(_content("application/json", reply), tuple(ERRORS)),
    }


def _reading(
    path: str, summary: str, media: str, reply: type[BaseModel] | None, errors: tuple[str, ...]
) -> dict[str, Any]:
    """The operation of a path with the method GET."""
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {"summary": summary, "parameters": parameters, "responses": _responses(_content(media, reply), errors)}


def _responses(content: dict[str, Any], errors: tuple[str, ...]) -> dict[str, Any]:
    error = _content("application/json", ErrorReply)
    failures = {status: {"description": ERRORS[status], "content": error} for status in errors}
    return {"200": {"description": "The reply.", "content": content}, **failures}


def _content(media: str, model: type[BaseModel] | None) -> dict[str, Any]:
    """The content of a body, by its media type."""
    if model is None:
        return {media: {}}
    schema = model.model_json_schema()
    return {media: {"schema": _inlined(schema, schema.pop("$defs", {}))}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a JSON schema with definitions in place of references; variants of an object may overlap (anyOf)."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    made = {"anyOf" if name == "oneOf" else name: _inlined(part, definitions) for name, part in schema.items()}
    if made.get("additionalProperties") is True:
        del made["additionalProperties"]
    if "const" in made:
        made["enum"] = [made.pop("const")]
    return made
