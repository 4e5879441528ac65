"""Templates, tokens and grammars of one model, each where its cost allows: at once, in a thread or in a worker.

Chat templates are programs, so they always run in a worker. The rest is done in the server as long as its cost is
bounded; what may take longer goes to workers that have loaded the model's tokenizer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cllm.config import Config, ServerConfig
from cllm.dialect.dialect import Dialect
from cllm.dialect.grammar import AnswerForm
from cllm.errors import InvalidRequestError, ModelError
from cllm.loading.text_tools import Encoding, unpacked
from cllm.loading.torch_model import Model
from cllm.models.gguf import GGUFModel
from cllm.structured.structure import Structure
from cllm.text.chat_template import PromptOptions, encode_composed
from cllm.text.template_facts import TemplateFacts
from cllm.text.template_source import TemplateSource
from cllm.text.token_limit import PIECE, TokenLimit
from cllm.text.tokenizer import Tokenizer
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
