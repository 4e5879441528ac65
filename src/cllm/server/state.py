"""What every route needs, hung on the app once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from cllm.engine.tenant import NOBODY, Tenant
from cllm.server.bodies import body_lanes
from cllm.server.errors import ApiError
from cllm.server.lanes import Lanes
from cllm.server.texts import Texts
from cllm.warm import pin_again, warm_up

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.llm import AsyncLLM


@dataclass(slots=True)
class ServerState:
    llm: AsyncLLM
    config: Config
    registry: CollectorRegistry
    created: int = field(default_factory=lambda: int(time.time()))
    warm_tenant: Callable[[bool], Tenant | None] = lambda shared: NOBODY
    """For whom prefixes are warmed that are shared, or are not."""
    benchmark_running: bool = False
    bodies: Lanes = field(default_factory=body_lanes)
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.llm)
        self.llm.pin_again = pin_again

    async def warm_up(self) -> None:
        """Have `kv.warm` computed."""
        await warm_up(self.llm, self.config.kv.warm, self.warm_tenant)

    @property
    def served_name(self) -> str:
        return self.config.model.alias or self.llm.model_name

    def check_model(self, name: str | None) -> None:
        """No name means the model that is served."""
        if name is None or name in (self.served_name, self.llm.model_name, self.config.model.name):
            return
        known = " or ".join(repr(known) for known in dict.fromkeys((self.served_name, self.llm.model_name)))
        raise ApiError(
            404,
            f"The model {name!r} is not served here; ask for {known}.",
            param="model",
            code="model_not_found",
        )


def tenant_of(request: Request) -> Tenant:
    """Whose key came with the request."""
    tenant: Tenant = getattr(request.state, "tenant", NOBODY)
    return tenant


def is_operators(request: Request) -> bool:
    """Whether the request may do what concerns all keys."""
    sees_all: bool = getattr(request.state, "sees_all", True)
    return sees_all


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.cllm
    return state


State = Annotated[ServerState, Depends(_state_of)]
