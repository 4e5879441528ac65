"""Several models behind one server: loads them when needed, and unloads others when memory is short.

    unloaded ──► loading ──► ready ──► unloading ──► unloaded        failed: could not be loaded; tried again later

Everything here runs on the event loop; loading and freeing happen in threads. A model is loaded once, however many
requests wait for it, and models are loaded one at a time, so that each finds the memory it was promised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from prometheus_client.registry import Collector

from cllm.config import Config
from cllm.engine.time_sharing import TimeSharing
from cllm.errors import (
    CLLMError,
    ModelBusyError,
    ModelError,
    ModelUnavailableError,
    RequestTimeoutError,
    ShuttingDownError,
)
from cllm.kv.ledger import Account, AccountStatus
from cllm.llm import AsyncLLM
from cllm.loading.disk_cache import DiskStores
from cllm.loading.estimate import estimate
from cllm.loading.open_model import ModelShare
from cllm.loading.text_model import PRELOADED
from cllm.machine.resident import give_heap_back, resident_bytes
from cllm.observe.metrics import EngineCollector, MetricsObserver, ModelsCollector
from cllm.served.entries import (
    LoadState,
    ServedModel,
    by_name,
    check_disk_limits,
    load_failed,
    read_entries,
    unavailable,
)
from cllm.served.memory import DeviceMemory, choose_memories, say_what_is_held
from cllm.served.model_set import ModelSet, only_model
from cllm.work.pool import Workers
from cllm.work.turns import for_nobody

log = logging.getLogger("cllm")

IDLE_CHECK_S = 1.0
"""How often to look for idle models."""
CLAIM_S = 30.0
"""How long loading waits for other models to give K/V memory back."""
CLAIM_STEP_S = 0.01
ROOM_S = 30.0
"""How long loading waits for a model that may be unloaded, while all are in use."""
ROOM_STEP_S = 0.05
RETRY_S = 10.0
"""How long requests for a model are refused after it could not be loaded."""


class ServedModels(ModelSet):
    """Raises `ConfigError` or `ModelError` for models that can never be served. Loads nothing before `start`."""

    def __init__(self, config: Config, *, before_mapping: Callable[[], None] | None = None) -> None:
        self.models = read_entries(config)
        self.memories = choose_memories(config, self.models)
        check_disk_limits(self.models)
        self._by_name = by_name(self.models)
        self._before_mapping = before_mapping
        self.sharing = self
        self._time_sharing = TimeSharing()
        self._stores = DiskStores()
        self._workers = Workers(config.work, PRELOADED)
        self._one_at_a_time = asyncio.Lock()
        self._stopping = False
        self._started = False
        self._idle_task: asyncio.Task[None] | None = None

    # -- memory ------------------------------------------------------------------------------------------------

    def memory_of(self, served: ServedModel) -> DeviceMemory:
        return self.memories[served.estimate.device]

    @property
    def budget(self) -> int:
        """Bytes, of all devices together."""
        return sum(memory.ledger.budget for memory in self.memories.values())

    def metrics(self, prefix: str) -> Collector:
        """What /metrics says of all models. To be called once."""
        return ModelsCollector(
            prefix,
            [_collector(prefix, served) for served in self.models],
            self.account_status,
            {device: memory.ledger.budget for device, memory in self.memories.items()},
        )

    def account_status(self) -> list[AccountStatus]:
        """Memory accounts of all loaded models."""
        return [status for memory in self.memories.values() for status in memory.ledger.account_status()]

    # -- lifecycle ---------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Workers:
        return self._workers

    @property
    def ready(self) -> bool:
        return self._started and not self._stopping

    async def start(self) -> None:
        """Load the models that are configured to be loaded at the start."""
        self._workers.open()
        before = resident_bytes()
        try:
            for served in self.models:
                if served.at_start:
                    await self._begin_load(served)
        except BaseException:
            await self.shutdown(0)
            raise
        self._started = True
        say_what_is_held(self.memories, before)
        self._idle_task = asyncio.create_task(self._unload_idle())

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests finish within `grace_s`, refuse the rest, free everything. Safe to call again."""
        self._stopping = True
        if self._idle_task is not None:
            self._idle_task.cancel()
        loaded = [served.llm for served in self.models if served.llm is not None]
        await asyncio.gather(*(llm.shutdown(grace_s) for llm in loaded))
        for served in self.models:
            served.idle.set()  # do not wait for requests any longer
        changing = [served.changing for served in self.models if served.changing is not None]
        await asyncio.gather(*changing, return_exceptions=True)
        for served in self.models:
            if served.llm is not None and served.llm not in loaded:  # was still loading
                await served.llm.shutdown(0)
            served.state = "unloaded"
        self._workers.close()
        await asyncio.to_thread(self._stores.close)

    # -- requests ----------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> ServedModel | None:
        return self.default if name is None else self._by_name.get(name)

    async def acquire(self, served: ServedModel, timeout_s: float | None = None) -> AsyncLLM:
        """Load the model if need be. It stays loaded until `served.release` is called."""
        until = time.monotonic() + (served.config.scheduler.request_timeout_s if timeout_s is None else timeout_s)
        with served.awaited():
            while not served.ready:
                await self._wait(served, self._next_change(served), until)
        served.users += 1
        served.idle.clear()
        served.last_used = time.monotonic()
        assert served.llm is not None
        return served.llm

    async def load(self, served: ServedModel) -> None:
        """Load it, unless it is loaded."""
        with served.awaited():
            while not served.ready:
                await self._wait(served, self._next_change(served, again=True))

    async def unload(self, served: ServedModel, *, wait: bool = False) -> None:
        """Unload it, unless it is unloaded. With `wait`, once its requests have ended; requests that arrive meanwhile
        wait and load it again."""
        while served.state == "loading" and served.changing is not None:
            await asyncio.wait([served.changing])
        if served.users and not wait:
            running = "1 request" if served.users == 1 else f"{served.users} requests"
            raise ModelBusyError(f"{served.name} has {running} running; try again later, or set wait to true")
        if served.changing is not None:
            await asyncio.shield(served.changing)
        elif served.state == "ready":
            await asyncio.shield(self._begin_unload(served))

    async def _wait(self, served: ServedModel, change: asyncio.Task[None], until: float | None = None) -> None:
        try:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            await asyncio.wait_for(asyncio.shield(change), left_s)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(f"the request timed out: {served.name} {served.why_not_ready}") from None
        except (ModelUnavailableError, ShuttingDownError):
            raise
        except CLLMError as error:
            raise unavailable(served, error, RETRY_S) from error

    def _next_change(self, served: ServedModel, *, again: bool = False) -> asyncio.Task[None]:
        """The next task on the way to `ready`."""
        if self._stopping:
            raise ShuttingDownError("the server is shutting down and accepts no more requests")
        if served.changing is not None:
            return served.changing
        if served.state == "ready":  # but its engine has failed
            return self._begin_unload(served)
        wait_s = served.retry_at - time.monotonic()
        if served.state == "failed" and wait_s > 0 and not again:
            raise unavailable(served, served.error, wait_s)
        return self._begin_load(served)

    # -- changes -----------------------------------------------------------------------------------------------

    def _begin_load(self, served: ServedModel) -> asyncio.Task[None]:
        return self._change(served, "loading", self._load)

    def _begin_unload(self, served: ServedModel) -> asyncio.Task[None]:
        return self._change(served, "unloading", self._unload)

    def _change(
        self, served: ServedModel, state: LoadState, how: Callable[[ServedModel], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """One change at a time: the state is set now, not when the task begins."""
        assert served.changing is None
        served.state = state

        async def change() -> None:
            try:
                await how(served)
            finally:
                served.changing = None

        # Whoever asked for it may leave.
        task = served.changing = asyncio.create_task(for_nobody(change()))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nothing may be awaiting it
        return task

    async def _load(self, served: ServedModel) -> None:
        started = time.monotonic()
        try:
            llm = await self._load_in_turn(served)
            if self.on_loaded is not None and not self._stopping:
                await self.on_loaded(served, llm)
        except BaseException as error:
            await self._free(served)
            served.state, served.error = "failed", str(error) or type(error).__name__
            served.retry_at = time.monotonic() + (RETRY_S if not isinstance(error, ModelUnavailableError) else 0)
            if self._started and not self._stopping:
                log.error("%s could not be loaded: %s", served.name, served.error)
            if isinstance(error, CLLMError) or not isinstance(error, Exception):
                raise
            raise ModelError(load_failed(served, error)) from error
        await asyncio.to_thread(give_heap_back)
        served.state, served.error = "ready", None
        served.loads += 1
        served.last_used = time.monotonic()
        log.info("%s loaded in %.2f s", served.name, served.last_used - started)

    async def _load_in_turn(self, served: ServedModel) -> AsyncLLM:
        """One model at a time. Without room it lets other models go first, and tries again while requests wait."""
        until = time.monotonic() + ROOM_S
        try:
            while True:
                async with self._one_at_a_time:
                    if self._stopping:
                        raise ShuttingDownError("the server is shutting down and loads no more models")
                    await self._refresh_estimate(served)
                    served.account = await self._find_room(served)
                    if served.account is not None:
                        return await self._open(served, served.account)
                if not served.waiting or time.monotonic() > until or not self.memory_of(served).may_have_room(served):
                    raise ModelUnavailableError(self.memory_of(served).no_room(served))
                served.awaits_room = True
                await asyncio.sleep(ROOM_STEP_S)
        finally:
            served.awaits_room = False

    async def _refresh_estimate(self, served: ServedModel) -> None:
        """Its files may have changed."""
        if await asyncio.to_thread(lambda: served.estimate.is_current):
            return
        found = await asyncio.to_thread(estimate, served.config)
        if found.device not in self.memories:
            raise ModelError(f"{served.name} would now run on {found.device}, which has no budget; restart the server")
        served.estimate = found
        self.memory_of(served).choose_context(served)
        self.memory_of(served).check_one(served)

    async def _open(self, served: ServedModel, account: Account) -> AsyncLLM:
        most = self.memory_of(served).most_kv(served)
        share = ModelShare(
            kv_bytes=most,
            account=account if account.least else None,
            tokenizers=served.tokenizers,
            stores=self._stores,
            time_sharing=self._time_sharing,
            workers=self._workers,
            context=served.estimate.context,
        )
        llm = AsyncLLM(served.config, share=share, before_mapping=self._before_mapping)
        llm.executor.observers = served.observers
        await llm.start()
        served.llm = llm
        return llm

    async def _unload(self, served: ServedModel) -> None:
        while served.users and not self._stopping:
            await served.idle.wait()
        await self._free(served)
        served.state = "unloaded"
        log.info("%s unloaded", served.name)

    async def _free(self, served: ServedModel) -> None:
        llm, served.llm = served.llm, None
        try:
            if llm is not None:
                await llm.shutdown(0)
        finally:
            if self.on_unloaded is not None:
                self.on_unloaded(served)
            await asyncio.to_thread(give_heap_back)
            if served.account is not None:
                served.account.close()
                served.account = None

    async def _find_room(self, served: ServedModel) -> Account | None:
        """Its account, with its weights counted. Unloads other models if need be, the least recently used first; None
        if all of them are in use."""
        memory = self.memory_of(served)
        ledger, fixed, least = memory.ledger, memory.fixed(served), memory.least(served)
        while not ledger.fits(fixed + least):
            victim = memory.least_recently_used()
            if victim is None:
                return None
            log.info("unloading %s to make room for %s", victim.name, served.name)
            await asyncio.shield(self._begin_unload(victim))
        account = ledger.open(served.name, fixed=fixed, least=least)
        until = time.monotonic() + CLAIM_S
        try:
            while not ledger.claim(account):
                if time.monotonic() > until or self._stopping:
                    raise ModelUnavailableError(memory.no_room(served))
                await asyncio.sleep(CLAIM_STEP_S)
        except BaseException:
            account.close()
            raise
        return account

    async def _unload_idle(self) -> None:
        """Unload models that have been idle for as long as configured, and those whose engine has failed."""
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            now = time.monotonic()
            for served in self.models:
                after = served.entry.unload_after_s
                if served.state == "ready" and not served.ready and served.changing is None:
                    self._begin_unload(served)  # its engine has failed: free its memory for others
                elif after is None or served.entry.pinned or served.is_wanted or served.changing is not None:
                    continue
                elif served.state == "ready" and now - served.last_used >= after:
                    self._begin_unload(served)


def open_models(config: Config, *, before_mapping: Callable[[], None]) -> ModelSet:
    """What a configuration says to serve. `before_mapping` is called, in a thread, before a model file is mapped."""
    if config.models:
        return ServedModels(config, before_mapping=before_mapping)
    return only_model(AsyncLLM(config, before_mapping=before_mapping), config)


def _collector(prefix: str, served: ServedModel) -> EngineCollector:
    observer = MetricsObserver()
    served.observers.append(observer)
    return EngineCollector(prefix, partial(str, served.name), served.snapshot, observer, served.store)
