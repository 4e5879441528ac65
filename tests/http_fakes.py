"""A stand-in for the engine behind the HTTP tests: it answers what the test says, when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from cllm.config import Config
from cllm.dialect.dialect import Dialect, dialect_of
from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenLogprob
from cllm.engine.stats import EngineSnapshot
from cllm.errors import InvalidRequestError
from cllm.kv.usage import KVUsage
from cllm.models.shape import ModelShape
from cllm.sampling_defaults import SamplingDefaults
from cllm.server.app import create_app
from cllm.server.connection import Connection
from cllm.server.connections import Connections
from cllm.structured.structure import Structure
from cllm.text.bounded import TokenLimit
from cllm.text.chat import CHATML, PLAIN, ChatTemplate, PromptOptions
from cllm.text.infill import Infill

SHAPE = ModelShape("llama", 2, 8, 2, 1, 4, 4, 0x110000, 64)
KV = KVUsage(
    layout="paged",
    unit_tokens=16,
    bytes_per_unit=1024,
    total=100,
    free=60,
    evictable=30,
    referenced=10,
    peak=55,
    sequences_running=2,
    sequences_held=3,
    free_segments=4,
    largest_free_span=40,
    evictions=7,
    allocation_failures=1,
    compactions=2,
    moved_bytes=4096,
    query_tokens=200,
    hit_tokens=150,
)
SNAPSHOT = EngineSnapshot(
    kv=KV,
    running=2,
    waiting=5,
    steps=11,
    preemptions=3,
    rebuilds=1,
    position_mismatches=1,
    batch_splits=6,
    prompt_tokens=200,
    cached_tokens=150,
    generated_tokens=99,
    dropped_tokens=512,
    drafted_tokens=96,
    accepted_drafts=72,
    finished={"stop": 4, "length": 3, "cancelled": 2},
    uptime_s=12.5,
    last_step_s=0.01,
    step_token_budget=128,
)


class CharTokenizer:
    """A token is a character's code point."""

    vocab_size = SHAPE.n_vocab
    bos_id = None
    eos_ids: frozenset[int] = frozenset()
    add_bos = False
    longest_token = 4
    special_tokens: ClassVar[dict[str, int]] = {}
    infill: Infill | None = None

    def encode(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


@dataclass(slots=True)
class FakeDelta:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class FakeGeneration:
    def __init__(
        self, llm: FakeLLM, prompt_ids: list[int], params: SamplingParams, request_id: str, **options: Any
    ) -> None:
        self.llm = llm
        self.request_id = request_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.options = options
        self.cached_tokens = len(prompt_ids) // 2
        self.computed_tokens = 0
        self.completion_tokens = 0
        self.closed = asyncio.Event()
        self.done = False
        self.error: Exception | None = None
        self.stopped: list[int] = []
        self._on_news: Callable[[], None] | None = None
        self._ready: list[FakeDelta] = []
        self._speaking: asyncio.Task[None] | None = None

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._speaking = asyncio.ensure_future(self._speak(on_news))

    async def _speak(self, on_news: Callable[[], None]) -> None:
        try:
            async for delta in self._deltas():
                self._ready.append(delta)
                on_news()
        except Exception as error:
            self.error = error
        self.done = True
        on_news()

    def drain(self) -> list[FakeDelta]:
        deltas, self._ready = self._ready, []
        return deltas

    async def _deltas(self) -> AsyncIterator[FakeDelta]:
        limit = self.params.max_tokens
        text = self.llm.text[:limit]
        for position, character in enumerate(text):
            if self.llm.failure is not None and position == self.llm.fail_at:
                raise self.llm.failure
            if self.llm.permits is not None:
                if self.llm.permits.locked():
                    self.llm.starved.set()
                await self.llm.permits.acquire()
            for index in range(self.params.n):
                delta = FakeDelta(index, character, [ord(character)], self._logprobs(character))
                if position == len(text) - 1:
                    delta.finish_reason = "length" if len(text) == limit else "stop"
                self.completion_tokens += 1
                yield delta

    def stop(self, index: int) -> None:
        self.stopped.append(index)
        if len(self.stopped) == self.params.n and not self.done:
            self.done = True
            if self._speaking is not None:
                self._speaking.cancel()
            assert self._on_news is not None
            self._on_news()

    async def aclose(self) -> None:
        self.closed.set()
        if self._speaking is not None:
            self._speaking.cancel()

    def _logprobs(self, character: str) -> list[TokenLogprob] | None:
        if self.params.logprobs is None:
            return None
        top = [(ord(character), -0.5), (ord("~"), float("-inf"))]
        return [TokenLogprob(ord(character), -0.5, top[: self.params.logprobs])]


@dataclass
class FakeLLM:
    """Answers every prompt with `text`; one character is one token.

    With `permits`, every token waits for one; `starved` says that there is none left. `failure` is raised before
    token `fail_at`, or by `submit` if that is None.
    """

    config: Config = field(default_factory=Config)
    text: str = "Hello, wörld!"
    permits: asyncio.Semaphore | None = None
    failure: Exception | None = None
    fail_at: int | None = None
    ready: bool = True
    model_name: str = "tiny"
    backend_name: str = "fake"
    max_context: int = 64
    shape: ModelShape = SHAPE
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    started: int = 0
    stopped: int = 0
    template: str = CHATML

    def __post_init__(self) -> None:
        self.tokenizer = CharTokenizer()
        self.observers: list[Any] = []
        self.asked: list[tuple[list[dict[str, Any]], PromptOptions]] = []
        self.compiled: list[Structure] = []
        self.generations: list[FakeGeneration] = []
        self.submitted = asyncio.Event()
        self.starved = asyncio.Event()
        self.state = SNAPSHOT

    async def start(self) -> None:
        self.started += 1
        self.ready = True

    async def shutdown(self, grace_s: float | None = None) -> None:
        self.stopped += 1
        self.ready = False

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        grammar: Any = None,
        shown: Mapping[int, bytes] | None = None,
        **options: Any,
    ) -> FakeGeneration:
        if self.failure is not None and self.fail_at is None:
            raise self.failure
        if not prompt or len(prompt) > self.max_context:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; 1 to {self.max_context} are possible", "prompt"
            )
        assert request_id is not None
        assert request_id not in {generation.request_id for generation in self.generations}
        self.generations.append(FakeGeneration(self, [*prompt], params, request_id, **options))
        self.submitted.set()
        return self.generations[-1]

    async def compile(self, structure: Structure) -> Structure:
        self.compiled.append(structure)
        return structure

    @property
    def dialect(self) -> Dialect:
        template = ChatTemplate(self.template, bos="", eos="")
        return dialect_of(template, self.tokenizer, self.config.chat)  # type: ignore[arg-type]

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        self.asked.append((list(messages), options))
        rendered = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.tokenizer.encode(rendered)

    def prompt_limit(self, params: SamplingParams | None = None) -> TokenLimit:
        return TokenLimit.of_context(self.max_context + 1)

    def answer_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        room = max(self.max_context - prompt_tokens, 0)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def snapshot(self) -> EngineSnapshot:
        return self.state

    def kv(self) -> dict[str, Any]:
        return {"layout": "paged", "free": 60}


def config_with(**server: Any) -> Config:
    return Config.model_validate({"server": server})


def app_for(llm: FakeLLM) -> FastAPI:
    return create_app(llm, llm.config)  # type: ignore[arg-type]


def client_for(llm: FakeLLM) -> httpx.AsyncClient:
    """A client of the app itself, without a network."""
    transport = httpx.ASGITransport(app=app_for(llm), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


class TrackedApp:
    """Knows when no request is being handled any more."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.idle = asyncio.Event()
        self.active = 0
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        self.idle.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    def leftovers(self) -> list[asyncio.Task[Any]]:
        """Tasks of the server package that still live."""
        mine = []
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if code is not None and "/cllm/server/" in code.co_filename:
                mine.append(task)
        return mine


@asynccontextmanager
async def served(llm: FakeLLM) -> AsyncIterator[TrackedApp]:
    """The app behind a real uvicorn on a free port; `url` says where."""
    tracked = TrackedApp(app_for(llm))
    protocol: Any = partial(Connection, Connections(llm.config.server))
    server = _Server(uvicorn.Config(tracked, http=protocol, port=0, log_level="warning", lifespan="off"))
    task = asyncio.ensure_future(server.serve())
    await server.up.wait()
    tracked.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield tracked
    finally:
        server.should_exit = True
        await task
