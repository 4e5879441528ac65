"""A model without its weights: it turns requests into tokens and tokens into text, wherever the weights are."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cllm.config import Config
from cllm.config.kv import WindowConfig
from cllm.dialect.dialect import Dialect
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.engine.reading import PromptScoring
from cllm.engine.request import Request, Terms, build_request
from cllm.engine.row_sampler import RowSampler
from cllm.engine.submission import Submission
from cllm.errors import ConfigError, InvalidRequestError
from cllm.kv.window import Window
from cllm.loading.embedder import Embedder
from cllm.loading.facts import ModelFacts
from cllm.loading.open_model import OpenedText, TokenizerCache, open_text
from cllm.loading.text_work import TextWork, examine_template
from cllm.models.spec import ModelSpec
from cllm.structured.compiler import Compiler
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat_template import PLAIN, PromptOptions
from cllm.text.token_limit import TokenLimit, validate_ids
from cllm.text.tokenizer import encode_prompt
from cllm.work.pool import Workers


class TextModel:
    def __init__(
        self, config: Config, opened: OpenedText, facts: ModelFacts, cache: TokenizerCache, workers: Workers
    ) -> None:
        """On another thread than the event loop's. Raises `ModelError` or `ConfigError`."""
        n_vocab = facts.spec.n_vocab
        self.config = config
        self.facts = facts
        self.tokenizer = opened.tokenizer
        self.chat_template = opened.chat_template
        self.sampling_defaults = opened.sampling
        """Values of parameters that `SamplingParams.with_model_defaults` leaves open."""
        self.dialect = Dialect(examine_template(opened.chat_template, workers), opened.tokenizer, config.chat)
        self.work = TextWork(
            config, workers, opened.tokenizer, opened.chat_template, self.dialect, opened.model, n_vocab
        )
        self.embedder = Embedder(self.name, facts, opened.tokenizer, opened.text_end, opened.pairs)
        if cache.vocabulary is None or cache.vocabulary.tokenizer is not opened.tokenizer:
            cache.vocabulary = Vocabulary(opened.tokenizer, n_vocab)
        self.compiler = Compiler(cache.vocabulary, config.structured, self.work.try_structure)
        self._window = configured_window(config.kv.window, facts)

    @classmethod
    def load(cls, config: Config, facts: ModelFacts, workers: Workers) -> TextModel:
        """A model that runs elsewhere, and has told its facts. Raises `ModelError` or `ConfigError`."""
        cache = TokenizerCache()
        return cls(config, open_text(config, cache), facts, cache, workers)

    def close(self) -> None:
        """Calling it again does nothing."""
        self.compiler.close()
        self.work.close()

    @property
    def name(self) -> str:
        return self.config.model.alias or self.facts.name

    @property
    def spec(self) -> ModelSpec:
        return self.facts.spec

    @property
    def max_context(self) -> int:
        return self.facts.max_context

    def lower_context(self, tokens: int) -> None:
        """Raises `ConfigError`, and changes nothing, if the configured rolling window needs more."""
        facts = replace(self.facts, max_context=tokens)
        self._window, self.facts = configured_window(self.config.kv.window, facts), facts

    # -- limits ------------------------------------------------------------------------------------------------

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

    def _window_of(self, params: SamplingParams | None) -> Window | None:
        """A request's own rolling window or the configured one, rounded to what the model's memory allows."""
        asked = "configured" if params is None else params.context_window
        if asked is None or (params is not None and params.prompt_logprobs is not None):
            return None  # log probabilities of the prompt need all of it
        return _fit(self.facts, asked.keep, asked.recent) if isinstance(asked, ContextWindow) else self._window

    # -- text to tokens ----------------------------------------------------------------------------------------

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """The prompt for the next message. `limit`: how long it may be, by default what `params` allow."""
        return await self.work.encode_chat(messages, options, limit or self.prompt_limit(params))

    async def encode_beginning(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """What every prompt begins with whose first messages are these."""
        return await self.encode_chat(messages, params, replace(options, asks=False, continues=False))

    def encode(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Sequence[int]:
        """The tokens of a prompt. Raises `InvalidRequestError` if there are too many or none, or an unknown one."""
        limit = self.prompt_limit(params)
        if isinstance(prompt, str):
            limit.check_text(self.tokenizer, prompt, "prompt", special=True)
            prompt = encode_prompt(self.tokenizer, prompt)
        return validate_ids(prompt, limit, self.spec.n_vocab)

    async def compile(self, structure: Structure) -> Grammar:
        """The `grammar` of a `Submission`. Raises `InvalidRequestError` if the structure cannot be compiled."""
        return await self.compiler.compile(structure)

    # -- requests ----------------------------------------------------------------------------------------------

    def request_of(self, submission: Submission, rows: RowSampler | None) -> Request:
        """What an executor works on. `rows`: what samples in this process, if anything does. Raises
        `InvalidRequestError` if the model cannot do what is asked for."""
        params = submission.params.completed(self.sampling_defaults.values)
        reading = self.embedder.pooling() if submission.embeds else self._prompt_scoring(params)
        prompt = self.encode(submission.prompt, params)
        if submission.grammar is None and params.structured is not None:
            raise InvalidRequestError("pass grammar=await compile(params.structured)", params.structured.param)
        return build_request(
            replace(
                submission,
                prompt=prompt,
                params=params,
                request_id=submission.request_id or f"req-{uuid.uuid4().hex}",
            ),
            Terms(
                self.max_context,
                self.spec.n_vocab,
                self.tokenizer.eos_ids,
                self.config.scheduler.request_timeout_s,
                rows,
            ),
            arrival=time.monotonic(),
            window=self._window_of(params),
            reading=reading,
        )

    def _prompt_scoring(self, params: SamplingParams) -> PromptScoring | None:
        """Raises `InvalidRequestError` if the model cannot generate, or not with prompt_logprobs."""
        traits = self.facts.traits
        if traits.no_answers is not None:
            raise InvalidRequestError(traits.no_answers, "model")
        if params.prompt_logprobs is None:
            return None
        if traits.no_reading is not None:
            raise InvalidRequestError(f"prompt_logprobs: {traits.no_reading}", "prompt_logprobs")
        return PromptScoring(params.prompt_logprobs, traits.score_weight)


def configured_window(configured: WindowConfig, facts: ModelFacts) -> Window | None:
    """Raises `ConfigError` if it is not possible."""
    if configured.recent is None:
        return None
    try:
        return _fit(facts, configured.keep, configured.recent)
    except InvalidRequestError as error:
        raise ConfigError(f"kv.window: {error}") from error


def _fit(facts: ModelFacts, keep: int, recent: int) -> Window:
    if facts.traits.no_window is not None:
        raise InvalidRequestError(f"rolling windows are not available: {facts.traits.no_window}", "context_window")
    window = Window.fit(keep, recent, facts.unit_tokens)
    if window.capacity > facts.max_context:
        raise InvalidRequestError(
            f"a window of {keep} kept and {recent} recent tokens needs memory for {window.capacity} "
            f"({window.keep} + {window.recent}, and {window.step} between two drops), but the context is "
            f"{facts.max_context}; lower keep or recent",
            "context_window",
        )
    return window
