"""What can be asked of a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cllm.config import Config
from cllm.dialect.dialect import Dialect
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.stats import EngineSnapshot
from cllm.engine.views import EngineView
from cllm.errors import ShuttingDownError
from cllm.kv.window import Window
from cllm.loading.embedder import Embedder
from cllm.loading.facts import ModelFacts
from cllm.loading.parts import ModelParts
from cllm.loading.sampling_defaults import SamplingDefaults
from cllm.loading.text_parts import TextParts
from cllm.loading.text_work import TextWork
from cllm.models.spec import ModelSpec
from cllm.text.template_source import TemplateSource
from cllm.text.token_limit import TokenLimit
from cllm.text.tokenizer import Tokenizer


class LoadedModel:
    """The read-only half of `AsyncLLM`. Most of it raises `ShuttingDownError` while the model is not loaded."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._text: TextParts | None = None
        self._parts: ModelParts | None = None
        self._engine: Engine | None = None

    @property
    def ready(self) -> bool:
        return self._engine is not None and self._engine.accepting

    @property
    def model_name(self) -> str:
        return self.config.model.alias or self._prepared.facts.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._prepared.tokenizer

    @property
    def chat_template(self) -> TemplateSource:
        return self._prepared.chat_template

    @property
    def dialect(self) -> Dialect:
        return self._prepared.dialect

    @property
    def text_work(self) -> TextWork:
        return self._prepared.work

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Values of parameters that `SamplingParams.with_model_defaults` leaves open."""
        return self._prepared.sampling

    @property
    def max_context(self) -> int:
        return self._prepared.facts.max_context

    def prompt_limit(self, params: SamplingParams | None = None) -> TokenLimit:
        """How long the prompt of a request with these parameters may be."""
        if self._window_of(params) is not None:
            most = self.config.server.max_encode_tokens
            return TokenLimit(most, f"with a rolling window the limit is {most} (server.max_encode_tokens)")
        answers = params is None or params.max_tokens != 0
        return TokenLimit.of_context(self.max_context, answers=answers, advice=self.facts.context_advice)

    def answer_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens each answer to such a prompt can have."""
        if self._window_of(params) is not None:
            return self.max_context if params.max_tokens is None else params.max_tokens
        room = max(self.max_context - prompt_tokens, 0)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    @property
    def embedder(self) -> Embedder:
        return self._prepared.embedder

    @property
    def facts(self) -> ModelFacts:
        return self._prepared.facts

    @property
    def spec(self) -> ModelSpec:
        return self._prepared.facts.spec

    @property
    def backend_name(self) -> str:
        return self._prepared.facts.traits.name

    @property
    def bytes_per_token(self) -> int:
        return self._prepared.facts.bytes_per_token

    async def refresh(self) -> None:
        """Have `snapshot`, `kv` and the metrics say how things are now: they do, where the engine is in this
        process."""

    def snapshot(self) -> EngineSnapshot:
        return self._running.snapshot

    def kv(self) -> dict[str, Any]:
        """The state of the KV cache: numbers as of now, and which sequence holds what."""
        return self._kv_content(self.snapshot(), self._running.details)

    def _kv_content(self, snapshot: EngineSnapshot, details: Mapping[str, Any]) -> dict[str, Any]:
        usage = snapshot.kv
        return {
            **usage.as_dict(),
            "bytes": usage.in_bytes(),
            "bytes_per_token": self.bytes_per_token,
            "hit_rate": usage.hit_tokens / usage.query_tokens if usage.query_tokens else 0.0,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "dropped_tokens": snapshot.dropped_tokens,
            "drafted_tokens": snapshot.drafted_tokens,
            "accepted_drafts": snapshot.accepted_drafts,
            "details": details,
        }

    def replicas(self) -> list[dict[str, Any]] | None:
        """What the page shows of each replica of a cluster; None: the model runs in this process."""
        return None

    def watch(self) -> None:
        """Have the engine publish views of itself until `unwatch` is called as many times."""
        self._running.views.add_watcher()
        self._running.wake()

    def unwatch(self) -> None:
        self._running.views.remove_watcher()

    def view(self) -> EngineView | None:
        """The latest one, if there is one yet. Raises `ShuttingDownError` once the engine has stopped."""
        if not self._running.alive:
            raise ShuttingDownError("the engine has stopped")
        return self._running.views.latest

    @property
    def _prepared(self) -> TextParts:
        if self._text is None:
            raise ShuttingDownError("the model is not loaded")
        return self._text

    @property
    def _loaded(self) -> ModelParts:
        if self._parts is None:
            raise ShuttingDownError("the model is not loaded")
        return self._parts

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise ShuttingDownError("the model is not loaded")
        return self._engine

    def _window_of(self, params: SamplingParams | None) -> Window | None:
        if params is not None and params.prompt_logprobs is not None:
            return None  # they need the whole prompt
        return self._prepared.windows.of(params)
