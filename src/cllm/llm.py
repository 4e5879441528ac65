"""`AsyncLLM`: a loaded model on the event loop. The server, the command line and `LLM` are built on it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client.registry import Collector

from cllm.config import Config
from cllm.engine.loop import Engine
from cllm.engine.observer import Observers
from cllm.engine.params import SamplingParams
from cllm.engine.reading import PromptScoring, Reading
from cllm.engine.request import FinishReason, Output, Request, build_request
from cllm.engine.resuming import Generated
from cllm.engine.row_sampler import RowSampler
from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.engine.time_sharing import TimeShare
from cllm.errors import BackendError, InvalidRequestError, RequestCancelledError, ShuttingDownError, describe
from cllm.generation import Generation, Sink
from cllm.kv.events import Listener
from cllm.kv.manager import KVManager
from cllm.kv.pins import LostPin, PinMark, PinSource, WarmResult
from cllm.loading.embedder import EMBEDDING
from cllm.loading.loaded_model import LoadedModel
from cllm.loading.open_model import ModelShare
from cllm.loading.parts import ModelParts, load_model
from cllm.loading.text_work import PRELOADED
from cllm.observe.metrics import EngineCollector, MetricsObserver
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.text.chat_template import PLAIN, PromptOptions
from cllm.text.token_limit import TokenLimit, validate_ids
from cllm.text.tokenizer import encode_prompt
from cllm.work.pool import Workers

log = logging.getLogger("cllm")

S = TypeVar("S", bound=Sink)

GIL_SWITCH_S = 5e-4
"""How long one thread may hold the interpreter while another waits. Python's 5 ms would add up in every step."""

LOW_PRIORITY = 1
"""Behind every request of the last seconds: nobody is waiting for the result."""

_OPEN: set[AsyncLLM] = set()
"""Models to close when the program ends."""


class AsyncLLM(LoadedModel):
    """`async with AsyncLLM(config) as llm:` loads a model and frees it at the end; `submit` gives it work."""

    def __init__(
        self,
        config: Config,
        *,
        share: ModelShare | None = None,
        before_mapping: Callable[[], None] | None = None,
    ) -> None:
        """`share`: what one of several models gets of the process. `before_mapping` is called, in a thread, before the
        model file is mapped, if it is."""
        super().__init__(config)
        self._share = share
        self._before_mapping = before_mapping
        self.observers = Observers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, Sink] = {}
        self._muted = False
        """Whether the engine's outputs are dropped: the program is ending."""
        self.workers = share.workers if share is not None else None
        """Processes for what cannot be bounded beforehand; None before the start, unless they are shared."""
        self.restore_pins: Callable[[AsyncLLM], Coroutine[Any, Any, None]] | None = None
        """Called when pinned prefixes were lost with their memory, to compute them again."""
        self._pinning: asyncio.Task[None] | None = None
        self._pins_lost = False
        """Whether some were lost since `restore_pins` was last called."""

    # -- lifecycle ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        sys.setswitchinterval(GIL_SWITCH_S)
        self._loop = asyncio.get_running_loop()
        workers = self._open_workers()
        try:
            parts = await asyncio.to_thread(load_model, self.config, workers, self._share, self._before_mapping)
        except BaseException:
            self._close_workers()
            raise
        sharing = None if self._share is None else self._share.time_sharing
        # A backend that computes ahead has a device of its own.
        time_share = sharing.join() if sharing is not None and parts.backend.traits.depth == 1 else None
        try:
            engine = self._build_engine(parts, time_share)
            engine.start()
        except BaseException:
            if time_share is not None:
                time_share.leave()
            parts.close()
            self._close_workers()
            raise
        self._text, self._parts, self._engine = parts.text, parts, engine
        _OPEN.add(self)

    def _open_workers(self) -> Workers:
        """The workers that the models of this process share, or its own."""
        if self._share is not None and self._share.workers is not None:
            return self._share.workers
        self.workers = Workers(self.config.work, PRELOADED)
        self.workers.open()
        return self.workers

    def _close_workers(self) -> None:
        if self.workers is not None and (self._share is None or self._share.workers is None):
            self.workers.close()

    def _build_engine(self, parts: ModelParts, time_share: TimeShare | None) -> Engine:
        engine = Engine(
            parts.backend,
            parts.scheduler,
            self._deliver,
            max_queue=self.config.scheduler.max_queue,
            upkeep_share=self.config.kv.compaction_share,
            time_share=time_share,
        )
        if self._share is not None and self._share.account is not None:
            self._share.account.wake = engine.wake
        # The same list, so that observers may be added later.
        parts.scheduler.requests.observers = self.observers
        parts.scheduler.kv.on_eviction = self.observers.evicted
        engine.on_rebuilt = lambda: self._on_rebuilt(parts.scheduler.kv)
        return engine

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests finish within `grace_s`, refuse the rest, free everything. Safe to call again."""
        engine, parts = self._engine, self._parts
        if engine is None:
            return
        if self._pinning is not None:
            self._pinning.cancel()
        if parts is not None:
            await asyncio.to_thread(engine.stop, self.config.server.shutdown_grace_s if grace_s is None else grace_s)
        # Let the loop deliver the engine's last outputs; requests that are still open after that fail here.
        await asyncio.sleep(0)
        for sink in list(self._live.values()):
            sink.fail(ShuttingDownError("the server shut down before the request finished"))
        self._live.clear()
        if parts is not None:
            parts.text.close()
            await asyncio.to_thread(parts.close)
        self._close_workers()
        self._text = self._parts = None
        _OPEN.discard(self)

    def release(self) -> None:
        """The part of `shutdown(0)` that needs no event loop: stop the engine and free its memory, in this thread.

        When the interpreter ends there is no other thread to do it in.
        """
        engine, parts = self._engine, self._parts
        if engine is not None and parts is not None:
            engine.stop(0)
            parts.close()
        self._close_workers()
        self._text = self._parts = None
        _OPEN.discard(self)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- requests ----------------------------------------------------------------------------------------------

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """The prompt for the next message. `limit`: how long it may be, by default what `params` allow."""
        return await self.text_work.encode_chat(messages, options, limit or self.prompt_limit(params))

    async def encode_beginning(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """What every prompt begins with whose first messages are these."""
        return await self.encode_chat(messages, params, replace(options, asks=False, continues=False))

    def encode(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Sequence[int]:
        """The tokens of a prompt as `submit` computes them. Raises `InvalidRequestError` if there are too many or none,
        or an unknown one."""
        limit = self.prompt_limit(params)
        tokens = self._encode(prompt, limit) if isinstance(prompt, str) else prompt
        return validate_ids(tokens, limit, self.spec.n_vocab)

    async def compile(self, structure: Structure) -> Grammar:
        """The `grammar` that `submit` takes. Raises `InvalidRequestError` if the structure cannot be compiled."""
        return await self._prepared.compiler.compile(structure)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
        session: str | None = None,
        pins: Sequence[PinMark] = (),
        grammar: Grammar | None = None,
        shown: Mapping[int, bytes] | None = None,
        generated: Generated | None = None,
    ) -> Generation:
        """Queue a prompt, by default with the model's sampling parameters. Raises at once if the request cannot work
        (see `cllm.errors`).

        `timeout_s` may shorten scheduler.request_timeout_s, never lengthen it. Prefixes are shared with requests whose
        `tenant` has the same space. `pins` are the parts of the prompt to keep in the cache, and hold the outcome once
        the generation has ended. `grammar` is `params.structured`, compiled. `shown` are special tokens that are part
        of the answer's text.

        `session`: requests with the same one have much in common; in a cluster they go to the same replica if that
        costs nothing.

        `generated` resumes answers of a request with the same prompt, parameters and seed that was cut off: for each
        the tokens that it has, or None if it has ended. The generation consists of what follows them.
        """
        return self.submit_to(
            lambda request: Generation(request, self.tokenizer, self.cancel, shown),
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            tenant=tenant,
            session=session,
            pins=pins,
            grammar=grammar,
            generated=generated,
        )

    def submit_to(
        self,
        sink: Callable[[Request], S],
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
        session: str | None = None,
        pins: Sequence[PinMark] = (),
        grammar: Grammar | None = None,
        generated: Generated | None = None,
    ) -> S:
        """As `submit`, for tokens instead of text: what `sink` returns takes the engine's outputs as they are."""
        params = (params or SamplingParams.with_model_defaults()).completed(self.sampling_defaults.values)
        scoring = self._prompt_scoring(params)
        return self._submit(
            sink, prompt, params, scoring, request_id, priority, timeout_s, tenant, pins, grammar, generated, session
        )

    def submit_embedding(
        self,
        text: str | Sequence[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
    ) -> Generation:
        """Queue a text to embed. The generation has no text, and an `embedding` once it is done. Raises as `submit`
        does."""
        return self.submit_embedding_to(
            lambda request: Generation(request, self.tokenizer, self.cancel),
            text,
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            tenant=tenant,
        )

    def submit_embedding_to(
        self,
        sink: Callable[[Request], S],
        text: str | Sequence[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
    ) -> S:
        """As `submit_embedding`: what `sink` returns takes an output with the embedding, then one with the end."""
        return self._submit(sink, text, EMBEDDING, self.embedder.pooling(), request_id, priority, timeout_s, tenant)

    async def warm(
        self,
        prompt: Sequence[int],
        *,
        pin: bool = False,
        ttl_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
        request_id: str | None = None,
        priority: int = LOW_PRIORITY,
        source: PinSource = "warm",
    ) -> WarmResult:
        """Compute or load the K/V of a prompt, with a request of one token, which is discarded."""
        mark = PinMark(len(prompt), math.inf if ttl_s is None else ttl_s, source)
        started = time.perf_counter()
        generation = self.submit(
            prompt,
            SamplingParams(max_tokens=1, temperature=0.0, context_window=None),
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            pins=[mark] if pin else [],
        )
        async with generation:
            async for _ in generation:
                pass
        took = time.perf_counter() - started
        left_s = mark.left_s if mark.pin_id is not None and math.isfinite(mark.left_s) else None
        return WarmResult(
            len(prompt), generation.cached_tokens, took, mark.pin_id, mark.pinned_tokens, left_s, mark.refusal
        )

    def _prompt_scoring(self, params: SamplingParams) -> PromptScoring | None:
        """Raises `InvalidRequestError` if the model cannot generate, or not with prompt_logprobs."""
        facts = self._prepared.facts
        if facts.traits.no_answers is not None:
            raise InvalidRequestError(facts.traits.no_answers, "model")
        if params.prompt_logprobs is None:
            return None
        if facts.traits.no_reading is not None:
            raise InvalidRequestError(f"prompt_logprobs: {facts.traits.no_reading}", "prompt_logprobs")
        return PromptScoring(params.prompt_logprobs, facts.traits.score_weight)

    def _submit(
        self,
        sink: Callable[[Request], S],
        prompt: str | Sequence[int],
        params: SamplingParams,
        reading: Reading | None,
        request_id: str | None,
        priority: int,
        timeout_s: float | None,
        tenant: Tenant,
        pins: Sequence[PinMark] = (),
        grammar: Grammar | None = None,
        generated: Generated | None = None,
        session: str | None = None,
    ) -> S:
        ids = self.encode(prompt, params)
        if grammar is None and params.structured is not None:
            raise InvalidRequestError("pass grammar=await compile(params.structured)", params.structured.param)
        longest_s = self.config.scheduler.request_timeout_s
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        if request_id in self._live:
            raise InvalidRequestError(f"a request with the id {request_id} is already running", "request_id")
        request = build_request(
            request_id,
            ids,
            params,
            arrival=time.monotonic(),
            timeout_s=longest_s if timeout_s is None else min(timeout_s, longest_s),
            priority=priority,
            eos_ids=self.tokenizer.eos_ids,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_context=self.max_context,
            vocab_size=self.spec.n_vocab,
            window=self._window_of(params),
            rows=self._row_sampler,
            tenant=tenant,
            pins=pins,
            constraint=None if grammar is None else grammar.start(),
            reading=reading,
            generated=generated,
        )
        request.session = session
        taker = sink(request)
        self._live[request_id] = taker
        try:
            self._start_request(request)
        except BaseException:
            del self._live[request_id]
            request.close()
            raise
        return taker

    async def confirm(self, generations: Iterable[Generation]) -> None:
        """Wait until it is certain that these are accepted. Raises the error of one that is not, as `submit` may."""

    def requests(self) -> list[Request]:
        """All that are waiting or running."""
        return [sink.request for sink in self._live.values()]

    def end(self, request_id: str, why: str) -> bool:
        """End a request with an error. False if there is none with that id."""
        return self._end(request_id, RequestCancelledError(why))

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End one answer, which then gets an output with this `reason`; or the whole request, without any further
        output. Unknown and ended ones are ignored."""
        if self._engine is not None:
            self._engine.cancel(request_id, index, reason)
        if index is None:
            self._live.pop(request_id, None)

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        """Remove a pin. False if there is none with that name (in that space)."""
        kv = self._loaded.scheduler.kv
        return await asyncio.wrap_future(self._running.call(lambda: kv.unpin(name, space)))

    async def lost_pins(self) -> list[LostPin]:
        """Pins whose memory was lost and that have not been computed again."""
        return await asyncio.wrap_future(self._running.call(self._loaded.scheduler.kv.lost_pins))

    async def listen(self) -> Listener | None:
        """Subscribe to what enters and leaves the prefix cache. None if there is no such cache."""
        return await asyncio.wrap_future(self._running.call(self._loaded.scheduler.kv.listen))

    async def held_names(self) -> tuple[int, set[bytes]]:
        """All blocks in the prefix cache, and the number of the latest event they include."""
        return await asyncio.wrap_future(self._running.call(self._loaded.scheduler.kv.held_names))

    def metrics(self, prefix: str) -> Collector:
        """What /metrics says of this model. To be called once."""
        observer = MetricsObserver()
        self.observers.append(observer)
        return EngineCollector(prefix, lambda: self.model_name, self.snapshot, observer)

    # -- internals ---------------------------------------------------------------------------------------------

    def _start_request(self, request: Request) -> None:
        """Raises at once if it cannot be taken."""
        self._running.submit(request)

    @property
    def _row_sampler(self) -> RowSampler | None:
        """What samples here, if anything does."""
        return self._loaded.row_sampler

    def _encode(self, prompt: str, limit: TokenLimit) -> list[int]:
        limit.check_text(self.tokenizer, prompt, "prompt", special=True)
        return encode_prompt(self.tokenizer, prompt)

    def _end(self, request_id: str, error: Exception) -> bool:
        sink = self._live.get(request_id)
        if sink is None:
            return False
        self.cancel(request_id)
        sink.fail(error)
        return True

    def _deliver(self, outputs: list[Output]) -> None:
        """On the engine's thread: hand a step's outputs to the event loop, in one call."""
        assert self._loop is not None
        if not self._muted and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _on_rebuilt(self, kv: KVManager) -> None:
        """On the engine's thread: have prefixes that were pinned in the lost memory computed again, at low priority."""
        assert self._loop is not None
        if kv.lost_pins() and not self._muted and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._restore_pins)

    def _restore_pins(self) -> None:
        self._pins_lost = True
        if self.restore_pins is not None and (self._pinning is None or self._pinning.done()):
            self._pinning = asyncio.create_task(self._pin_lost(self.restore_pins))

    async def _pin_lost(self, restore_pins: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        """Again if more memory is lost meanwhile: `restore_pins` may have looked before that."""
        while self._pins_lost:
            self._pins_lost = False
            await restore_pins(self)

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


@atexit.register
def _release_all() -> None:
    """Stop the engines' threads while Python can still run them: later they would be cut off wherever they are."""
    for llm in list(_OPEN):
        # Only daemon threads may still wait for outputs, and they end with the program: errors would be noise.
        llm._muted = True
        llm.release()


if hasattr(os, "register_at_fork"):
    # A forked process has a copy of everything but the threads: there is nothing to stop.
    os.register_at_fork(after_in_child=_OPEN.clear)
