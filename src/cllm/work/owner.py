"""Whom work is done for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
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
