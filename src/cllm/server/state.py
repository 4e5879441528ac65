"""What every route needs, hung on the app once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from cllm.server.errors import ApiError

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.llm import AsyncLLM

T = TypeVar("T")

LONG_TEXT = 4_000
"""Characters, of which a thousand cost up to a millisecond, from which on tokenising moves to a thread: others'
streams must not stutter."""


@dataclass(slots=True)
class ServerState:
    llm: AsyncLLM
    config: Config
    registry: CollectorRegistry
    created: int = field(default_factory=lambda: int(time.time()))
    benchmark_running: bool = False

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

    async def encode(self, text: str) -> list[int]:
        return (await self.encode_all([text]))[0]

    async def encode_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Strings become tokens, tokens stay."""
        encode = self.llm.tokenizer.encode
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await off_loop(
            size, lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        size = sum(len(message["content"]) for message in messages)
        return await off_loop(size, lambda: self.llm.encode_chat(messages))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here if it is small, in a thread if it would hold up the event loop."""
    return work() if size < LONG_TEXT else await asyncio.to_thread(work)


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.cllm
    return state


State = Annotated[ServerState, Depends(_state_of)]
