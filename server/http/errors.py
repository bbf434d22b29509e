"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers = {"WWW-Authenticate": "Bearer"}
        body = error_body(self.message, self.status, param=self.param, code=self.code)
        return JSONResponse(body, self.status, headers)


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _error_type(status), "param": param, "code": code}}


def _error_type(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def code_for(message: str) -> str | None:
    """The `code` of an error that SGLang worded; OpenAI's clients look for this one."""
    return "context_length_exceeded" if "context length" in message else None


def install(app: FastAPI) -> None:
    """Have every error of the app, those of the framework included, leave in this format."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND:
            message = f"there is no {request.method} {request.url.path} here; see GET /v1/models and the README"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.url.path} does not take {request.method}"
        body = error_body(message, error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return ApiError("the request is not valid").response()

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this; the client gets no internals.
        return ApiError("internal error; the server's log says more", status=500).response()
