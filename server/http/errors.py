"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

import json
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Types by status; any other status is a `server_error` from 500 on, else an `invalid_request_error`."""
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses after which a client may retry, by default after a second."""
NO_TOKEN = "'prompt' has no token: this model's vocabulary has none of its characters"


@dataclass(eq=False)
class ApiError(Exception):
    """The error that answers a request. retry_after: seconds until the client may retry."""

    message: str
    _: KW_ONLY
    status: int = 400
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def last_answer(self) -> bytes:
        """Return a whole HTTP response that closes the connection, for code below the ASGI app."""
        body, phrase = json.dumps(self.body()), HTTPStatus(self.status).phrase
        again = "Retry-After: 1\r\n" if self.status in AGAIN else ""
        head = f"HTTP/1.1 {self.status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}{again}Connection: close\r\n\r\n{body}".encode()

    def response(self) -> JSONResponse:
        headers = {}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers = {"WWW-Authenticate": "Bearer"}
        elif self.retry_after is not None or self.status in AGAIN:
            headers = {"Retry-After": str(self.retry_after or 1)}
        return JSONResponse(self.body(), self.status, headers)


def invalid_value(param: str | None, message: str) -> ApiError:
    """Return the error for a field with a value that cannot be served."""
    return ApiError(message, param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a field, or a value of it, that this server does not support."""
    return ApiError(message, param=param, code="unsupported_parameter")


def of_stream(event: str) -> JSONResponse | None:
    """Return the response in place of a stream with an error as its first `event`, with its status; else None."""
    if not event.startswith('data: {"error":'):
        return None
    error = json.loads(event.removeprefix("data: "))["error"]
    statuses = (status for status, name in TYPES.items() if name == error["type"])
    status = next(statuses, 500 if error["type"] == "server_error" else 400)
    return ApiError(error["message"], status=status, param=error["param"], code=error["code"]).response()


def of_engine(message: str, status: int, param: str | None = None) -> ApiError:
    """Return our error for SGLang's message and status."""
    message = message.partition("\n")[0]  # a schema error goes on about JSON Schema itself
    if "waiting timeout reached" in message:
        return ApiError("the request waited longer than it may here; try again", status=429, code="queue_timeout")
    if "running timeout reached" in message:
        return ApiError("the request ran longer than it may here; ask for less", status=504, code="request_timeout")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        status = HTTPStatus.INTERNAL_SERVER_ERROR  # proxies send a 503 to another server
    if "LoRA adapter" in message and "loaded" in message:  # it was unloaded after our check
        return ApiError("the adapter is not served here any more", status=404, param="model", code="model_not_found")
    if message == NO_TOKEN:
        param = "prompt"
    # OpenAI's clients check for this code.
    code = "context_length_exceeded" if "context length" in message else None
    return ApiError(message, status=status, param=param, code=code)


def install(app: FastAPI) -> None:
    """Send every error of the app and the framework in this format."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(ClientDisconnect)
    async def on_incomplete(request: Request, error: ClientDisconnect) -> JSONResponse:
        # Only log and metrics see it: the client has left, or `connection.py` has answered and closed.
        return ApiError("the request did not come whole", status=408, code="receive_timeout").response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND:
            message = f"there is no {request.method} {request.url.path} here; see GET /v1/models and the README"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.url.path} does not take {request.method}"
        return JSONResponse(ApiError(message, status=error.status_code).body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this; the client gets no internals.
        return ApiError("internal error; the server's log says more", status=500).response()
