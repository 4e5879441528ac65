"""Whom work is done for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from cllm.errors import RequestCancelledError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """A request: its jobs end with it."""

    key: str = ""
    """The name of its API key. Keys take turns, and what a job costs counts against its key."""
    space: bytes = b""
    """Of the key: nobody can tell from the time a job takes what has been done in other spaces."""
    ended: asyncio.Future[None] | None = None
    """Done when nobody waits for the request's answer any more."""


OWNER: ContextVar[Owner] = ContextVar("OWNER", default=Owner())  # noqa: B039, it is frozen
"""The request that the running code serves."""


async def while_wanted(owner: Owner, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled when its owner ends. Then raises `RequestCancelledError`."""
    ended = owner.ended
    if ended is None:
        return await work
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def stop(_: object) -> None:
        nonlocal gone
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
        raise RequestCancelledError("nobody waits for the answer any more") from None
    finally:
        ended.remove_done_callback(stop)
