"""Assembles the web application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cllm import __version__
from cllm.llm import AsyncLLM
from cllm.observe.metrics import WorkCollector, create_registry
from cllm.observe.otlp import open_tracing
from cllm.served import ModelSet, only_model
from cllm.server.anthropic import routes as anthropic
from cllm.server.auth.tenants import Tenants
from cllm.server.cllm import generate, models, ops, requests, tokens, warm
from cllm.server.errors import install_handlers
from cllm.server.middleware import (
    OPEN_PATHS,
    ApiKey,
    BodyLimit,
    OtherNames,
    Owners,
    RequestContext,
    SubPath,
    Traces,
)
from cllm.server.ollama import embeddings as ollama_embeddings
from cllm.server.ollama import models as ollama_models
from cllm.server.ollama import routes as ollama
from cllm.server.openai import embeddings
from cllm.server.openai import routes as openai
from cllm.server.openapi import bodies_of, describe
from cllm.server.page.files import docs_files, page_files
from cllm.server.page.routes import add_docs, add_page
from cllm.server.responses import routes as responses
from cllm.server.state import ServerState

if TYPE_CHECKING:
    from cllm.config import Config

_DESCRIPTION = """The APIs of OpenAI, Anthropic and Ollama, and cLLM's own. Point any OpenAI client at /v1.

Every parameter is honoured, a documented hint, or refused with status 400 and its name; none is silently ignored."""


_ROUTERS = (
    openai.router,
    responses.router,
    anthropic.router,
    embeddings.router,
    requests.router,
    generate.router,
    tokens.router,
    ollama.router,
    ollama_embeddings.router,
    ollama_models.router,
    ops.router,
    warm.router,
)
REQUESTS = bodies_of(route for router in (*_ROUTERS, models.router) for route in router.routes)
"""The request body of each endpoint, those that only several models have included."""


def create_app(serves: AsyncLLM | ModelSet, config: Config, *, servers: int = 1) -> FastAPI:
    """The application for one or several models, which start and stop with it unless they are running. `servers`: how
    many of it clients are spread over."""
    if isinstance(serves, AsyncLLM):
        serves = only_model(serves, config)
    app = FastAPI(
        title="cLLM",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's loads scripts from elsewhere; ours is part of the package
        redoc_url=None,
        redirect_slashes=False,  # the target would come from the client's Host header
        lifespan=lambda app: _lifespan(app.state.cllm),
    )
    tenants = Tenants(config.server, servers=servers) if config.server.needs_key else None
    registry = create_registry(serves.metrics(config.server.metrics_prefix))
    registry.register(WorkCollector(config.server.metrics_prefix, lambda: serves.workers))
    app.state.cllm = state = ServerState(serves, config, registry, open_tracing(config.observe))
    if tenants is not None:
        registry.register(tenants)
        for served in serves.models:
            served.observers.append(tenants)
        state.warm_tenant = tenants.warm_tenant
    for router in _ROUTERS:
        app.include_router(router)
    if serves.sharing is not None:
        app.include_router(models.router)
    serves.on_loaded = partial(warm.on_model_loaded, state)
    serves.on_unloaded = state.forget
    add_docs(app)
    if config.server.page:
        add_page(app, lambda name: state.loaded(name).hub)
    install_handlers(app, retry_after_s=config.server.shutdown_grace_s)
    if state.tracing is not None:
        for served in serves.models:
            state.tracing.watch(served.observers, partial(getattr, served, "name"))
    _add_middleware(app, config, tenants, state)
    app.openapi = lambda: _openapi(app, state)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(state: ServerState) -> AsyncIterator[None]:
    serves = state.serves
    try:
        if serves.ready:
            yield
            return
        await serves.start()
        try:
            yield
        finally:
            await state.end_background()
            await serves.shutdown()
    finally:
        await state.close()


def _add_middleware(app: FastAPI, config: Config, tenants: Tenants | None, state: ServerState) -> None:
    """Innermost first. CORS is outside the API key: a browser's preflight request has none."""
    app.add_middleware(Owners)
    app.add_middleware(BodyLimit, max_bytes=config.server.max_body_bytes)
    if tenants is not None:
        open_paths = OPEN_PATHS.union(docs_files(), page_files() if config.server.page else ())
        app.add_middleware(ApiKey, tenants=tenants, open_paths=open_paths)
    if config.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-tools-left-out"],
        )
    if state.tracing is not None:
        app.add_middleware(Traces, tracing=state.tracing)
    app.add_middleware(RequestContext)
    app.add_middleware(OtherNames)
    if config.server.root_path:
        app.add_middleware(SubPath, prefix=config.server.root_path)


def _openapi(app: FastAPI, state: ServerState) -> dict[str, Any]:
    """Cached once the model is loaded. Several models have no vocabulary in common."""
    if app.openapi_schema is None:
        several, llm = state.serves.sharing is not None, state.serves.default.llm
        vocab_size = llm.text.spec.n_vocab if not several and llm is not None and llm.ready else None
        schema = describe(app, REQUESTS, state.config.server, vocab_size)
        if not several and vocab_size is None:
            return schema
        app.openapi_schema = schema
    return app.openapi_schema
