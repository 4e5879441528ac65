"""What computes a model's requests: the engine in this process, or the replicas of a cluster (`cluster/remote.py`)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from prometheus_client.registry import Collector

from cllm.config import Config
from cllm.engine.loop import Engine
from cllm.engine.observer import Deliver, Observers
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.row_sampler import RowSampler
from cllm.engine.stats import EngineSnapshot, EngineView
from cllm.engine.submission import Submission
from cllm.engine.time_sharing import TimeShare
from cllm.errors import ShuttingDownError
from cllm.kv.events import Listener
from cllm.kv.manager import KVManager
from cllm.kv.pins import LostPin, WarmResult
from cllm.loading.facts import ModelFacts
from cllm.loading.open_model import ModelShare
from cllm.loading.parts import ModelParts, load_model
from cllm.loading.text_model import TextModel
from cllm.observe.metrics import EngineCollector, MetricsObserver
from cllm.work.pool import Workers

GIL_SWITCH_S = 5e-4
"""How long one thread may hold the interpreter while another waits. Python's 5 ms would add up in every step."""

Warm = Callable[[Submission], Awaitable[WarmResult]]


class Executor(Protocol):
    """Most of it raises `ShuttingDownError` while the model is not loaded."""

    observers: Observers
    text: TextModel | None
    """None while the model is not loaded."""

    async def start(self, workers: Workers, deliver: Deliver, on_pins_lost: Callable[[], None]) -> None:
        """`deliver` is called on the event loop, with what a step gave; `on_pins_lost` when pinned prefixes were lost
        with their memory, to compute them again."""

    async def stop(self, grace_s: float) -> None:
        """Let running requests finish within `grace_s`, refuse the rest, free everything. Safe to call again."""

    def release(self, *, mute: bool = False) -> None:
        """The part of `stop(0)` that needs no event loop. `mute`: drop the outputs that are left."""

    @property
    def ready(self) -> bool: ...

    @property
    def rows(self) -> RowSampler | None:
        """What samples in this process, if anything does."""

    def submit(self, request: Request) -> None:
        """Raises at once if it cannot be taken."""

    async def accepted(self, request_id: str) -> None:
        """Wait until it is certain that a request is taken, or has failed."""

    def cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request, or one of its answers; unknown or finished ones are ignored."""

    async def everywhere(self, submission: Submission, warm: Warm) -> WarmResult:
        """`warm` a prompt wherever requests may be computed."""

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        """Remove a pin. False if there is none with that name (in that space)."""

    async def lost_pins(self) -> list[LostPin]:
        """Pins whose memory was lost and that have not been computed again."""

    async def listen(self) -> Listener | None:
        """Subscribe to what enters and leaves the prefix cache. None if there is no such cache in this process."""

    async def refresh(self) -> None:
        """Have `snapshot`, `kv` and the metrics say how things are now."""

    def snapshot(self) -> EngineSnapshot: ...

    def kv(self) -> dict[str, Any]:
        """The state of the KV cache: numbers as of now, and which sequence holds what."""

    def replicas(self) -> list[dict[str, Any]] | None:
        """What the page shows of each replica of a cluster; None: the model runs in this process."""

    def watch(self) -> None:
        """Have views made until `unwatch` is called as many times."""

    def unwatch(self) -> None: ...

    def view(self) -> EngineView | None:
        """The latest one, if there is one yet. Raises `ShuttingDownError` once the engine has stopped."""

    def metrics(self, prefix: str) -> Collector:
        """What /metrics says of this model. To be called once."""


class LocalExecutor:
    """The engine in this process."""

    def __init__(self, config: Config, share: ModelShare, before_mapping: Callable[[], None] | None) -> None:
        """`before_mapping` is called, in a thread, before the model file is mapped, if it is."""
        self.observers = Observers()
        self.text: TextModel | None = None
        self.parts: ModelParts | None = None
        self.engine: Engine | None = None
        self._config = config
        self._share = share
        self._before_mapping = before_mapping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._muted = False

    # -- lifecycle ---------------------------------------------------------------------------------------------

    async def start(self, workers: Workers, deliver: Deliver, on_pins_lost: Callable[[], None]) -> None:
        sys.setswitchinterval(GIL_SWITCH_S)
        self._loop = asyncio.get_running_loop()
        parts = await asyncio.to_thread(load_model, self._config, workers, self._share, self._before_mapping)
        sharing = self._share.time_sharing
        # A backend that computes ahead has a device of its own.
        time_share = sharing.join() if sharing is not None and parts.backend.traits.depth == 1 else None
        try:
            engine = self._build_engine(parts, time_share, deliver, on_pins_lost)
            engine.start()
        except BaseException:
            if time_share is not None:
                time_share.leave()
            parts.close()
            raise
        self.text, self.parts, self.engine = parts.text, parts, engine

    def _build_engine(
        self, parts: ModelParts, time_share: TimeShare | None, deliver: Deliver, on_pins_lost: Callable[[], None]
    ) -> Engine:
        kv = parts.scheduler.kv

        def send(outputs: list[Output]) -> None:
            """On the engine's thread: hand a step's outputs to the event loop, in one call."""
            self._call_on_loop(deliver, outputs)

        engine = Engine(
            parts.backend,
            parts.scheduler,
            send,
            max_queue=self._config.scheduler.max_queue,
            upkeep_share=self._config.kv.compaction_share,
            time_share=time_share,
        )
        if self._share.account is not None:
            self._share.account.wake = engine.wake
        # The same list, so that observers may be added later.
        parts.scheduler.requests.observers = self.observers
        kv.on_eviction = self.observers.evicted
        engine.on_rebuilt = lambda: self._call_on_loop(on_pins_lost) if kv.lost_pins() else None
        return engine

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._muted and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def stop(self, grace_s: float) -> None:
        engine, parts = self.engine, self.parts
        if engine is not None and parts is not None:
            await asyncio.to_thread(engine.stop, grace_s)
            parts.text.close()
            await asyncio.to_thread(parts.close)
        self.text = self.parts = None

    def release(self, *, mute: bool = False) -> None:
        self._muted = mute
        if self.engine is not None and self.parts is not None:
            self.engine.stop(0)
            self.parts.close()
        self.text = self.parts = None

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.accepting

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> RowSampler | None:
        return self._loaded.row_sampler

    def submit(self, request: Request) -> None:
        self._running.submit(request)

    async def accepted(self, request_id: str) -> None:
        """It is, since `submit` did not raise."""

    def cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        if self.engine is not None:
            self.engine.cancel(request_id, index, reason)

    # -- prefixes ----------------------------------------------------------------------------------------------

    async def everywhere(self, submission: Submission, warm: Warm) -> WarmResult:
        return await warm(submission)

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        kv = self._kv
        return await asyncio.wrap_future(self._running.call(lambda: kv.unpin(name, space)))

    async def lost_pins(self) -> list[LostPin]:
        return await asyncio.wrap_future(self._running.call(self._kv.lost_pins))

    async def listen(self) -> Listener | None:
        return await asyncio.wrap_future(self._running.call(self._kv.listen))

    async def held_names(self) -> tuple[int, set[bytes]]:
        """All blocks in the prefix cache, and the number of the latest event they include."""
        return await asyncio.wrap_future(self._running.call(self._kv.held_names))

    # -- numbers -----------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """They do anyway."""

    def snapshot(self) -> EngineSnapshot:
        return self._running.snapshot

    def kv(self) -> dict[str, Any]:
        return kv_report(self.snapshot(), self._running.details, self._loaded.text.facts)

    def replicas(self) -> list[dict[str, Any]] | None:
        return None

    def watch(self) -> None:
        self._running.views.add_watcher()
        self._running.wake()

    def unwatch(self) -> None:
        self._running.views.remove_watcher()

    def view(self) -> EngineView | None:
        if not self._running.alive:
            raise ShuttingDownError("the engine has stopped")
        return self._running.views.latest

    def metrics(self, prefix: str) -> Collector:
        observer = MetricsObserver()
        self.observers.append(observer)
        return EngineCollector(prefix, lambda: self._loaded.text.name, self.snapshot, observer)

    @property
    def _loaded(self) -> ModelParts:
        if self.parts is None:
            raise ShuttingDownError("the model is not loaded")
        return self.parts

    @property
    def _kv(self) -> KVManager:
        return self._loaded.scheduler.kv

    @property
    def _running(self) -> Engine:
        if self.engine is None:
            raise ShuttingDownError("the model is not loaded")
        return self.engine


def kv_report(snapshot: EngineSnapshot, details: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    usage = snapshot.kv
    held = {group.kind: group._asdict() for group in usage.groups}
    return {
        **usage.as_dict(),
        "bytes": usage.in_bytes(),
        "bytes_per_token": facts.bytes_per_token,
        "groups": [{**group._asdict(), **held.get(group.kind, {})} for group in facts.groups],
        "hit_rate": usage.hit_tokens / usage.query_tokens if usage.query_tokens else 0.0,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "dropped_tokens": snapshot.dropped_tokens,
        "drafted_tokens": snapshot.drafted_tokens,
        "accepted_drafts": snapshot.accepted_drafts,
        "details": details,
    }
