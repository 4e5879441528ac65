"""From exceptions to error responses: status codes, and the body that each API uses."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from cllm.errors import (
    CLLMError,
    InvalidRequestError,
    ModelBusyError,
    ModelUnavailableError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
    StructureError,
)

log = logging.getLogger("cllm.server")

CLLM_PATHS = frozenset({"/generate", "/generate_stream", "/encode", "/benchmark", "/model/info"})
"""Endpoints whose responses have a field `success`."""

_ANTHROPIC_PATHS = re.compile(r"/v1/messages(/|$)")
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OLLAMA_PATHS = "/api/"
"""Endpoints whose errors are only a message."""

_PARTS = re.compile(r"(\{[^}]*\})")
"""Splits a path template at its parameters."""

CLIENT_GONE = 499
"""Logged for requests whose client disconnected; nobody receives it."""


def is_anthropics(path: str) -> bool:
    """Whether the path belongs to Anthropic's API, errors included."""
    return _ANTHROPIC_PATHS.search(path) is not None


class ClientGoneError(Exception):
    """The client disconnected before the response was complete."""


class _RefusalLog:
    """Logs refused requests, at most `MOST` in a burst and per second."""

    MOST = 20

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(self.MOST)
        self._at = clock()
        self._missed = 0

    def note(self, status: int, what: str, request_id: str, message: str) -> None:
        now = self._clock()
        self._left = min(self.MOST, self._left + (now - self._at) * self.MOST)
        self._at = now
        if self._left < 1:
            self._missed += 1
            return
        self._left -= 1
        if self._missed:
            log.warning("%d more refusals were not logged", self._missed)
            self._missed = 0
        log.warning("refused %s: %d for %.208s: %.400s", request_id, status, what, message)


_refusals = _RefusalLog()


def note_refusal(problem: Problem, scope: Scope) -> None:
    """Log a refused request. Server errors are logged elsewhere, disconnects not at all."""
    request_id = scope.get("state", {}).get("request_id", "-")
    note_refusal_of(f"{scope['method']} {scope['path']}", problem, request_id)


def note_refusal_of(what: str, problem: Problem, request_id: str) -> None:
    """The same for one that may not have come far enough to have a method and a path."""
    if 400 <= problem.status < 500 and problem.status != CLIENT_GONE:
        _refusals.note(problem.status, what, request_id, problem.message)


class ApiError(HTTPException):
    """An error of the HTTP layer itself, with everything the error body needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.problem = Problem(status, kind, message, param, code, headers)


class Problem(NamedTuple):
    """An error as the client sees it."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    numbers: Mapping[str, int] = MappingProxyType({})
    """Beside the message, in OpenAI's API."""

    def body(self, path: str, request_id: str | None = None) -> dict[str, Any]:
        if is_anthropics(path):
            return self._anthropics(request_id)
        if path.startswith(OLLAMA_PATHS):
            return {"error": self.message}
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.numbers}
        return {"success": False, "error": error} if path in CLLM_PATHS else {"error": error}

    def response(self, path: str, request_id: str | None = None) -> Response:
        return JSONResponse(self.body(path, request_id), self.status, headers=self.headers)

    def _anthropics(self, request_id: str | None) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        # Coding agents look for these words to know that they must shorten the conversation.
        too_long = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        error: dict[str, Any] = {"type": kind, "message": too_long + self.message}
        if self.param == "thread":  # clients then send the whole conversation with every request instead
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": request_id}


def problem_of(error: Exception, *, request_id: str, retry_after_s: float = 1.0) -> Problem:
    """What the client is told of an exception. Unexpected ones are logged, and only the request id is shown."""
    if isinstance(error, InvalidRequestError):
        return Problem(400, "invalid_request_error", str(error), error.param, error.code, numbers=error.numbers)
    if isinstance(error, StructureError):
        return Problem(400, "invalid_request_error", str(error), code="structure_too_complex")
    if isinstance(error, OverloadedError):
        retry = _retry_after(error.retry_after_s)
        return Problem(429, "overloaded_error", str(error), code="queue_full", headers=retry)
    if isinstance(error, RequestTimeoutError):
        return Problem(408, "timeout_error", str(error), code="timeout")
    if isinstance(error, ShuttingDownError):
        retry = _retry_after(retry_after_s)
        return Problem(503, "unavailable_error", str(error), code="shutting_down", headers=retry)
    if isinstance(error, ModelUnavailableError):
        retry = _retry_after(error.retry_after_s)
        return Problem(503, "unavailable_error", error.public, "model", "model_unavailable", retry)
    if isinstance(error, ModelBusyError):
        return Problem(409, "invalid_request_error", str(error), "model", "model_busy")
    if isinstance(error, RequestCancelledError):
        return Problem(CLIENT_GONE, "cancelled_error", str(error), code="cancelled")
    if isinstance(error, CLLMError):
        log.error("request %s failed: %s", request_id, error)
        return Problem(500, "server_error", str(error), code="backend_error")
    log.error("request %s failed unexpectedly", request_id, exc_info=error)
    message = f"An internal error occurred. The server's log has the details under request id {request_id}."
    return Problem(500, "server_error", message, code="internal_error")


def problem_of_http(error: HTTPException, method: str, path: str) -> Problem:
    if isinstance(error, ApiError):
        return error.problem
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"Unknown endpoint: {path}. GET /docs lists all endpoints.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{method} is not allowed on {path}; use {allowed}.", "method_not_allowed"
    return Problem(error.status_code, "invalid_request_error", message, None, code, error.headers)


def install_handlers(app: FastAPI, retry_after_s: float) -> None:
    """Turn every error raised in a route into a `Problem`."""

    async def on_cllm_error(request: Request, error: Exception) -> Response:
        problem = problem_of(error, request_id=request.state.request_id, retry_after_s=retry_after_s)
        note_refusal(problem, request.scope)
        return problem.response(request.url.path, request.state.request_id)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and (methods := _methods_on(app, request.url.path)):
            error.headers = {**(error.headers or {}), "Allow": methods}
        problem = problem_of_http(error, request.method, request.url.path)
        note_refusal(problem, request.scope)
        return problem.response(request.url.path, request.state.request_id)

    async def on_client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(CLLMError, on_cllm_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)


def _methods_on(app: FastAPI, path: str) -> str:
    """The methods of all routes on that path; a route knows only its own."""
    found = {
        method.upper()
        for template, operations in app.openapi()["paths"].items()
        if _path_pattern(template).fullmatch(path)
        for method in operations
    }
    return ", ".join(sorted(found))


@lru_cache(maxsize=256)
def _path_pattern(template: str) -> re.Pattern[str]:
    return re.compile("".join("[^/]+" if part.startswith("{") else re.escape(part) for part in _PARTS.split(template)))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
