"""The routes of the server, and how errors become replies."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .access_log import AccessLog
from .endpoint import EmbeddingEndpoint, GenerationEndpoint, WorkEndpoint
from .errors import ApiError
from .hosts import PROBES, Hosts
from .keys import Keys
from .metrics import Metrics
from .openapi import GENERATING, description
from .page import read_page
from .prepared_request import ServedModel
from .reply_models import ModelCard, ModelList, ReplyModel, Status
from .service import Service
from .tokenization import detokenize, tokenize

EXPOSED = {"Access-Control-Expose-Headers": "Retry-After, X-Request-Id"}
PREFLIGHT = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}


def make_app(service: Service, served: ServedModel, keys: Keys, metrics: Metrics, hosts: Hosts) -> AccessLog:
    """The ASGI application.

    If there are API keys, the paths under /v1, /tokenize and /detokenize need one; other paths do not. hosts: the hosts that
    requests may name; requests to PROBES may name any.
    """
    html, page_headers = read_page()
    start = int(time.time())

    async def page(request: Request) -> Response:
        return Response(html, headers=page_headers, media_type="text/html")

    async def health(request: Request) -> Response:
        return _json(Status(status="ok"))

    async def ready(request: Request) -> Response:
        return _json(Status(status="ready")) if service.is_ready else _json(Status(status="unavailable"), 503)

    async def metrics_text(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def software(request: Request) -> Response:
        return JSONResponse({"version": software_version()})

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(software_version()))

    async def models(request: Request) -> Response:
        request.scope["record"].key = keys.owner(request.headers)
        shared: dict[str, Any] = dict(
            object="model", created=start, owned_by="megatron-ssm", max_model_len=served.max_length,
            has_chat_template=served.template.path is not None, has_reasoning=served.template.reasons,
        )  # fmt: skip
        cards = {
            name: ModelCard(id=name, root=root, parent=served.name if name in served.adapters else None, **shared)
            for name, root in served.roots.items()
        }
        if "model" not in request.path_params:
            return _json(ModelList(object="list", data=list(cards.values())))
        name = request.path_params["model"]
        served.adapter_of(name)
        return _json(cards[name])

    get = {"/": page, "/health": health, "/ready": ready, "/metrics": metrics_text, "/openapi.json": openapi,
           "/version": software, "/v1/models": models, "/v1/models/{model:path}": models}  # fmt: skip
    routes = [Route("/ping", health, methods=["GET", "POST"])]
    routes += [Route(path, function, methods=["GET"]) for path, function in get.items()]
    for path, (body, _, _) in GENERATING.items():
        routes.append(Route(path, GenerationEndpoint(body, service, served, keys, metrics), methods=["POST"]))
    routes.append(Route("/v1/embeddings", EmbeddingEndpoint(service, served, keys), methods=["POST"]))
    for path, work in {"/tokenize": tokenize, "/detokenize": detokenize}.items():
        routes.append(Route(path, WorkEndpoint(work, service, served, keys), methods=["POST"]))
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
    app = _Guarded(Starlette(routes=routes, exception_handlers=handlers), hosts)
    paths = {route.path for route in routes}
    return AccessLog(app, lambda record: metrics.observe_request(_label(record.path, paths), record))


class _Guarded:
    """Refuses requests that name a host that is not allowed, or come from a page of such a host; PROBES are always answered.

    Pages of the allowed origins may read replies (CORS). A browser's preflight request (OPTIONS) is answered without a key.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            if scope["path"] not in PROBES:
                self._hosts.check(headers.get("host"), headers.get("origin"))
        except ApiError as error:
            scope["record"].error = error.for_log
            return await _json(error.reply, error.status)(scope, receive, send)
        origin = headers.get("origin", "")
        if self._hosts.shares_with(origin):
            scope["record"].headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **EXPOSED}
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                asked = headers.get("access-control-request-headers", "")
                permission = {**PREFLIGHT, **({"Access-Control-Allow-Headers": asked} if asked else {})}
                return await Response(status_code=204, headers=permission)(scope, receive, send)
        await self._app(scope, receive, send)


def _label(path: str, paths: set[str]) -> str:
    """The path as the documentation writes it, or "other": clients may invent any number of paths, and each label takes
    memory.
    """
    if path.startswith("/v1/models/"):
        return "/v1/models/NAME"
    return path if path in paths else "other"


def _json(reply: ReplyModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(reply.to_json(), status, headers, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["record"].error = error.for_log
    return _json(error.reply, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """The reply to a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path'][:100]}: {error.detail}"  # request.url may not be a valid one
    request.scope["record"].error = str(error.detail)
    return _json(ApiError(error.status_code, message).reply, error.status_code, dict(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    """The reply after an error of the program. The traceback goes to the log."""
    return _json(ApiError(500, "the server has failed to handle the request").reply, 500)


def software_version() -> str:
    """Return the version of this package, if it is installed."""
    try:
        return version("megatron-ssm")
    except PackageNotFoundError:
        return "unknown"
