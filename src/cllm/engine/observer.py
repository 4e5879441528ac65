"""Who is told what the engine did. Called on the engine's thread, so implementations return at once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request's life, when it is over."""

    request_id: str
    reason: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queued_s: float
    ttft_s: float | None
    prefill_s: float
    decode_s: float
    total_s: float
    inter_token_s: array[float]
    preemptions: int


class EngineObserver(Protocol):
    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: RequestRecord) -> None: ...

    def on_eviction(self, count: int, seconds: float) -> None: ...
