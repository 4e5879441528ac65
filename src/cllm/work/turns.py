"""Whom work is done for, and whose job is next: fair between keys, by what the jobs of each have cost lately."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cllm.errors import RequestCancelledError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """A request: its jobs end with it."""

    key: str = ""
    """The name of its API key. Keys take turns, and what a job costs counts against its key."""
    space: bytes = b""
    """The key's space: nobody can tell from the time a job takes what has been done in other spaces."""
    ended: asyncio.Future[None] | None = None
    """Done when nobody waits for the request's answer any more."""


OWNER: ContextVar[Owner] = ContextVar("OWNER", default=Owner())  # noqa: B039, it is frozen
"""The request that the running code serves."""


async def while_wanted(owner: Owner, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when its owner ends. Then raises `RequestCancelledError`."""
    ended = owner.ended
    if ended is None:
        return await work
    if ended.done():
        work.close()
        raise _nobody_waits()
    task = asyncio.current_task()
    assert task is not None
    gone = over = False

    def stop(_: object) -> None:
        """It may be called a moment after the work is over."""
        nonlocal gone
        if not over:
            gone = True
            task.cancel()

    ended.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        if hasattr(task, "uncancel"):  # since Python 3.11
            task.uncancel()
        raise _nobody_waits() from None
    finally:
        over = True
        ended.remove_done_callback(stop)


async def for_nobody(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that goes on whoever leaves, and is in no key's account. To be a task of its own."""
    OWNER.set(Owner())
    return await work


def _nobody_waits() -> RequestCancelledError:
    return RequestCancelledError("nobody waits for the answer any more")


HALF_LIFE_S = 10.0
"""After this long, half of what a key's jobs have cost is forgotten."""
NEGLIGIBLE_S = 1e-3
MOST_REMEMBERED = 256
"""Keys without jobs whose costs are remembered."""
MOST = 8
"""Jobs at the same time. There are that many only if so many keys have one each."""


@dataclass(slots=True)
class _Account:
    cost: float = 0.0
    """Seconds of CPU time, as of `when`."""
    when: float = 0.0
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def cost_at(self, now: float) -> float:
        return self.cost * math.exp(math.log(2) * (self.when - now) / HALF_LIFE_S)

    def add(self, seconds: float, now: float) -> None:
        self.cost, self.when = self.cost_at(now) + seconds, now


class Turns:
    """At most `count` jobs at the same time; and one of each key that has none yet, up to `MOST`: whoever asks for
    little is not kept waiting by who asks for much. Of the others, the key whose jobs have cost least goes first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running = 0
        self._accounts: dict[str, _Account] = {}

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return sum(len(account.waiting) for account in self._accounts.values())

    def waiting_of(self, key: str) -> int:
        account = self._accounts.get(key)
        return 0 if account is None else len(account.waiting)

    async def begin(self, key: str, now: float) -> None:
        """Wait for a turn; each must be ended. Cancelling the wait gives the place up."""
        account = self._accounts.setdefault(key, _Account(when=now))
        if not account.waiting and self._may_run(account):
            self._start(account)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same time
                self.end(key, 0.0, now)
            else:
                with suppress(ValueError):
                    account.waiting.remove(turn)
                self._forget_idle(now)
            raise

    def end(self, key: str, cost_s: float, now: float) -> None:
        account = self._accounts[key]
        account.add(cost_s, now)
        account.running -= 1
        self._running -= 1
        self._start_next(now)
        self._forget_idle(now)

    def _start_next(self, now: float) -> None:
        while ready := [each for each in self._accounts.values() if each.waiting and self._may_run(each)]:
            account = min(ready, key=lambda each: (each.running, each.cost_at(now)))
            turn = account.waiting.popleft()
            if not turn.cancelled():
                self._start(account)
                turn.set_result(None)

    def _may_run(self, account: _Account) -> bool:
        return self._running < (self._count if account.running else max(self._count, MOST))

    def _start(self, account: _Account) -> None:
        account.running += 1
        self._running += 1

    def _forget_idle(self, now: float) -> None:
        idle = [key for key, each in self._accounts.items() if not each.running and not each.waiting]
        for key in idle[: max(len(idle) - MOST_REMEMBERED, 0)]:
            del self._accounts[key]
        for key in idle:
            if key in self._accounts and self._accounts[key].cost_at(now) < NEGLIGIBLE_S:
                del self._accounts[key]
