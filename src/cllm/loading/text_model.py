"""A model without its weights: it turns requests into tokens and tokens into text, wherever the weights are."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cllm.config import Config, ServerConfig
from cllm.config.kv import WindowConfig
from cllm.dialect.dialect import Dialect
from cllm.dialect.grammar import AnswerForm
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.engine.reading import PromptScoring
from cllm.engine.request import Request, Terms, build_request
from cllm.engine.row_sampler import RowSampler
from cllm.engine.submission import Submission
from cllm.errors import ConfigError, InvalidRequestError, ModelError
from cllm.kv.window import Window
from cllm.loading.embedder import Embedder
from cllm.loading.facts import ModelFacts
from cllm.loading.open_model import OpenedText, TokenizerCache, open_text
from cllm.loading.text_tools import Encoding, unpacked
from cllm.loading.torch_model import Model
from cllm.models.gguf import GGUFModel
from cllm.models.spec import ModelSpec
from cllm.structured.compiler import Compiler
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat_template import PLAIN, PromptOptions, encode_composed
from cllm.text.template_facts import TemplateFacts
from cllm.text.template_source import TemplateSource
from cllm.text.tokenizer import PIECE, Tokenizer, TokenLimit, encode_prompt, validate_ids
from cllm.text.volatile import VolatilePatterns
from cllm.work.executor import SizedExecutor
from cllm.work.pool import Job, Workers
from cllm.work.worker import ExceededError, Limits, RefusedError

T = TypeVar("T")

INLINE = 2_000
"""Characters that are tokenised on the event loop, in about 3 ms at most (digits are the slowest: each is a word)."""
IN_THREAD = 131_072
"""Characters that are tokenised in a thread, in about a tenth of a second."""
_EACH = 16
"""What a value costs by itself, in characters."""
_TOOLS = "cllm.loading.text_tools"
_TEMPLATES = "cllm.text.template_jobs"
PRELOADED = (_TEMPLATES,)
"""What nearly every worker needs."""

_WORDS = {
    "render": "rendering the model's chat template",
    "tokenize": "tokenizing {param}",
    "compile": "reading the schemas in {param}",
}
_known_facts: dict[TemplateSource, TemplateFacts] = {}
_MOST_KNOWN = 16


class TextWork:
    """Templates, tokens and grammars of one model, each where its cost allows: at once, in a thread or in a worker.

    Chat templates are programs, so they always run in a worker. The rest is done in the server as long as its cost is
    bounded; what may take longer goes to workers that have loaded the model's tokenizer.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        tokenizer: Tokenizer,
        template: TemplateSource,
        dialect: Dialect,
        model: Model | None,
        n_vocab: int,
    ) -> None:
        self.template = template
        self._workers = workers
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._special = frozenset(tokenizer.special_tokens)
        self._volatile = VolatilePatterns(config.prompt.volatile_patterns)
        name = config.model.name if model is None else str(model.path)
        own = config.model_copy(
            update={
                "model": config.model.model_copy(update={"name": name, "chat_template": None}),
                "server": ServerConfig(),  # without keys: a template may find a way out of its sandbox
            }
        )
        stamp = model.stamp if isinstance(model, GGUFModel) else None
        self._recipe = (f"{_TOOLS}:load", (pickle.dumps(own), stamp, template, n_vocab))
        self._executor = SizedExecutor("text", inline=INLINE, short=PIECE)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: PromptOptions, limit: TokenLimit
    ) -> list[int]:
        """The prompt of a conversation; one that is longer than the limit is refused."""
        cost = estimated_cost((messages, options.tools, options.arguments), IN_THREAD + 1)
        if cost > IN_THREAD:
            return await self._encode_large(messages, options, limit)
        prepared, prepared_options = await self.run(
            cost, lambda: self._dialect.prepare(self._volatile.strip(messages), options)
        )
        arguments = (tuple(self.template), self._special, prepared, prepared_options, IN_THREAD)
        composed = await self._limited(Job("render", f"{_TEMPLATES}:compose", arguments), "messages")
        if composed is None:  # the template says more than the messages do
            return await self._encode_large(messages, options, limit)
        text, literal = composed
        return await self.run(
            len(text), lambda: encode_composed(self._tokenizer, self.template.bos, text, literal, limit)
        )

    async def _encode_large(
        self, messages: Sequence[Mapping[str, Any]], options: PromptOptions, limit: TokenLimit
    ) -> list[int]:
        return unpacked(await self._limited(self._job("render", "encode_chat", (messages, options, limit)), "messages"))

    async def encode(self, text: str, how: Encoding, limit: TokenLimit, param: str) -> list[int]:
        """The tokens of a text; one with more than the limit is refused."""
        if len(text) > IN_THREAD:
            return unpacked(await self._limited(self._job("tokenize", "encode_text", (text, how, limit, param)), param))
        return await self.run(len(text), lambda: how.checked(self._tokenizer, text, limit, param))

    async def write_grammar(self, form: AnswerForm, data: Any) -> str:
        """The grammar of answers of this form. `data` is what it is made of. Raises `ValueError` if there is none."""
        cost = estimated_cost(data, IN_THREAD + 1)
        if cost <= IN_THREAD:
            return await self.run(cost, lambda: self._dialect.grammar(form))
        written: str = await self._limited(self._job("compile", "write_grammar", (form,)), "tools")
        return written

    async def try_structure(self, structure: Structure, limits: Limits) -> Mapping[str, Any]:
        job = self._job("compile", "try_structure", (structure,), limits)
        tried: Mapping[str, Any] = await self._workers.run(job)
        return tried

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """Work that takes no longer than tokenising so many characters: at once, or in a thread."""
        return await self._executor.run(cost, work)

    def close(self) -> None:
        self._executor.close()
        self._workers.forget(self._recipe)

    async def _limited(self, job: Job, param: str) -> Any:
        try:
            return await self._workers.run(job)
        except ExceededError as error:
            work = _WORDS[job.kind].format(param=param)
            raise InvalidRequestError(f"{work} {error} (work.max_cpu_s, work.max_memory_mb)", param) from None

    def _job(self, kind: str, function: str, arguments: tuple[Any, ...], limits: Limits | None = None) -> Job:
        return Job(kind, f"{_TOOLS}:{function}", arguments, self._recipe, limits)


def examine_template(template: TemplateSource, workers: Workers) -> TemplateFacts:
    """Called while a model is loaded, on a thread of its own. Raises `ModelError` if the template is no program that
    works."""
    facts = _known_facts.get(template)
    if facts is None:
        try:
            content = workers.run_blocking(Job("render", f"{_TEMPLATES}:examine", (tuple(template),)))
        except RefusedError as error:
            raise ModelError(str(error)) from None
        except ExceededError as error:
            raise ModelError(f"the chat template {error}; set another one with model.chat_template") from None
        facts = TemplateFacts.from_json(content)
        if len(_known_facts) >= _MOST_KNOWN:
            _known_facts.clear()
        _known_facts[template] = facts
    return facts


def estimated_cost(value: Any, most: int = PIECE + 1) -> int:
    """About what nested data costs, in characters; counting stops at `most`."""
    total, waiting = 0, [value]
    while waiting and total < most:
        each = waiting.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        total += _EACH
    return total


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
