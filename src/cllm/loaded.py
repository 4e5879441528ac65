"""What can be known of a model that is loaded."""

from __future__ import annotations

from typing import Any

from cllm.assemble import Parts
from cllm.config import Config
from cllm.dialect.dialect import Dialect
from cllm.embedding import TextReading
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.stats import EngineSnapshot
from cllm.engine.watch import Picture
from cllm.errors import ShuttingDownError
from cllm.kv.window import Window
from cllm.models.shape import ModelShape
from cllm.sampling_defaults import SamplingDefaults
from cllm.text.bounded import TokenLimit
from cllm.text.chat import ChatTemplate
from cllm.text.tokenizer import Tokenizer
from cllm.windows import Windows


class LoadedModel:
    """Whoever loads it fills in the parts. Before that, and after the end, most of it raises `ShuttingDownError`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._parts: Parts | None = None
        self._windows: Windows | None = None
        self._dialect: Dialect | None = None
        self._engine: Engine | None = None

    @property
    def ready(self) -> bool:
        return self._engine is not None and self._engine.accepting

    @property
    def model_name(self) -> str:
        return self.config.model.alias or self._loaded.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._loaded.chat_template

    @property
    def dialect(self) -> Dialect:
        if self._dialect is None:
            raise ShuttingDownError("the model is not loaded")
        return self._dialect

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What holds for parameters that `SamplingParams.with_model_defaults` was not given."""
        return self._loaded.sampling

    @property
    def max_context(self) -> int:
        return self._loaded.max_context

    def prompt_limit(self, params: SamplingParams | None = None) -> TokenLimit:
        """How long prompts of requests with these parameters may be."""
        if self._window_of(params) is not None:
            most = self.config.server.max_encode_tokens
            return TokenLimit(most, f"with a rolling window at most {most} are taken (server.max_encode_tokens)")
        return TokenLimit.of_context(self.max_context, answers=params is None or params.max_tokens != 0)

    def answer_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens that each answer to such a prompt can have."""
        if self._window_of(params) is not None:
            return self.max_context if params.max_tokens is None else params.max_tokens
        room = max(self.max_context - prompt_tokens, 0)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    @property
    def reads(self) -> TextReading:
        """What it makes of texts beside answers."""
        parts = self._loaded
        return TextReading(self.model_name, parts.backend, parts.tokenizer, parts.text_end, parts.pairs)

    @property
    def shape(self) -> ModelShape:
        return self._loaded.backend.shape

    @property
    def backend_name(self) -> str:
        return self._loaded.backend.name

    @property
    def bytes_per_token(self) -> int:
        return self._loaded.bytes_per_token

    def snapshot(self) -> EngineSnapshot:
        return self._running.snapshot

    def kv(self) -> dict[str, Any]:
        """The cache as it is: the numbers of the last step, and who holds what."""
        snapshot = self.snapshot()
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
            "details": self._running.details,
        }

    def watch(self) -> None:
        """From now on, until `unwatch` was called as often, the engine publishes pictures of its inside."""
        self._running.watch.join()
        self._running.wake()

    def unwatch(self) -> None:
        self._running.watch.leave()

    def picture(self) -> Picture | None:
        """The latest one; None where there is none yet. Raises `ShuttingDownError` once the engine has ended."""
        if not self._running.alive:
            raise ShuttingDownError("the engine has ended")
        return self._running.watch.picture

    @property
    def _loaded(self) -> Parts:
        if self._parts is None:
            raise ShuttingDownError("the model is not loaded")
        return self._parts

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise ShuttingDownError("the model is not loaded")
        return self._engine

    def _window_of(self, params: SamplingParams | None) -> Window | None:
        if self._windows is None:
            raise ShuttingDownError("the model is not loaded")
        # What is read off a prompt is read off all of it.
        return None if params is not None and params.prompt_logprobs is not None else self._windows.of(params)
