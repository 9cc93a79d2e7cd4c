"""Access to the server from this machine alone, and from none of the other pages in its browser."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",  # no other page puts its own over a button
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LocalOnly:
    """Middleware that refuses a request whose Host is not a loopback name, or that a page of
    another origin sends. What changes something needs the Origin of this server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if _is_foreign(Headers(scope=scope), scope["method"]):
            text = "megatron-vlm watch answers only its own pages, at a loopback address\n"
            await PlainTextResponse(text, 403)(scope, receive, send_safely)
        else:
            await self._app(scope, receive, send_safely)


def _is_foreign(headers: Headers, method: str) -> bool:
    host, origin = headers.get("host", ""), headers.get("origin")
    if _name(host) not in ("localhost", "127.0.0.1", "::1"):
        return True
    if origin is None:
        return method not in ("GET", "HEAD") or _is_embedded(headers)
    return origin not in (f"http://{host}", f"https://{host}")


def _is_embedded(headers: Headers) -> bool:
    """Return whether a page of another site asks for this, but for a link that a reader follows."""
    site = headers.get("sec-fetch-site", "none")
    return site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate"


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
