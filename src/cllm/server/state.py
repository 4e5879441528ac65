"""What every route needs: the server's state, and that of each loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.server.errors import ApiError
from cllm.server.inference.tokenization import PromptEncoder
from cllm.server.page.hub import Hub
from cllm.server.responses.store import ResponseStore
from cllm.server.schema.body import body_executor
from cllm.tasks.warm import restore_pins, warm_up
from cllm.work.executor import SizedExecutor
from cllm.work.turns import for_nobody

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.llm import AsyncLLM
    from cllm.observe.tracing import Tracing
    from cllm.served import ModelSet, ServedModel


MOST_SESSION = 128
"""Characters of a session's name that count."""


class ModelState:
    """A loaded model, and what routes need with it."""

    def __init__(self, served: ServedModel, llm: AsyncLLM) -> None:
        self.llm = llm
        self.config = served.config
        self.encoder = PromptEncoder(llm)
        self.hub = Hub(llm, served.config, served.called)
        self._served = served
        llm.restore_pins = restore_pins

    @property
    def served_name(self) -> str:
        return self._served.name


@dataclass(slots=True)
class ServerState:
    serves: ModelSet
    config: Config
    registry: CollectorRegistry
    tracing: Tracing | None = None
    """If traces are sent to a collector."""
    created: int = field(default_factory=lambda: int(time.time()))
    warm_tenant: Callable[[bool], Tenant | None] = lambda shared: ANONYMOUS
    """The tenant that shared, or other, prefixes are warmed for."""
    benchmark_running: bool = False
    bodies: SizedExecutor = field(default_factory=body_executor)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    """Work that no request waits for."""
    responses: ResponseStore = field(init=False)
    """Responses that later requests to /v1/responses may continue."""
    _loaded: dict[ServedModel, ModelState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.responses)
        for served in self.serves.models:
            if served.llm is not None:
                self.state_of(served, served.llm)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(for_nobody(work))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def end_background(self) -> None:
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)

    async def close(self) -> None:
        """After the last request: send what is left of its trace."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def warm_up(self, model: ModelState) -> None:
        """Compute `kv.warm`. The replicas of a cluster do that themselves."""
        if model.llm.executor.replicas() is None:
            await warm_up(model.llm, model.config.kv.warm, self.warm_tenant)

    async def model(self, name: str | None, request: Request, timeout_s: float | None = None) -> ModelState:
        """The model that a request names. It stays loaded until the request is answered."""
        served, started = self.find(name), time.monotonic()
        must_wait = not served.ready
        llm = await self.serves.acquire(served, timeout_s)
        request.scope["state"]["leases"].append(served)
        if must_wait:
            request.state.waited_s = time.monotonic() - started
        return self.state_of(served, llm)

    def find(self, name: str | None) -> ServedModel:
        """A model by any of its names, loaded or not."""
        served = self.serves.find(name)
        if served is None:
            known = ", ".join(repr(each.name) for each in self.serves.models)
            raise ApiError(
                404, f"The model {name!r} does not exist; available: {known}.", param="model", code="model_not_found"
            )
        return served

    def loaded(self, name: str | None) -> ModelState:
        """A model that is already loaded; this loads none."""
        served = self.find(name)
        if served.llm is None or (self.serves.sharing is not None and not served.ready):
            raise ApiError(
                409,
                f"The model {served.name!r} is {served.state}. POST /models/load loads it. Its pins are gone; those of "
                "kv.warm come back when it is loaded.",
                param="model",
                code="model_not_loaded",
            )
        return self.state_of(served, served.llm)

    def running(self) -> Iterator[tuple[str, AsyncLLM]]:
        """Loaded models, by name."""
        for served in self.serves.models:
            if served.llm is not None and served.ready:
                yield served.name, served.llm

    def state_of(self, served: ServedModel, llm: AsyncLLM) -> ModelState:
        state = self._loaded.get(served)
        if state is None:
            state = self._loaded[served] = ModelState(served, llm)
        return state

    def forget(self, served: ServedModel) -> None:
        """Called when a model is unloaded."""
        self._loaded.pop(served, None)


def time_left(request: Request, model: ModelState, timeout_s: float | None) -> float | None:
    """What is left of a request's timeout after waiting for its model to load."""
    waited_s: float = getattr(request.state, "waited_s", 0.0)
    if not waited_s:
        return timeout_s
    longest_s = model.config.scheduler.request_timeout_s
    return max(0.0, (longest_s if timeout_s is None else min(timeout_s, longest_s)) - waited_s)


def tenant_of(request: Request) -> Tenant:
    """The tenant of the request's API key."""
    tenant: Tenant = getattr(request.state, "tenant", ANONYMOUS)
    return tenant


def session_of(request: Request) -> str | None:
    """The header x-session-id: requests of one session have much in common."""
    session = request.headers.get("x-session-id")
    return session[:MOST_SESSION] if session else None


def is_operator(request: Request) -> bool:
    """Whether the request has the operator's key."""
    sees_all: bool = getattr(request.state, "sees_all", True)
    return sees_all


def still_allowed(request: Request) -> bool:
    """Whether the request's key is still valid: keys may be removed while a response is streamed."""
    asks: Callable[[], bool] = getattr(request.state, "still_allowed", lambda: True)
    return asks()


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.cllm
    return state


State = Annotated[ServerState, Depends(_state_of)]
