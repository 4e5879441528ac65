"""The web application, assembled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cllm import __version__
from cllm.observe.metrics import EngineCollector, MetricsObserver, create_registry
from cllm.server import generate, openai, ops, warming
from cllm.server.errors import install_handlers
from cllm.server.middleware import OPEN_PATHS, ApiKey, BodyLimit, RequestContext
from cllm.server.openapi import describe
from cllm.server.page.files import page_files
from cllm.server.page.hub import Hub
from cllm.server.page.routes import add_page
from cllm.server.state import ServerState
from cllm.server.tenants import Tenants

if TYPE_CHECKING:
    from cllm.config import Config, ServerConfig
    from cllm.llm import AsyncLLM

_DESCRIPTION = """OpenAI's API and cLLM's own on one engine. Point any OpenAI client at `/v1`.

Every parameter is honoured or refused with status 400 and its name; none is silently ignored."""


def create_app(llm: AsyncLLM, config: Config) -> FastAPI:
    """The server around `llm`, which is started and shut down with the app unless it is already running."""
    app = FastAPI(
        title="cLLM",
        version=__version__,
        description=_DESCRIPTION,
        redirect_slashes=False,  # where to would be the client's to say, in its Host header
        lifespan=lambda app: _lifespan(llm, app.state.cllm),
    )
    observer = MetricsObserver()
    llm.observers.append(observer)
    collector = EngineCollector(
        config.server.metrics_prefix,
        lambda: config.model.alias or llm.model_name,
        llm.snapshot,
        observer,
    )
    registry = create_registry(collector)
    app.state.cllm = ServerState(llm, config, registry)
    tenants = Tenants(config.server) if config.server.needs_key else None
    if tenants is not None:
        llm.observers.append(tenants)
        registry.register(tenants)
        app.state.cllm.warm_tenant = tenants.warm_tenant
    for router in (openai.router, generate.router, ops.router, warming.router):
        app.include_router(router)
    if config.server.page:
        add_page(app, Hub(llm, config))
    install_handlers(app, retry_after_s=config.server.shutdown_grace_s)
    _add_middleware(app, config, tenants)
    app.openapi = lambda: _openapi(app, llm, config.server)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(llm: AsyncLLM, state: ServerState) -> AsyncIterator[None]:
    if llm.ready:
        yield
        return
    await llm.start()
    try:
        async with warming.under_way(state):
            yield
    finally:
        await llm.shutdown()


def _add_middleware(app: FastAPI, config: Config, tenants: Tenants | None) -> None:
    """Innermost first. CORS stands outside the key: a browser's preflight request cannot carry one."""
    app.add_middleware(BodyLimit, max_bytes=config.server.max_body_bytes)
    if tenants is not None:
        open_paths = OPEN_PATHS.union(page_files() if config.server.page else ())
        app.add_middleware(ApiKey, tenants=tenants, open_paths=open_paths)
    if config.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestContext)


def _openapi(app: FastAPI, llm: AsyncLLM, config: ServerConfig) -> dict[str, Any]:
    """The same for as long as the model is loaded, which is only known then."""
    if app.openapi_schema is None:
        vocab_size = llm.shape.n_vocab if llm.ready else None
        schema = describe(app, config, vocab_size, with_key=config.needs_key)
        if vocab_size is None:
            return schema
        app.openapi_schema = schema
    return app.openapi_schema
