"""One source of events for all watchers.

    engine ──view─────► hub ──encoded once──► recent events ──► watcher: those it has not had
                                                            └─► watcher, new or too slow: the newest frame whole

Nothing is queued for anybody: a watcher knows the last version it has sent. Without watchers nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import psutil

from cllm.errors import ModelUnavailableError, ShuttingDownError
from cllm.server.errors import ApiError
from cllm.server.page.cache_events import summarize
from cllm.server.page.encode import Frame, Source, TextOf, change, frame_of, whole

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.engine.stats import EngineView
    from cllm.kv.events import Listener
    from cllm.llm import AsyncLLM

log = logging.getLogger("cllm.server")

TICK_S = 0.05
"""How often the hub looks for a new view; the engine makes them less often."""
QUIET_TICKS = 20
"""While nothing happens, the numbers are sent every so many ticks."""
RECENT = 8
"""Events that a slow watcher may be behind by; one that is further behind gets a whole frame."""
INLINE_S = 0.001
"""Encoding goes to a thread, unless the last time took less than this."""


KEPT = ("disk", "pins")
"""Parts of `details` in `/kv` that are sent."""


class Hub:
    def __init__(self, llm: AsyncLLM, config: Config, name: str | None = None) -> None:
        """`name`: what one of several models is called."""
        self._llm = llm
        self._alias = name or config.model.alias
        self._block_tokens = config.resources.block_size
        self._most = config.server.max_watchers
        self._text_of = _text_source(llm) if config.server.page_shows_prompts else None
        self._process = psutil.Process()
        self.watchers = 0
        self._versions = count(1)
        self._ticking: asyncio.Task[None] | None = None
        self._frame: Frame | None = None
        self._whole: tuple[int, bytes] = (0, b"")
        self._whole_in_thread = True
        self._making_whole = asyncio.Lock()
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT)
        self._news = asyncio.Event()
        self._listener: Listener | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What one watcher is sent, for as long as the engine lives. Raises at once if there are too many."""
        self._join()
        seen = 0
        try:
            while True:
                data, seen = await self._after(seen)
                yield data
        except ShuttingDownError:
            return
        finally:
            await self._leave()

    def _join(self) -> None:
        if self.watchers >= self._most:
            raise ApiError(
                503,
                f"Too many open pages: {self.watchers} (server.max_watchers).",
                kind="unavailable_error",
                code="too_many_watchers",
                headers={"Retry-After": "10"},
            )
        self._llm.executor.watch()
        self.watchers += 1
        if self._ticking is None or self._ticking.done():
            # What the last watchers saw is old, and no event says what has changed since.
            self._frame = None
            self._recent.clear()
            self._ticking = asyncio.create_task(self._tick())

    async def _leave(self) -> None:
        self.watchers -= 1
        self._llm.executor.unwatch()
        if self.watchers == 0 and self._ticking is not None:
            ticking, self._ticking = self._ticking, None
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def _after(self, seen: int) -> tuple[bytes, int]:
        while self._frame is None or self._frame.version == seen:
            if self._ticking is None or self._ticking.done():
                raise ShuttingDownError("the engine has ended")
            await self._news.wait()
        newest = self._frame.version
        missing = [data for version, data in self._recent if version > seen]
        if seen and len(missing) == newest - seen:
            return b"".join(missing), newest
        return await self._whole_of(self._frame)

    async def _whole_of(self, frame: Frame) -> tuple[bytes, int]:
        """The frame, or a newer one, whole: encoded once for all who ask."""
        async with self._making_whole:
            if self._whole[0] < frame.version:
                in_thread = self._whole_in_thread
                data, seconds = await asyncio.to_thread(_encode_whole, frame) if in_thread else _encode_whole(frame)
                self._whole_in_thread = seconds > INLINE_S
                self._whole = (frame.version, data)
            version, data = self._whole
        return data, version

    async def _tick(self) -> None:
        quiet, in_thread = 0, True
        try:
            self._listener = await self._llm.executor.listen()
            while True:
                view = self._llm.executor.view()
                known = self._frame and self._frame.view
                quiet = quiet + 1 if view is known else 0
                if view is not None and quiet % QUIET_TICKS == 0:
                    in_thread = await self._advance(view, in_thread)
                await asyncio.sleep(TICK_S)
        except (ModelUnavailableError, ShuttingDownError):
            pass
        except Exception:
            log.exception("the page's stream broke off")
        finally:
            self._listener = None
            self._tell()

    async def _advance(self, view: EngineView, in_thread: bool) -> bool:
        """Encode the next event; says whether it took so long that the next one should be encoded in a thread."""
        news = summarize(self._listener.take()) if self._listener is not None else []
        source = Source(
            next(self._versions),
            view,
            self._names(),
            self._now(),
            self._text_of,
            self._kept(),
            news,
            self._llm.executor.replicas(),
        )
        if in_thread:
            frame, data, seconds = await asyncio.to_thread(_encode, self._frame, source)
        else:
            frame, data, seconds = _encode(self._frame, source)
        self._frame = frame
        self._recent.append((frame.version, data))
        self._tell()
        return seconds > INLINE_S

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _names(self) -> dict[str, Any]:
        llm = self._llm
        return {
            "model": self._alias or llm.model_name,
            "backend": llm.text.facts.traits.name,
            "context": llm.text.max_context,
            "block_tokens": self._block_tokens,
            "groups": [group._asdict() for group in llm.text.facts.groups],
        }

    def _kept(self) -> dict[str, Any]:
        details = self._llm.executor.kv()["details"]
        return {part: details[part] for part in KEPT if details.get(part) is not None}

    def _now(self) -> dict[str, Any]:
        snapshot = self._llm.executor.snapshot()
        numbers = {key: value for key, value in snapshot._asdict().items() if key not in ("kv", "finished")}
        is_here = self._llm.executor.replicas() is None  # otherwise this process holds none of the memory that is shown
        return {
            "time": round(time.time(), 3),
            **({"resident_bytes": self._process.memory_info().rss} if is_here else {}),
            "finished": dict(snapshot.finished),
            **numbers,
            "kv": snapshot.kv.as_dict(),
        }


def _encode(before: Frame | None, source: Source) -> tuple[Frame, bytes, float]:
    started = time.thread_time()
    frame = frame_of(before, source)
    data = b"" if before is None else change(before, frame)
    return frame, data, time.thread_time() - started


def _encode_whole(frame: Frame) -> tuple[bytes, float]:
    started = time.thread_time()
    data = whole(frame)
    return data, time.thread_time() - started


def _text_source(llm: AsyncLLM) -> TextOf:
    """How prefixes begin, decoded once for those that stay."""

    @lru_cache(maxsize=1024)
    def decode(tokens: tuple[int, ...]) -> str:
        return llm.text.tokenizer.decode(tokens)

    def text_of(tokens: Sequence[int]) -> str:
        return decode(tuple(tokens))

    return text_of
