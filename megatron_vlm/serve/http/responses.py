"""Error responses for clients: a status and a JSON body, which is never empty."""

import logging
import sqlite3

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from megatron_vlm.io.printable import escape_controls

_log = logging.getLogger(__name__)


class HttpError(Exception):
    """An error that becomes a response with this status. A client retries 408, 409, 429 and 5xx by
    itself."""

    def __init__(
        self,
        status: int,
        text: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        """`param` and `code` are for OpenAI's clients: the field, and a name of the error."""
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers
        self.param, self.code = param, code


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error response. `error` and `detail` hold what happened and what to do; `category`
    is "server" from status 500 on, otherwise "user"."""
    kind = "server" if status >= 500 else "user"
    body = {"error": escape_controls(text), "detail": escape_controls(text), "category": kind}
    return JSONResponse(body, status, headers)


def unsupported_path(path: str) -> str:
    """Return the message for a path that no route has."""
    return (
        f"{path[:200]} is not supported by this service; docs/serve.md lists what is, and a newer "
        "client may ask for what came after it"
    )


def add_handlers(app: FastAPI) -> None:
    """Register handlers so that every failed request gets a JSON body."""

    @app.exception_handler(HttpError)
    async def refused(_: Request, error: HttpError) -> JSONResponse:
        headers = {name.replace("_", "-"): value for name, value in error.headers.items()}
        return refusal(error.status, error.text, headers)

    @app.exception_handler(RequestValidationError)
    async def query(_: Request, error: RequestValidationError) -> JSONResponse:
        where = error.errors()[0]
        return refusal(422, f"{where['loc'][-1]}: {where['msg']}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}"
        known = {404: unsupported_path(text), 405: unsupported_path(text)}
        headers = dict(error.headers or {})
        return refusal(error.status_code, known.get(error.status_code, str(error.detail)), headers)

    @app.exception_handler(sqlite3.Error)
    async def journal(_: Request, error: sqlite3.Error) -> JSONResponse:
        _log.error("the journal cannot be written: %s", error)
        return refusal(503, f"the journal cannot be written: {error}")

    @app.exception_handler(OSError)
    async def operating_system(request: Request, error: OSError) -> JSONResponse:
        # The operator sees the path. The client sends the request again.
        _log.error("%s: %s", request.url.path, error)
        reason = error.strerror or type(error).__name__
        return refusal(503, f"{request.url.path}: the server cannot read or write a file: {reason}")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # The server logs the traceback; a client need not see the server's files.
        return refusal(500, f"{request.url.path}: {type(error).__name__} in the server")
