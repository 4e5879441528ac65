"""What the engine tells: outputs to the caller, steps and finished requests to observers. All of it happens on its
thread, so whoever is called must return at once."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cllm.engine.request import Output, Request

log = logging.getLogger("cllm.engine")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request."""

    request_id: str
    reason: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    known_tokens: int
    """Cached, if not in a way that all layers could go on from."""
    generated_tokens: int
    queued_s: float
    ttft_s: float | None
    prefill_s: float
    decode_s: float
    total_s: float
    inter_token_s: array[float]
    preemptions: int
    tenant: str = ""
    embeds: bool = False


def record_of(request: Request, now: float, error: Exception | None) -> RequestRecord:
    assert request.reason is not None
    admitted = request.admitted_at if request.admitted_at is not None else now
    first = request.first_token_at
    # The first token of a resumed request came from elsewhere.
    ttft_s = first - request.arrival if first is not None and not request.resumed else None
    return RequestRecord(
        request_id=request.id,
        reason=request.reason.value,
        error=str(error) if error is not None else None,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.hit.tokens,
        known_tokens=request.hit.known,
        generated_tokens=request.generated,
        queued_s=admitted - request.arrival,
        ttft_s=ttft_s,
        prefill_s=(first if first is not None else now) - admitted,
        decode_s=now - first if first is not None else 0.0,
        total_s=now - request.arrival,
        inter_token_s=request.gaps,
        preemptions=request.preemptions,
        tenant=request.submission.tenant.name,
        embeds=request.submission.embeds,
    )


class EngineObserver(Protocol):
    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: RequestRecord) -> None: ...

    def on_eviction(self, count: int, seconds: float) -> None: ...


class Observers(list[EngineObserver]):
    """Calls each observer. If one fails, that is logged and nothing else is affected."""

    def step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        for observer in self:
            self._notify(observer.on_step, seconds, prompt_tokens, decode_tokens)

    def finished(self, record: RequestRecord) -> None:
        for observer in self:
            self._notify(observer.on_finished, record)

    def evicted(self, count: int, seconds: float) -> None:
        for observer in self:
            self._notify(observer.on_eviction, count, seconds)

    def _notify(self, listener: Callable[..., None], *args: object) -> None:
        try:
            listener(*args)
        except Exception:
            log.exception("%s failed; the request is unaffected", getattr(listener, "__qualname__", listener))


Deliver = Callable[[list[Output]], None]

ATTEMPTS = 3
"""Attempts to deliver the same outputs."""


class Outbox:
    """Delivers outputs in one call and in order. After a failure they are kept, and delivered again before new ones."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._kept: list[Output] = []
        self._failures = 0

    @property
    def waiting(self) -> bool:
        """Whether there are outputs that could not be delivered."""
        return bool(self._kept)

    def send(self, outputs: list[Output]) -> set[str]:
        """Returns the requests whose outputs are lost: they must end, since their answers would have a hole."""
        if self._kept:
            outputs = self._kept + outputs
            self._kept = []
        if not outputs:
            return set()
        try:
            self._deliver(outputs)
        except Exception:
            return self._keep(outputs)
        self._failures = 0
        return set()

    def _keep(self, outputs: list[Output]) -> set[str]:
        self._failures += 1
        if self._failures < ATTEMPTS:
            log.exception("%d outputs could not be delivered; trying again", len(outputs))
            self._kept = outputs
            return set()
        log.critical("%d outputs could not be delivered and are lost", len(outputs), exc_info=True)
        self._failures = 0
        return {output.request_id for output in outputs}
