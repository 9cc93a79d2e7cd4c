"""Errors in the form of OpenAI's and Anthropic's APIs, and streams of events."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.serve.http.chat_samples import ChatSamples
from megatron_vlm.serve.http.context import complaints
from megatron_vlm.serve.http.request_bodies import ErrorBody, HttpError

_log = logging.getLogger(__name__)
Json: TypeAlias = dict[str, Any]
End: TypeAlias = Callable[[], Awaitable[None]]


async def _chats(request: Request) -> ChatSamples:
    return request.app.state.chats


Chats = Annotated[ChatSamples, Depends(_chats)]


def as_http_error(error: Exception) -> HttpError:
    """Return any error as a response. A mistake of the client is a 400."""
    if isinstance(error, HttpError):
        is_mistake = error.status == 422
        return HttpError(400, error.text, error.param, error.code) if is_mistake else error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]["loc"]
        return HttpError(400, complaints(error), param=str(first[0]) if first else None)
    if isinstance(error, MegatronVLMError):
        return HttpError(400, str(error), param=error.key or None)
    _log.error("a request has failed", exc_info=error)
    return HttpError(500, f"{type(error).__name__} in the server")


def route_with(body_of: ErrorBody) -> type[APIRoute]:
    """Return a class of routes whose errors have this body."""

    class ApiRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                try:
                    return await handle(request)
                except Exception as error:
                    refused = as_http_error(error)
                    headers = {k.replace("_", "-"): v for k, v in refused.headers.items()}
                    if refused.status == 429:
                        headers["Retry-After"] = "1"
                    return JSONResponse(body_of(refused), refused.status, headers)

            return answer

    return ApiRoute


def safe_text(error: HttpError) -> str:
    return escape_controls(error.text)


class EventStream(StreamingResponse):
    """A stream of events. `end` runs when it has ended or nobody reads it any more, also before its
    first event."""

    def __init__(self, events: AsyncIterator[str], end: End | None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._end is not None:
                await self._end()


def streamed(
    events: AsyncIterator[str], failed: Callable[[HttpError], str], end: End | None = None
) -> EventStream:
    """Return a stream of events. An error after its beginning is its last event."""

    async def guarded() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield failed(as_http_error(error))

    return EventStream(guarded(), end)


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"
