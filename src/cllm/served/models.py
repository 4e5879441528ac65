"""Several models behind one server: which are loaded, who uses them, and what goes when memory is short.

    unloaded ──► loading ──► ready ──► unloading ──► unloaded        failed: it could not be loaded; tried again later

Everything here runs on the event loop; loading and freeing are done in threads. A model is loaded once, however many
ask for it meanwhile, and one at a time, so that each finds the memory it was promised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cllm.choosing import estimate
from cllm.config import Config
from cllm.engine.turns import Turns
from cllm.errors import (
    CLLMError,
    ModelBusyError,
    ModelError,
    ModelUnavailableError,
    RequestTimeoutError,
    ShuttingDownError,
)
from cllm.kv.ledger import Account, Standing
from cllm.llm import AsyncLLM
from cllm.on_disk import Stores
from cllm.opening import Place
from cllm.served.entries import Served, State, by_name, check_disk_limits, could_not, read_entries, unavailable
from cllm.served.memory import Memory, choose_memories

log = logging.getLogger("cllm")

TEND_S = 1.0
"""How often idle models are looked for."""
CLAIM_S = 30.0
"""How long a model that is to be loaded waits for others to give K/V memory back."""
CLAIM_STEP_S = 0.01
ROOM_S = 30.0
"""How long a model that requests wait for waits for others, all of which are in use, to have none."""
ROOM_STEP_S = 0.05
RETRY_S = 10.0
"""After a model could not be loaded, requests for it are refused for so long before it is tried again."""


class ServedModels:
    """Raises `ConfigError` or `ModelError` for what can never be served. Nothing is loaded before `start`."""

    def __init__(self, config: Config, *, before_mapping: Callable[[], None] | None = None) -> None:
        self.models = read_entries(config)
        self.memories = choose_memories(config, self.models)
        check_disk_limits(self.models)
        self._by_name = by_name(self.models)
        self._before_mapping = before_mapping
        self.on_loaded: Callable[[Served, AsyncLLM], Awaitable[None]] | None = None
        """What else is to be done before a model that was loaded is used."""
        self.on_unloaded: Callable[[Served], None] = lambda served: None
        """What else is to be forgotten with a model that is not loaded any more."""
        self._turns = Turns()
        self._stores = Stores()
        self._one_at_a_time = asyncio.Lock()
        self._stopping = False
        self._started = False
        self._tending: asyncio.Task[None] | None = None

    # -- memory ------------------------------------------------------------------------------------------------

    def memory_of(self, served: Served) -> Memory:
        return self.memories[served.estimate.device]

    @property
    def budget(self) -> int:
        """Bytes of all memories together."""
        return sum(memory.ledger.budget for memory in self.memories.values())

    def standings(self) -> list[Standing]:
        """Of all models that are loaded."""
        return [standing for memory in self.memories.values() for standing in memory.ledger.standings()]

    # -- life --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._started and not self._stopping

    async def start(self) -> None:
        """Load what is to be loaded at the start."""
        try:
            for served in self.models:
                if served.at_start:
                    await self._begin_load(served)
        except BaseException:
            await self.shutdown(0)
            raise
        self._started = True
        self._tending = asyncio.create_task(self._tend())

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests end within `grace_s`, refuse the rest, free everything. Safe to call again."""
        self._stopping = True
        if self._tending is not None:
            self._tending.cancel()
        loaded = [served.llm for served in self.models if served.llm is not None]
        await asyncio.gather(*(llm.shutdown(grace_s) for llm in loaded))
        for served in self.models:
            served.idle.set()  # whoever waits for requests to end has waited long enough
        changing = [served.changing for served in self.models if served.changing is not None]
        await asyncio.gather(*changing, return_exceptions=True)
        for served in self.models:
            if served.llm is not None and served.llm not in loaded:  # it was being loaded
                await served.llm.shutdown(0)
            served.state = "unloaded"
        await asyncio.to_thread(self._stores.close)

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def default(self) -> Served:
        """What requests without a name mean."""
        return self.models[0]

    def find(self, name: str | None) -> Served | None:
        return self.default if name is None else self._by_name.get(name)

    async def acquire(self, served: Served, timeout_s: float | None = None) -> AsyncLLM:
        """The model, loaded; whoever gets it calls `served.release` in the end. Until then it stays."""
        until = time.monotonic() + (served.config.scheduler.request_timeout_s if timeout_s is None else timeout_s)
        with served.awaited():
            while not served.ready:
                await self._wait(served, self._next_change(served), until)
        served.users += 1
        served.idle.clear()
        served.last_used = time.monotonic()
        assert served.llm is not None
        return served.llm

    async def load(self, served: Served) -> None:
        """Have it loaded, if it is not."""
        with served.awaited():
            while not served.ready:
                await self._wait(served, self._next_change(served, again=True))

    async def unload(self, served: Served, *, wait: bool = False) -> None:
        """Have it unloaded, if it is not. With `wait` once its requests have ended; those that come meanwhile wait, and
        have it loaded again."""
        while served.state == "loading" and served.changing is not None:
            await asyncio.wait([served.changing])
        if served.users and not wait:
            running = "1 request" if served.users == 1 else f"{served.users} requests"
            raise ModelBusyError(f"{served.name} has {running} running; wait for the end, or ask with wait = true")
        if served.changing is not None:
            await asyncio.shield(served.changing)
        elif served.state == "ready":
            await asyncio.shield(self._begin_unload(served))

    async def _wait(self, served: Served, change: asyncio.Task[None], until: float | None = None) -> None:
        try:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            await asyncio.wait_for(asyncio.shield(change), left_s)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(f"{served.name} {served.doing}, and the request's time is over") from None
        except (ModelUnavailableError, ShuttingDownError):
            raise
        except CLLMError as error:
            raise unavailable(served, error, RETRY_S) from error

    def _next_change(self, served: Served, *, again: bool = False) -> asyncio.Task[None]:
        """What happens next on the way to a model that is ready."""
        if self._stopping:
            raise ShuttingDownError("the server is shutting down and takes no more requests")
        if served.changing is not None:
            return served.changing
        if served.state == "ready":  # its engine has given up
            return self._begin_unload(served)
        wait_s = served.retry_at - time.monotonic()
        if served.state == "failed" and wait_s > 0 and not again:
            raise unavailable(served, served.error, wait_s)
        return self._begin_load(served)

    # -- changes -----------------------------------------------------------------------------------------------

    def _begin_load(self, served: Served) -> asyncio.Task[None]:
        return self._change(served, "loading", self._load)

    def _begin_unload(self, served: Served) -> asyncio.Task[None]:
        return self._change(served, "unloading", self._unload)

    def _change(self, served: Served, state: State, how: Callable[[Served], Awaitable[None]]) -> asyncio.Task[None]:
        """One at a time: the state says so at once, not only when the task has begun."""
        assert served.changing is None
        served.state = state

        async def change() -> None:
            try:
                await how(served)
            finally:
                served.changing = None

        task = served.changing = asyncio.create_task(change())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # there may be nobody to hear of it
        return task

    async def _load(self, served: Served) -> None:
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
            raise ModelError(could_not(served, error)) from error
        served.state, served.error = "ready", None
        served.loads += 1
        served.last_used = time.monotonic()
        log.info("%s is loaded, after %.2f s", served.name, served.last_used - started)

    async def _load_in_turn(self, served: Served) -> AsyncLLM:
        """One at a time. Who finds no room lets others go ahead, and looks again as long as somebody waits for it."""
        until = time.monotonic() + ROOM_S
        try:
            while True:
                async with self._one_at_a_time:
                    if self._stopping:
                        raise ShuttingDownError("the server is shutting down and loads no more models")
                    await self._look_again(served)
                    served.account = await self._find_room(served)
                    if served.account is not None:
                        return await self._open(served, served.account)
                if not served.waiting or time.monotonic() > until or not self._may_have_room(served):
                    raise ModelUnavailableError(self.memory_of(served).shares.no_room(served))
                served.awaits_room = True
                await asyncio.sleep(ROOM_STEP_S)
        finally:
            served.awaits_room = False

    async def _look_again(self, served: Served) -> None:
        """Its files may be others than when it was estimated."""
        if await asyncio.to_thread(lambda: served.estimate.is_current):
            return
        found = await asyncio.to_thread(estimate, served.config)
        if found.device not in self.memories:
            raise ModelError(f"{served.name} is for {found.device} now, of which nothing was set aside; start again")
        served.estimate = found
        self.memory_of(served).shares.check_one(served)

    async def _open(self, served: Served, account: Account) -> AsyncLLM:
        most = self.memory_of(served).shares.most_kv(served)
        place = Place(most, account if account.least else None, kept=served.kept, stores=self._stores)
        llm = AsyncLLM(served.config, before_mapping=self._before_mapping, place=place, turns=self._turns)
        llm.observers = served.observers
        await llm.start()
        served.llm = llm
        return llm

    async def _unload(self, served: Served) -> None:
        while served.users and not self._stopping:
            await served.idle.wait()
        await self._free(served)
        served.state = "unloaded"
        log.info("%s is unloaded", served.name)

    async def _free(self, served: Served) -> None:
        llm, served.llm = served.llm, None
        try:
            if llm is not None:
                await llm.shutdown(0)
        finally:
            self.on_unloaded(served)
            if served.account is not None:
                served.account.close()
                served.account = None

    async def _find_room(self, served: Served) -> Account | None:
        """Its account, with its weights counted. Others are unloaded for it if need be, the longest unused first; None:
        all that might be are in use."""
        memory = self.memory_of(served)
        ledger, fixed, least = memory.ledger, memory.shares.fixed(served), memory.shares.least(served)
        while not ledger.fits(fixed + least):
            victim = self._next_to_go(memory)
            if victim is None:
                return None
            log.info("%s makes room for %s", victim.name, served.name)
            await asyncio.shield(self._begin_unload(victim))
        account = ledger.open(served.name, fixed=fixed, least=least)
        until = time.monotonic() + CLAIM_S
        try:
            while not ledger.claim(account):
                if time.monotonic() > until or self._stopping:
                    raise ModelUnavailableError(memory.shares.no_room(served))
                await asyncio.sleep(CLAIM_STEP_S)
        except BaseException:
            account.close()
            raise
        return account

    def _next_to_go(self, memory: Memory) -> Served | None:
        idle = [served for served in self._that_may_go(memory) if not (served.is_wanted or served.changing)]
        return min(idle, key=lambda served: served.last_used, default=None)

    def _may_have_room(self, served: Served) -> bool:
        """Whether it fits once all have gone that may."""
        memory = self.memory_of(served)
        going = sum(each.account.needed for each in self._that_may_go(memory) if each.account is not None)
        return memory.ledger.fits(memory.shares.fixed(served) + memory.shares.least(served) - going)

    def _that_may_go(self, memory: Memory) -> list[Served]:
        there = [served for served in self.models if served.account is not None and self.memory_of(served) is memory]
        return [served for served in there if not served.entry.pinned]

    async def _tend(self) -> None:
        """Unload what has been idle for as long as its entry says, and what is broken."""
        while True:
            await asyncio.sleep(TEND_S)
            now = time.monotonic()
            for served in self.models:
                after = served.entry.unload_after_s
                if served.state == "ready" and not served.ready and served.changing is None:
                    self._begin_unload(served)  # its engine has given up: others may have its memory
                elif after is None or served.entry.pinned or served.is_wanted or served.changing is not None:
                    continue
                elif served.state == "ready" and now - served.last_used >= after:
                    self._begin_unload(served)
