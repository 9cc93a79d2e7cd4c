"""The FastAPI application: its routes, its access checks and its periodic clean-up."""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_vlm.io.loopback import is_loopback_host
from megatron_vlm.serve.http import (
    anthropic_routes,
    openai_routes,
    responses_routes,
    run_routes,
    sampling_routes,
    search_routes,
    training_routes,
    upload_routes,
)
from megatron_vlm.serve.http.api_keys import ApiKeys
from megatron_vlm.serve.http.chat_samples import ChatSamples, ChatTexts
from megatron_vlm.serve.http.context import (
    AppContext,
    Context,
    GroupCommit,
    Key,
    ResultWaiters,
    ServerFacts,
)
from megatron_vlm.serve.http.openai_routes import error_body
from megatron_vlm.serve.http.page import service_page
from megatron_vlm.serve.http.prometheus import Metrics
from megatron_vlm.serve.http.request_bodies import (
    Bodies,
    ErrorBody,
    HttpError,
    RequestLimits,
    add_handlers,
    tinker_error,
)
from megatron_vlm.serve.http.sampling_sessions import SESSION, SamplingSessions
from megatron_vlm.serve.journal.journal import Journal

SWEEP_SECONDS = 15.0
_log = logging.getLogger(__name__)
_pages = APIRouter()
_pages.add_api_route("/healthz", run_routes.healthz)  # in addition to /api/v1/healthz
_pages.add_api_route("/", run_routes.healthz, methods=["HEAD"])  # Claude Code asks it first


def make_app(
    journal: Journal,
    limits: RequestLimits,
    keys: ApiKeys | None,
    facts: ServerFacts,
    gauges: Mapping[str, float] = {},
    texts: ChatTexts | None = None,
    longest: int = 0,
    adapters: upload_routes.UploadedAdapters | None = None,
) -> FastAPI:
    """Build the HTTP application of the service. `gauges` is a dict that the service updates; it is
    read whenever a client requests the metrics. With `texts` it has the routes of OpenAI's and
    Anthropic's clients, for prompts and answers of `longest` tokens together, and with `adapters`
    the upload routes. Without keys, everybody who reaches the server may do everything;
    FrontServer then accepts only loopback addresses."""
    metrics = Metrics()
    journal.listen(metrics.count_completed)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.context = AppContext(
        *(limits, keys, facts, Bodies(limits), journal, metrics),
        *(GroupCommit(journal), ResultWaiters(journal), gauges),
    )
    app.state.tickets = run_routes.Tickets()
    add_handlers(app, error_at)
    for routes in (search_routes, run_routes, training_routes, sampling_routes):
        app.include_router(routes.router)
    app.include_router(run_routes.downloads)
    app.include_router(_pages)
    if adapters is not None:
        app.state.uploads = upload_routes.Uploads(journal, adapters)
        app.include_router(upload_routes.router)
        app.include_router(upload_routes.files)
    if texts is not None:
        source = SamplingSessions(app.state.context)
        app.state.chats = ChatSamples(app.state.context, texts, longest, source)
        journal.end_sessions(SESSION, "the service has started again")
        add_chat_routes(app, ("/v1", "/oai/api/v1"), ("/v1", "/anthropic/api/v1"))
    if keys is None:
        app.add_middleware(LoopbackOnly)
    return app


def add_chat_routes(app: FastAPI, openai: Sequence[str], anthropic: Sequence[str]) -> None:
    """Add the routes of OpenAI's and of Anthropic's clients under these prefixes."""
    for prefix in openai:
        for routes in (openai_routes, responses_routes):
            app.include_router(routes.router, prefix=prefix)
    for prefix in anthropic:
        app.include_router(anthropic_routes.router, prefix=prefix)


def error_at(path: str) -> ErrorBody:
    """Return the form of errors of the API that has this path."""
    is_agents = path.startswith("/e/")  # the name of its episode follows
    path = "/" + path.split("/", 3)[-1] if is_agents else path
    if path.startswith(("/v1/messages", "/anthropic/")):
        return anthropic_routes.anthropic_error
    return error_body if is_agents or path.startswith(("/v1/", "/oai/")) else tinker_error


class LoopbackOnly:
    """Middleware that refuses foreign requests to a service without keys. Otherwise a web page in a
    browser on this machine could send any request. A request is refused if its Host is not a
    loopback name, or if its Origin is a page of another host."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {} if scope["type"] != "http" else dict(scope["headers"])
        host = headers.get(b"host", b"localhost").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        foreign = origin != "" and urlsplit(origin).netloc != host
        if foreign or not is_loopback_host(host):
            text = f"{origin or host}: without keys this server answers on loopback alone"
            text += "; set serve.keys" * (not scope["path"].startswith("/e/"))
            body = error_at(scope["path"])(HttpError(403, text))
            await JSONResponse(body, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@_pages.get("/metrics")
async def figures(context: Context, key: Key) -> PlainTextResponse:
    """Return the metrics for Prometheus, which sends the key by basic authentication."""
    now = time.time()
    waiting = context.journal.open_calls()
    gauges = {
        "open_calls": len(waiting),
        "oldest_open_call_seconds": max((now - call.accepted for call in waiting), default=0.0),
        "models": sum(m.state in ("creating", "ready") for m in context.journal.models()),
        "samplers": len(context.journal.samplers()),
        "sessions": context.journal.active_sessions(None, 600.0),
        "bodies_bytes": context.bodies.held,
        **context.gauges,
    }
    counters = {
        "received_bytes_total": context.bodies.received,
        "contradicting_retries_total": context.journal.contradictions,
    }
    kind = "text/plain; version=0.0.4"
    return PlainTextResponse(context.metrics.text(gauges, counters), media_type=kind)


@_pages.get("/")
async def page(context: Context, key: Key) -> HTMLResponse:
    """Return an HTML page with the runs, checkpoints and waiting calls of this key."""
    return HTMLResponse(service_page(context.journal, context.facts, key))


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: AppContext = app.state.context
    task = asyncio.create_task(_sweep(app))
    try:
        yield
    finally:
        context.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sweep(app: FastAPI) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        if (uploads := getattr(app.state, "uploads", None)) is not None:
            uploads.sweep()
        try:
            await asyncio.to_thread(app.state.context.journal.sweep)
        except (sqlite3.Error, OSError) as error:
            _log.warning("data that is no longer needed could not be removed: %s", error)
