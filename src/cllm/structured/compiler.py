"""Compiles a `Structure` to a `Grammar`, within limits, and keeps it for the next who asks.

What is small is compiled at once, in a thread. Anything else is tried out in a worker process, which can be killed and
measures what it takes; only what has passed there is compiled here. Jobs of different keys take turns, a job ends when
nobody waits for it any more, and nobody gets what another space has had compiled: how fast it comes would tell.

Freeing a grammar holds the GIL for about a millisecond per MiB, in whatever thread: `structured.max_compile_mb` bounds
how long that stops everybody.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cllm.config.server import StructuredConfig
from cllm.errors import InvalidRequestError, OverloadedError, ShuttingDownError, StructureError
from cllm.machine.resident import give_heap_back
from cllm.structured.building import Builder, Built
from cllm.structured.effort import NotSmallError
from cllm.structured.grammar_cache import GrammarCache
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure, StructureKind
from cllm.structured.vocabulary import Vocabulary
from cllm.work.turns import OWNER, Owner, Turns, while_wanted
from cllm.work.worker import ExceededError, Limits, RefusedError

THREADS = 4
"""One at a time, but for keys that have none yet: they share the cores."""
NICE = 10
STACK_BYTES = 64 << 20
"""Grammars may be nested deeply."""
MOST_KEPT_REASONS = 256
TryOut = Callable[[Structure, Limits], Awaitable[Mapping[str, Any]]]
"""`Builder.try_out` in a worker process."""

T = TypeVar("T")
_Key = tuple[bytes, StructureKind, bytes]


@dataclass(slots=True)
class _Shared:
    """One compilation, for all requests that wait for it."""

    key: str
    task: asyncio.Task[Built]
    waiting: int = 0

    async def built(self) -> Built:
        return await asyncio.shield(self.task)


class Compiler:
    """Compiles for one model, on one event loop."""

    def __init__(self, vocabulary: Vocabulary, config: StructuredConfig, try_out: TryOut) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._try_out = try_out
        self._builder = Builder(vocabulary) if vocabulary.tokens is not None else None
        self._limits = Limits(config.compile_timeout_s, config.max_compile_mb << 20)
        self.cache = GrammarCache(config.max_cached_mb << 20)
        self._reasons: dict[_Key, str] = {}
        """Why recent ones were refused."""
        self._shared: dict[_Key, _Shared] = {}
        self._turns = Turns(1)
        self._small = ThreadPoolExecutor(THREADS, "cllm-grammar")
        self._large = ThreadPoolExecutor(THREADS, "cllm-large-grammar", _step_back)
        self._closed = False

    async def compile(self, structure: Structure) -> Grammar:
        """Raises `InvalidRequestError` if the structure is invalid."""
        owner = OWNER.get()
        key = _key(owner.space, structure)
        grammar = self.cache.get(key)
        if grammar is not None:
            return grammar
        if (reason := self._reasons.get(key)) is not None:
            raise _refusal(structure, reason)
        shared = self._shared.get(key) or self._start(key, structure, owner)
        shared.waiting += 1
        try:
            return (await while_wanted(owner, shared.built())).grammar
        except (RefusedError, ExceededError, StructureError) as error:
            raise _refusal(structure, str(error)) from None
        except asyncio.CancelledError:
            if self._closed and shared.task.cancelled():
                raise _closed() from None
            raise
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                self._drop(key, shared.task)
                shared.task.cancel()

    def close(self) -> None:
        self._closed = True
        for shared in list(self._shared.values()):
            with suppress(RuntimeError):  # its loop may be closed
                shared.task.get_loop().call_soon_threadsafe(shared.task.cancel)
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
        self.cache.clear()

    def _start(self, key: _Key, structure: Structure, owner: Owner) -> _Shared:
        self._check(structure, owner.key)
        task = asyncio.create_task(self._make(structure, replace(owner, ended=None)))
        shared = self._shared[key] = _Shared(owner.key, task)
        task.add_done_callback(partial(self._finish, key))
        return shared

    def _finish(self, key: _Key, task: asyncio.Task[Built]) -> None:
        self._drop(key, task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.cache.put(key, task.result())
        elif isinstance(error, RefusedError):
            self._reasons[key] = str(error)
            if len(self._reasons) > MOST_KEPT_REASONS:
                del self._reasons[next(iter(self._reasons))]
        if self.cache.trim_is_due and not self._closed:
            self._large.submit(give_heap_back)

    def _drop(self, key: _Key, task: asyncio.Task[Built]) -> None:
        """Whoever asks from now on starts anew."""
        if (shared := self._shared.get(key)) is not None and shared.task is task:
            del self._shared[key]

    def _check(self, structure: Structure, key: str) -> None:
        if self._closed:
            raise _closed()
        if self._builder is None:
            raise _refusal(structure, "is not supported by this model: it has no token that ends an answer")
        size, most = len(structure.source.encode(errors="replace")), self._config.max_source_kb << 10
        if size > most:
            raise _refusal(structure, f"has {size} bytes; at most {most} are allowed (structured.max_source_kb)")
        most = self._config.max_compiling
        if sum(shared.key == key for shared in self._shared.values()) >= most:
            raise OverloadedError(f"{most} structures of this key are being compiled (structured.max_compiling)")

    async def _make(self, structure: Structure, owner: Owner) -> Built:
        """Raises `RefusedError` if it cannot be."""
        OWNER.set(owner)
        assert self._builder is not None
        try:
            return await self._in_thread(self._small, owner, partial(self._builder.build_small, structure))
        except NotSmallError:
            pass
        try:
            tried = await self._try_out(structure, self._limits)
        except ExceededError as error:
            settings = "structured.compile_timeout_s, structured.max_compile_mb"
            raise ExceededError(f"is too complex: compiling it {error} ({settings})") from None
        if not self.cache.make_room(tried["memory"]):
            raise OverloadedError(
                f"the structures in use take {self.cache.size >> 20} MiB, and this one takes {tried['memory'] >> 20} "
                "MiB more than structured.max_cached_mb leaves"
            )
        build = partial(self._builder.build, tried["source"], tried["memory"])
        return await self._in_thread(self._large, owner, build)

    async def _in_thread(self, threads: ThreadPoolExecutor, owner: Owner, work: Callable[[], T]) -> T:
        """It cannot be interrupted, so its turn lasts until it is done, whoever waits."""
        await self._turns.begin(owner.key, time.monotonic())
        spent = [0.0]

        def timed() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                spent[0] = time.thread_time() - began

        try:
            future = _submit(threads, timed)
        except RuntimeError as error:
            self._turns.end(owner.key, 0.0, time.monotonic())
            raise _closed() from error
        done = asyncio.wrap_future(future)
        done.add_done_callback(lambda _: self._turns.end(owner.key, spent[0], time.monotonic()))
        try:
            return await asyncio.shield(done)
        except (NotSmallError, RefusedError):
            raise
        except ValueError as error:
            raise RefusedError(str(error)) from None


def _submit(threads: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
    usual = threading.stack_size(STACK_BYTES)
    try:
        return threads.submit(work)
    finally:
        threading.stack_size(usual)


def _step_back() -> None:
    """This thread computes when nobody else wants to, where the system knows priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _key(space: bytes, structure: Structure) -> _Key:
    return space, structure.kind, hashlib.blake2b(structure.source.encode(errors="replace"), digest_size=32).digest()


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the model was closed before the structure was compiled")


def _refusal(structure: Structure, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{structure.param}: {reason}", structure.param)
