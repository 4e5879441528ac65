"""`AsyncLLM`: a model on the event loop, which is a `TextModel` and an `Executor`. Everything else is built on it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client.registry import Collector

from cllm.config import Config
from cllm.engine.observer import Observers
from cllm.engine.params import SamplingParams
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.submission import Submission
from cllm.errors import BackendError, InvalidRequestError, RequestCancelledError, ShuttingDownError, describe
from cllm.executor import Executor, LocalExecutor
from cllm.generation import Generation, Sink
from cllm.kv.pins import PinMark, WarmResult
from cllm.loading.open_model import ModelShare
from cllm.loading.text_model import PRELOADED, TextModel
from cllm.work.pool import Workers

log = logging.getLogger("cllm")

S = TypeVar("S", bound=Sink)

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, context_window=None)
"""Parameters of a request that only computes its prompt."""

LOW_PRIORITY = 1
"""Behind every request of the last seconds: nobody is waiting for the result."""

_OPEN: set[AsyncLLM] = set()
"""Models to close when the program ends."""


class AsyncLLM:
    """`async with AsyncLLM(config) as llm:` loads a model and frees it at the end; `submit` gives it work."""

    def __init__(
        self,
        config: Config,
        *,
        share: ModelShare | None = None,
        before_mapping: Callable[[], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """`share`: what one of several models gets of the process. `before_mapping` is called, in a thread, before the
        model file is mapped, if it is. `executor`: by default the engine in this process."""
        share = share or ModelShare()
        self.config = config
        self.executor = executor or LocalExecutor(config, share, before_mapping)
        self.workers = share.workers
        """Processes for what cannot be bounded beforehand; None before the start, unless they are shared."""
        self.restore_pins: Callable[[AsyncLLM], Coroutine[Any, Any, None]] | None = None
        """Called when pinned prefixes were lost with their memory, to compute them again."""
        self._shares_workers = share.workers is not None
        self._live: dict[str, Sink] = {}
        self._pinning: asyncio.Task[None] | None = None
        self._pins_lost = False
        """Whether some were lost since `restore_pins` was last called."""

    # -- lifecycle ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self.workers is None or not self._shares_workers:
            self.workers = Workers(self.config.work, PRELOADED)
            self.workers.open()
        try:
            await self.executor.start(self.workers, self._dispatch, self._restore_pins)
        except BaseException:
            self._close_workers()
            raise
        _OPEN.add(self)

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests finish within `grace_s`, refuse the rest, free everything. Safe to call again."""
        if self._pinning is not None:
            self._pinning.cancel()
        try:
            await self.executor.stop(self.config.server.shutdown_grace_s if grace_s is None else grace_s)
            # Let the loop deliver the executor's last outputs; requests that are still open after that fail here.
            await asyncio.sleep(0)
        finally:
            for sink in list(self._live.values()):
                sink.fail(ShuttingDownError("the server shut down before the request finished"))
            self._live.clear()
            self._close()

    def release(self) -> None:
        """The part of `shutdown(0)` that needs no event loop: stop the engine and free its memory, in this thread.

        When the interpreter ends there is no other thread to do it in.
        """
        self.executor.release()
        self._close()

    def _close(self) -> None:
        self._close_workers()
        _OPEN.discard(self)

    def _close_workers(self) -> None:
        if self.workers is not None and not self._shares_workers:
            self.workers.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- the model ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> TextModel:
        """Raises `ShuttingDownError` while the model is not loaded."""
        if self.executor.text is None:
            raise ShuttingDownError("the model is not loaded")
        return self.executor.text

    @property
    def model_name(self) -> str:
        return self.text.name

    @property
    def ready(self) -> bool:
        return self.executor.ready

    @property
    def observers(self) -> Observers:
        return self.executor.observers

    async def refresh(self) -> None:
        """Have the numbers say how things are now."""
        await self.executor.refresh()

    def metrics(self, prefix: str) -> Collector:
        """What /metrics says of this model. To be called once."""
        return self.executor.metrics(prefix)

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **asked: Any) -> Generation:
        """Queue a prompt, by default with the model's sampling parameters. `asked`: more of a `Submission`. Raises at
        once if the request cannot work (see `cllm.errors`)."""
        params = params or SamplingParams.with_model_defaults()
        ids = self.text.encode(prompt, params) if isinstance(prompt, str) else prompt
        return self.queue(Submission(ids, params, **asked))

    def queue(self, submission: Submission) -> Generation:
        """As `submit`, for a request that has been prepared."""
        return self.queue_for(submission, lambda request: Generation(request, self.text.tokenizer, self.cancel))

    def queue_for(self, submission: Submission, sink: Callable[[Request], S]) -> S:
        """As `queue`, for tokens instead of text: what `sink` returns takes the outputs as they are."""
        request = self.text.request_of(submission, self.executor.rows)
        if request.id in self._live:
            raise InvalidRequestError(f"a request with the id {request.id} is already running", "request_id")
        taker = sink(request)
        self._live[request.id] = taker
        try:
            self.executor.submit(request)
        except BaseException:
            del self._live[request.id]
            request.close()
            raise
        return taker

    async def confirm(self, generations: Iterable[Generation]) -> None:
        """Wait until it is certain that these are accepted. Raises the error of one that is not, as `submit` may."""
        for generation in generations:
            await self.executor.accepted(generation.request_id)
            # After the first token the reader gets it, behind the tokens.
            if generation.error is not None and not generation.completion_tokens:
                raise generation.error

    async def warm(self, submission: Submission) -> WarmResult:
        """Compute or load the K/V of a prompt, with a request of one token, which is discarded."""
        return await self.executor.everywhere(submission, self._warm)

    async def _warm(self, submission: Submission) -> WarmResult:
        marks = [replace(mark) for mark in submission.pins]
        started = time.perf_counter()
        async with self.queue(replace(submission, params=ONE_TOKEN, pins=marks)) as generation:
            async for _ in generation:
                pass
        took = time.perf_counter() - started
        mark = marks[0] if marks else PinMark(0)
        left_s = mark.left_s if mark.pin_id is not None and math.isfinite(mark.left_s) else None
        cached = generation.cached_tokens
        return WarmResult(len(submission.prompt), cached, took, mark.pin_id, mark.pinned_tokens, left_s, mark.refusal)

    def requests(self) -> list[Request]:
        """All that are waiting or running."""
        return [sink.request for sink in self._live.values()]

    def end(self, request_id: str, why: str) -> bool:
        """End a request with an error. False if there is none with that id."""
        return self._end(request_id, RequestCancelledError(why))

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End one answer, which then gets an output with this `reason`; or the whole request, without any further
        output. Unknown and ended ones are ignored."""
        self.executor.cancel(request_id, index, reason)
        if index is None:
            self._live.pop(request_id, None)

    def _end(self, request_id: str, error: Exception) -> bool:
        sink = self._live.get(request_id)
        if sink is None:
            return False
        self.cancel(request_id)
        sink.fail(error)
        return True

    def _dispatch(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            sink = self._live.get(output.request_id)
            if sink is None:
                continue
            try:
                sink.take(output, now)
                done = sink.done
            except Exception as error:
                log.exception("request %s: its outputs could not be taken", output.request_id)
                self._end(output.request_id, BackendError(describe(error)))
            else:
                if done:
                    self._live.pop(output.request_id, None)

    # -- pins that were lost -----------------------------------------------------------------------------------

    def _restore_pins(self) -> None:
        """Have prefixes that were pinned in the lost memory computed again, at low priority."""
        self._pins_lost = True
        if self.restore_pins is not None and (self._pinning is None or self._pinning.done()):
            self._pinning = asyncio.create_task(self._pin_lost(self.restore_pins))

    async def _pin_lost(self, restore_pins: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        """Again if more memory is lost meanwhile: `restore_pins` may have looked before that."""
        while self._pins_lost:
            self._pins_lost = False
            await restore_pins(self)


@atexit.register
def _release_all() -> None:
    """Stop the engines' threads while Python can still run them: later they would be cut off wherever they are."""
    for llm in list(_OPEN):
        # Only daemon threads may still wait for outputs, and they end with the program: errors would be noise.
        llm.executor.release(mute=True)
        llm._close()


# A forked process has a copy of everything but the threads: there is nothing to stop.
os.register_at_fork(after_in_child=_OPEN.clear)
