"""Shows the progress of loading a model: a bar on a terminal, elsewhere a log line every five seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

ByteProgress = Callable[[int, int], None]
"""Called with the bytes that there are and that there will be."""

_LOG = logging.getLogger(__name__)
_SILENT_S = 1.5
_LOG_EVERY_S = 5.0


class LoadProgress:
    """`with LoadProgress(name) as progress:`, then call progress(done, total) in bytes. Quick loads show nothing."""

    def __init__(
        self, name: str, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = f"Loading {name}"
        self._console = console if console is not None else Console(stderr=True)
        self._clock = clock
        self._next = clock() + _SILENT_S
        self._show: ByteProgress | None = None
        self._open = ExitStack()

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()

    def __call__(self, done: int, total: int) -> None:
        if self._show is not None:
            self._show(done, total)
        elif self._clock() >= self._next and done < total:
            self._begin(done, total)

    def _begin(self, done: int, total: int) -> None:
        if not self._console.is_terminal:
            _LOG.info("%s: %d of %d MB (%d%%)", self._label, done // 10**6, total // 10**6, 100 * done // total)
            self._next = self._clock() + _LOG_EVERY_S
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        bar = self._open.enter_context(Bar(*columns, console=self._console, transient=True))
        task = bar.add_task(self._label, completed=done, total=total)
        self._show = lambda done, total: bar.update(task, completed=done, total=total)
