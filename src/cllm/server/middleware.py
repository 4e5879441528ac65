"""ASGI middleware around every route: request id, trace, API key, size of the body, model leases."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.server.auth.tenants import Caller, Tenants
from cllm.server.errors import ApiError, is_anthropics, note_refusal, problem_of, problem_of_http
from cllm.server.http.cycle import WHEN_GONE
from cllm.work.turns import OWNER, Owner

if TYPE_CHECKING:
    from cllm.observe.tracing import Tracing
    from cllm.served import ServedModel

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
OPERATOR_PATHS = frozenset({"/kv", "/kv/stream", "/benchmark", "/models/load", "/models/unload"})
"""Endpoints that show or affect what belongs to all keys."""
OWN_PATHS = ("/kv/warm", "/kv/warm/")
"""Endpoints under /kv that every key may use for itself; the route checks."""
OTHER_NAMES = {
    **{("POST", path): f"/v1{path}" for path in ("/completions", "/chat/completions", "/embeddings", "/responses")},
    **{("POST", f"{path}/input_tokens"): f"/v1{path}/input_tokens" for path in ("/chat/completions", "/responses")},
    **{("POST", path): "/v1/rerank" for path in ("/rerank", "/reranking", "/v1/reranking")},
    ("GET", "/models"): "/v1/models",
    ("GET", "/v1/health"): "/health",
}
"""By method and path. Formats are those of `/v1`."""
_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestContext:
    """Gives every request an id, every response the header `x-request-id`, and every crash an error body.

    `request_id` is what the client sees; `unique_id` starts with it and is never used twice, even if the
    client sends the same id again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        fresh = uuid.uuid4().hex
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else fresh
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["unique_id"] = fresh if request_id is fresh else f"{request_id}-{fresh[:12]}"
        names = (b"x-request-id", b"request-id") if is_anthropics(scope["path"]) else (b"x-request-id",)
        headers = [(name, request_id.encode()) for name in names]
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            problem = problem_of(error, request_id=request_id)
            note_refusal(problem, scope)
            await problem.response(scope["path"], request_id)(scope, receive, send_with_id)


class Traces:
    """A span for every request but those of monitoring. Within `RequestContext`, which knows the request's id and
    answers when it crashes."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        ids = scope["state"]
        span = self._tracing.begin(
            ids["unique_id"],
            ids["request_id"],
            method=scope["method"],
            scheme=scope["scheme"],
            path=scope["path"],
            headers=Headers(scope=scope),
        )
        status: int | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception:
            status = 500
            raise
        finally:
            self._tracing.end(span, getattr(scope.get("route"), "path", None), status)


class SubPath:
    """Strips the path prefix under which a proxy serves this server, unless the proxy already has. The prefix itself
    leads to the page, whose links are relative to the path with a slash."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._prefix and scope["method"] in ("GET", "HEAD"):
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
            scope["raw_path"] = scope.get("raw_path", b"").removeprefix(self._prefix.encode())
        await self.app(scope, receive, send)


class OtherNames:
    """Paths that have other names in llama-server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := OTHER_NAMES.get((scope["method"], scope["path"]))) is not None:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self.app(scope, receive, send)


class ApiKey:
    """Requires an API key, except for monitoring endpoints and the page, which holds no data, and checks what the key
    may do."""

    def __init__(self, app: ASGIApp, tenants: Tenants, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self.app = app
        self._open_paths = open_paths
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self.app(scope, receive, send)
            return
        caller = self._caller(scope)
        if caller is None:
            await _refuse(_UNKNOWN_KEY, scope, receive, send)
        elif not self._may(caller, scope):
            await _refuse(not_the_operator(), scope, receive, send)
        else:
            scope["state"]["tenant"], scope["state"]["sees_all"] = caller.tenant, self._tenants.sees_all(caller)
            scope["state"]["still_allowed"] = lambda: self._may(self._caller(scope), scope)
            await self._within_limit(caller, scope, receive, send)

    def _may(self, caller: Caller | None, scope: Scope) -> bool:
        return caller is not None and (self._tenants.sees_all(caller) or not _needs_operator(scope["path"]))

    async def _within_limit(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """A POST counts against the key's limit until its response has ended, or the client disconnects."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
        elif caller.enter():
            try:
                await self.app(scope, receive, send)
            finally:
                caller.leave()
        else:
            await _refuse(_over_limit(caller), scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        """Anthropic's clients send their key in a header of its own."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key if scheme.lower() == "bearer" else None, headers.get("x-api-key")]
        # Back to the bytes as sent.
        found = (self._tenants.find(each.strip().encode("latin-1")) for each in keys if each is not None)
        return next((caller for caller in found if caller is not None), None)


def _needs_operator(path: str) -> bool:
    own = path == OWN_PATHS[0] or path.startswith(OWN_PATHS[1])
    return path in OPERATOR_PATHS or (path.startswith("/kv/") and not own)


class Owners:
    """Says for whom work is done while a request is handled: it is in its key's account, and ends with the request.
    The model that answers it stays loaded until the last byte is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        tenant: Tenant = state.get("tenant", ANONYMOUS)
        leases: list[ServedModel] = []
        state["leases"] = leases
        token = OWNER.set(Owner(tenant.name, tenant.space, scope.get("extensions", {}).get(WHEN_GONE)))
        try:
            await self.app(scope, receive, send)
        finally:
            OWNER.reset(token)
            for served in leases:
                served.release()


_UNKNOWN_KEY = ApiError(
    401,
    "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.",
    kind="authentication_error",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def not_the_operator(param: str | None = None) -> ApiError:
    return ApiError(
        403,
        f"{param or 'This endpoint'} requires the operator's key (server.api_key).",
        kind="permission_error",
        param=param,
        code="operator_key_required",
    )


def _over_limit(caller: Caller) -> ApiError:
    return ApiError(
        429,
        f"Rate limit reached: the API key {caller.tenant.name!r} has {caller.running} requests running; its limit is "
        f"{caller.limit} (max_concurrent).",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


class BodyLimit:
    """Refuses bodies that are too large, by their content-length or while reading."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await _refuse(self._too_large(), scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._max_bytes} bytes (server.max_body_bytes).",
            code="body_too_large",
            headers={"Connection": "close"},  # the rest of the body is never read
        )


async def _refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    problem = problem_of_http(refusal, scope["method"], scope["path"])
    note_refusal(problem, scope)
    await problem.response(scope["path"], scope["state"]["request_id"])(scope, receive, send)
