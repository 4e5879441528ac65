"""The asynchronous face of a loaded model, which the server and everything else stand on."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cllm.assemble import Parts, assemble
from cllm.config import Config
from cllm.dialect.dialect import dialect_of
from cllm.embedding import EMBEDDING
from cllm.engine.loop import Engine
from cllm.engine.observer import Observers
from cllm.engine.params import SamplingParams
from cllm.engine.reading import Reading
from cllm.engine.request import FinishReason, Output, Request, build_request
from cllm.engine.rows import RowSampler, fastest
from cllm.engine.tenant import NOBODY, Tenant
from cllm.engine.turns import Turn, Turns
from cllm.errors import InvalidRequestError, RequestCancelledError, ShuttingDownError
from cllm.generation import Generation
from cllm.kv.events import Listener
from cllm.kv.manager import KVManager
from cllm.kv.pins import LostPin, PinMark
from cllm.loaded import LoadedModel
from cllm.opening import Place
from cllm.still_open import STILL_OPEN
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.text.bounded import TokenLimit, checked_ids
from cllm.text.chat import PLAIN, PromptOptions
from cllm.text.volatile import VolatileHeads
from cllm.windows import Windows

GIL_SWITCH_S = 5e-4
"""How long Python lets one thread hold the interpreter while another waits; the engine must not wait 5 ms a step."""


class AsyncLLM(LoadedModel):
    """A loaded model that takes prompts. `async with AsyncLLM(config) as llm:` loads and, at the end, frees it."""

    def __init__(
        self,
        config: Config,
        *,
        before_mapping: Callable[[], None] | None = None,
        place: Place | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`before_mapping` is called, in a thread, before the model file is mapped, if it is. One of several models has
        a `place` among them, and takes `turns` with them."""
        super().__init__(config)
        self._before_mapping = before_mapping
        self._place = place
        self._turns = turns
        self.observers = Observers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, Generation] = {}
        self.deaf = False
        """Whether what the engine says is no longer passed on."""
        self._rows: RowSampler | None = None
        self._volatile = VolatileHeads(config.prompt.volatile_patterns)
        self.pin_again: Callable[[AsyncLLM], Coroutine[Any, Any, None]] | None = None
        """Computes anew what was pinned, when its memory was lost."""
        self._pinning: asyncio.Task[None] | None = None
        self._pins_lost = False
        """Whether some were lost that nobody has looked for since."""

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        sys.setswitchinterval(GIL_SWITCH_S)
        self._loop = asyncio.get_running_loop()
        self._rows = fastest(self.config.backend.native.instruction_set)
        parts = await asyncio.to_thread(assemble, self.config, self._before_mapping, self._place)
        # A backend that computes ahead has a device of its own to share.
        turn = self._turns.join() if self._turns is not None and parts.backend.depth == 1 else None
        try:
            self._windows = Windows(
                self.config.kv.window, parts.scheduler.kv, parts.max_context, parts.backend.no_window
            )
            self._dialect = dialect_of(parts.chat_template, parts.tokenizer, self.config.chat)
            engine = self._engine_of(parts, turn)
            engine.start()
        except BaseException:
            if turn is not None:
                turn.leave()
            parts.close()
            raise
        self._parts, self._engine = parts, engine
        STILL_OPEN.add(self)

    def _engine_of(self, parts: Parts, turn: Turn | None) -> Engine:
        engine = Engine(
            parts.backend,
            parts.scheduler,
            self._deliver,
            max_queue=self.config.scheduler.max_queue,
            upkeep_share=self.config.kv.compaction_share,
            turn=turn,
        )
        if self._place is not None and self._place.account is not None:
            self._place.account.wake = engine.wake
        # The same list, so that whoever adds an observer later is heard too.
        parts.scheduler.observers = self.observers
        parts.scheduler.kv.on_eviction = self.observers.evicted
        engine.on_rebuilt = lambda: self._on_rebuilt(parts.scheduler.kv)
        return engine

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests end within `grace_s`, refuse the rest, free everything. Safe to call again."""
        engine, parts = self._engine, self._parts
        if engine is None:
            return
        if self._pinning is not None:
            self._pinning.cancel()
        if parts is not None:
            await asyncio.to_thread(engine.stop, self.config.server.shutdown_grace_s if grace_s is None else grace_s)
        # The engine's last outputs are on their way through the loop; what has none by then is told directly.
        await asyncio.sleep(0)
        for generation in list(self._live.values()):
            generation.fail(ShuttingDownError("the server shut down before the request was done"))
        self._live.clear()
        if parts is not None:
            await asyncio.to_thread(parts.close)
        self._parts = None
        STILL_OPEN.discard(self)

    def release(self) -> None:
        """What of `shutdown(0)` needs no event loop: stop the engine and free its memory, in the calling thread.

        At the end of the interpreter there is no other thread to do it in.
        """
        engine, parts = self._engine, self._parts
        if engine is not None and parts is not None:
            engine.stop(0)
            parts.close()
        self._parts = None
        STILL_OPEN.discard(self)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- work --------------------------------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """The prompt for the next message, which may be as long as requests with these parameters allow."""
        prepared, options = self.dialect.prepare(self._volatile.strip(messages), options)
        return self.chat_template.encode(self.tokenizer, prepared, self.prompt_limit(params), options)

    def encode_beginning(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """What prompts begin with whose first messages are these."""
        return self.encode_chat(messages, params, replace(options, asks=False, continues=False))

    async def compile(self, structure: Structure) -> Grammar:
        """What `submit` takes for answers of that structure. Raises `InvalidRequestError` where it cannot be had."""
        return await self._loaded.compiler.compile(structure)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = NOBODY,
        pins: Sequence[PinMark] = (),
        grammar: Grammar | None = None,
        shown: Mapping[int, bytes] | None = None,
    ) -> Generation:
        """Queue a prompt; without `params`, with the model's defaults. Raises at once what can be known at once: see
        `cllm.errors`.

        `timeout_s` may shorten scheduler.request_timeout_s, never lengthen it. Prefixes are shared with requests whose
        `tenant` has the same space. `pins` are what of the prompt is to stay in the cache; they say what came of it
        when the generation has ended. `grammar` is what `compile` made of `params.structured`.
        `shown` are special tokens that are part of the answer's text.
        """
        params = (params or SamplingParams.with_model_defaults()).completed(self.sampling_defaults.values)
        reading = self.reads.begin_answer(params)
        return self._submit(prompt, params, reading, request_id, priority, timeout_s, tenant, pins, grammar, shown)

    def submit_embedding(
        self,
        text: str | Sequence[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = NOBODY,
    ) -> Generation:
        """Queue a text to be embedded: its `embedding` is there when the generation, which generates nothing, is done.
        Raises as `submit` does."""
        return self._submit(text, EMBEDDING, self.reads.begin(), request_id, priority, timeout_s, tenant)

    def _submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        reading: Reading | None,
        request_id: str | None,
        priority: int,
        timeout_s: float | None,
        tenant: Tenant,
        pins: Sequence[PinMark] = (),
        grammar: Grammar | None = None,
        shown: Mapping[int, bytes] | None = None,
    ) -> Generation:
        engine, limit = self._running, self.prompt_limit(params)
        tokens = self._encode(prompt, limit) if isinstance(prompt, str) else prompt
        ids = checked_ids(tokens, limit, self.shape.n_vocab)
        if grammar is None and params.structured is not None:
            raise InvalidRequestError("give grammar=await compile(params.structured)", params.structured.param)
        longest_s = self.config.scheduler.request_timeout_s
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        if request_id in self._live:
            raise InvalidRequestError(f"a request with the id {request_id} is running already", "request_id")
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
            vocab_size=self.shape.n_vocab,
            window=self._window_of(params),
            rows=self._rows,
            tenant=tenant,
            pins=pins,
            constraint=None if grammar is None else grammar.start(),
            reading=reading,
        )
        generation = Generation(request, self.tokenizer, self._cancel, shown)
        self._live[request_id] = generation
        try:
            engine.submit(request)
        except BaseException:
            del self._live[request_id]
            raise
        return generation

    def requests(self) -> list[Request]:
        """Those that wait or run."""
        return [generation.request for generation in self._live.values()]

    def end(self, request_id: str, why: str) -> bool:
        """End a request with an error that says why. False: there is none of that id."""
        generation = self._live.get(request_id)
        if generation is None:
            return False
        self._cancel(request_id)
        generation.fail(RequestCancelledError(why))
        return True

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        """End a pin. False: there is none of that name (in that space)."""
        kv = self._loaded.scheduler.kv
        return await asyncio.wrap_future(self._running.ask(lambda: kv.unpin(name, space)))

    async def lost_pins(self) -> list[LostPin]:
        """Those that are to be computed again."""
        return await asyncio.wrap_future(self._running.ask(self._loaded.scheduler.kv.lost_pins))

    async def listen(self) -> Listener | None:
        """What comes into the cache of prefixes and leaves it, from now on. None: there is no such cache."""
        return await asyncio.wrap_future(self._running.ask(self._loaded.scheduler.kv.listen))

    # -- inside ------------------------------------------------------------------------------------------------

    def _encode(self, prompt: str, limit: TokenLimit) -> list[int]:
        limit.check_text(self.tokenizer, prompt, "prompt")
        return self.tokenizer.encode(prompt)

    def _cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id, index, reason)
        if index is None:
            self._live.pop(request_id, None)

    def _deliver(self, outputs: list[Output]) -> None:
        """On the engine's thread: hand a step's outputs to the event loop, in one call."""
        assert self._loop is not None
        if not self.deaf and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _on_rebuilt(self, kv: KVManager) -> None:
        """On the engine's thread: what was pinned in the memory that is lost is computed again, behind all others."""
        assert self._loop is not None
        if kv.lost_pins() and not self.deaf and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pin_again)

    def _pin_again(self) -> None:
        self._pins_lost = True
        if self.pin_again is not None and (self._pinning is None or self._pinning.done()):
            self._pinning = asyncio.create_task(self._pin_lost(self.pin_again))

    async def _pin_lost(self, pin_again: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        """Once more if memory was lost meanwhile: the last look may have been before that."""
        while self._pins_lost:
            self._pins_lost = False
            await pin_again(self)

    def _dispatch(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            generation = self._live.get(output.request_id)
            if generation is None:
                continue
            generation.take(output, now)
            if generation.done:
                del self._live[output.request_id]
