"""The one path of all chat APIs: a conversation in, pieces of answers out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cllm.dialect.answer import ChatAnswer
from cllm.dialect.grammar import AnswerForm
from cllm.dialect.pieces import ChatEnd, Piece, ReasoningPiece, TextPiece
from cllm.dialect.tools import Tool
from cllm.errors import InvalidRequestError
from cllm.server.answers import Answers, Head
from cllm.server.cache_control import CacheControl, Mark, pins_of_chat
from cllm.server.limits import check_count, check_logprobs, check_params
from cllm.server.sliced import as_json
from cllm.server.state import tenant_of, time_left
from cllm.structured.sources import RULES
from cllm.structured.structure import Structure
from cllm.text.bounded import TokenLimit
from cllm.text.chat import PromptOptions

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.dialect.reader import AnswerReader
    from cllm.dialect.reasoning import Thinking
    from cllm.engine.params import SamplingParams
    from cllm.engine.sampling import TokenLogprob
    from cllm.generation import Delta, Generation
    from cllm.server.state import ModelState, ServerState
    from cllm.structured.matcher import Grammar


_LISTING = re.compile(r" \d+ \| .*$", re.DOTALL)
"""The lines of a grammar at the end of an error, which the client did not write."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(slots=True)
class ChatCall:
    """What every chat API reduces its body to."""

    messages: list[dict[str, Any]]
    """In the form that templates know: system, user, assistant and tool; content as text; tool_calls as
    `{"id", "type", "function": {"name", "arguments": dict}}`; reasoning_content."""
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those of chat_template_kwargs, reasoning_effort and the like."""
    separate_reasoning: bool | None = None
    """Whether reasoning is told apart from the text. None: as chat.reasoning says."""
    include_reasoning: bool = True
    """Whether the client gets the reasoning, where it is told apart."""
    continue_last: bool = False
    """Go on with the last message, which is the assistant's, instead of beginning another."""
    asks: bool = True
    """Whether the prompt ends with what makes the model answer."""
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    marks: Sequence[Mark] = ()
    """Marks of cache_control: the messages up to each."""
    cache_control: CacheControl | None = None
    """The mark on the request itself."""


class Chat:
    """The answers to one conversation: `async with` submits and cleans up, `async for` yields batches of pieces."""

    def __init__(self, head: Head, model: ModelState, answers: Answers, n: int, readers: Sequence[_Reader]) -> None:
        """`readers`: one for each answer, or none where there is nothing to be read but text."""
        self.head = head
        self.model = model
        self._answers = answers
        self._n = n
        self._readers = readers

    async def __aenter__(self) -> Chat:
        await self._answers.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._answers.__aexit__()

    def __aiter__(self) -> Chat:
        return self

    async def __anext__(self) -> list[Piece]:
        pieces: list[Piece] = []
        while not pieces:
            for delta in await self._answers.__anext__():
                if not self._readers:
                    _read_plain(delta, pieces)
                elif self._readers[delta.index].read(delta, pieces):
                    self._answers.stop(delta.index)
        return pieces

    async def collect(self) -> list[ChatAnswer]:
        """Submit, wait for the end of all answers, and clean up."""
        whole = [ChatAnswer() for _ in range(self._n)]
        async with self:
            async for batch in self:
                for piece in batch:
                    whole[piece.index].add(piece)
        return whole

    @property
    def prompt(self) -> Sequence[int]:
        """The conversation as tokens."""
        return self._answers.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        return self._answers.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._answers.cached_tokens

    @property
    def computed_tokens(self) -> int:
        return self._answers.computed_tokens

    @property
    def generations(self) -> Sequence[Generation]:
        return self._answers.generations

    @property
    def completion_tokens(self) -> int:
        return self._answers.completion_tokens

    @property
    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)

    @property
    def marked_tokens(self) -> int:
        return self._answers.marked_tokens


class _Reader:
    """One answer's deltas to pieces, each log probability with the next piece that comes."""

    def __init__(self, reader: AnswerReader, *, include_reasoning: bool) -> None:
        self._reader = reader
        self._include_reasoning = include_reasoning
        self._logprobs: list[TokenLogprob] = []
        self._ended = False
        self.reasoning_tokens = 0
        self._tokens = 0
        """Tokens since the last piece."""

    def read(self, delta: Delta, pieces: list[Piece]) -> bool:
        """True: this answer is to end here, for what the model may still say does not count."""
        if self._ended:
            return False
        self._logprobs += delta.logprobs or ()
        new = self._reader.push(delta.text)
        reason = delta.finish_reason
        self._ended = reason is not None or self._reader.ended
        if self._ended:
            new += self._reader.finish()
            new.append(ChatEnd(delta.index, self._reader.finish_reason(reason or "stop"), delta.stop_reason))
        self._tokens += len(delta.token_ids)
        if new:
            self.reasoning_tokens += self._tokens if isinstance(new[0], ReasoningPiece) else 0
            self._tokens = 0
        if not self._include_reasoning:
            new = [piece for piece in new if not isinstance(piece, ReasoningPiece)]
        if new and self._logprobs:
            new[0].logprobs, self._logprobs = self._logprobs, []
        pieces += new
        return self._ended and reason is None


async def open_chat(state: ServerState, request: Request, call: ChatCall, prefix: str) -> Chat:
    """Everything that can be refused is refused here; nothing runs before the chat is entered. Ids begin with
    `prefix`."""
    model = await state.model(call.model, request, call.timeout)
    check_count(state, 1, call.params.n)
    check_params(model, call.params)
    tools = () if call.tool_choice == "none" else call.tools
    options = _prompt_options(call, tools)
    prompt = await model.texts.encode_chat(call.messages, call.params, options)
    check_logprobs(model, [prompt], call.params, "top_logprobs")
    pins = await pins_of_chat(model, call.marks, call.cache_control, prompt, call.params, options)
    dialect = model.llm.dialect
    thinking = dialect.thinking_after(prompt, call.messages[-1]["content"] if call.continue_last else None)
    structure = await _structure(model, call, tools, thinking)
    separate = dialect.separates if call.separate_reasoning is None else call.separate_reasoning
    reads = bool(tools) or (separate and dialect.marks is not None and thinking != "closed")
    head = Head(f"{prefix}-{request.state.unique_id}", int(time.time()), model.served_name)
    answers = Answers(
        model.llm,
        [prompt],
        call.params if structure is None else replace(call.params, structured=structure),
        request_id=head.id,
        priority=call.priority,
        timeout_s=time_left(request, model, call.timeout),
        tenant=tenant_of(request),
        pins=[pins],
        grammar=None if structure is None else await _compiled(model, structure, call, tools),
        shown=dialect.shown(tools=bool(tools), reasoning=True) if reads else None,
    )
    names = [tool.name for tool in tools]
    readers = [
        dialect.reader(
            index,
            names=names,
            thinking=thinking,
            separate=separate,
            most_calls=None if call.parallel_tool_calls else 1,
            calls_only=call.tool_choice not in ("auto", "none"),
        )
        for index in range(call.params.n if reads else 0)
    ]
    wrapped = [_Reader(reader, include_reasoning=call.include_reasoning) for reader in readers]
    return Chat(head, model, answers, call.params.n, wrapped)


async def count_chat(state: ServerState, request: Request, call: ChatCall) -> int:
    """How many tokens the prompt of a conversation has, whether or not there is room for it in the context."""
    model = await state.model(call.model, request, call.timeout)
    most = max(model.config.server.max_encode_tokens, model.llm.max_context)
    limit = TokenLimit(most, f"at most {most} are counted (server.max_encode_tokens)", "the conversation")
    tools = () if call.tool_choice == "none" else call.tools
    return await model.texts.count_chat(call.messages, _prompt_options(call, tools), limit)


def _prompt_options(call: ChatCall, tools: Sequence[Tool]) -> PromptOptions:
    described = [tool.for_template() for tool in tools]
    return PromptOptions(described, call.template_arguments, call.asks, call.continue_last)


async def _structure(model: ModelState, call: ChatCall, tools: Sequence[Tool], thinking: Thinking) -> Structure | None:
    """What the answers must look like, with the calls that must be certain and the reasoning that may go before."""
    given = call.structure or call.params.structured
    choice = call.tool_choice
    named = choice.name if isinstance(choice, NamedTool) else None
    marks = model.llm.dialect.marks
    masked = bool(tools) and (choice != "auto" or given is not None or any(tool.strict for tool in tools))
    if not masked and (given is None or marks is None or thinking == "closed" or given.kind not in RULES):
        return given
    form = AnswerForm(
        tools=[(tool.name, tool.parameters) for tool in tools if named in (None, tool.name)],
        required=choice not in ("auto", "none"),
        several=call.parallel_tool_calls and named is None,
        structure=given,
        marks=marks,
        thinking=thinking,
    )
    sources = [[tool.parameters for tool in tools], given.source if given is not None else ""]
    grammar = await model.texts.apart(sources, lambda: model.llm.dialect.grammar(form))
    return Structure("lark", grammar, given.param if given is not None and not tools else "tools")


async def _compiled(model: ModelState, structure: Structure, call: ChatCall, tools: Sequence[Tool]) -> Grammar:
    given = call.structure or call.params.structured
    try:
        return await model.llm.compile(structure)
    except InvalidRequestError as error:
        if structure is given:
            raise
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_blame(model, given, tools), model.config.structured.compile_timeout_s)
        raise InvalidRequestError(_LISTING.sub("", str(error)), error.param) from None


async def _blame(model: ModelState, given: Structure | None, tools: Sequence[Tool]) -> None:
    """Refuse the part of a grammar that is wrong by itself, by its name."""
    parts = [] if given is None else [given]
    for number, tool in enumerate(tools):
        if tool.parameters is not None:
            source = await model.texts.apart(tool.parameters, partial(as_json, tool.parameters))
            parts.append(Structure("json_schema", source, f"tools[{number}]"))
    for part in parts:
        await model.llm.compile(part)


def _read_plain(delta: Delta, pieces: list[Piece]) -> None:
    """A delta of an answer that holds nothing but text."""
    if delta.finish_reason is None:
        pieces.append(TextPiece(delta.index, delta.text, delta.logprobs))
        return
    if delta.text or delta.logprobs:
        pieces.append(TextPiece(delta.index, delta.text, delta.logprobs))
    pieces.append(ChatEnd(delta.index, delta.finish_reason, delta.stop_reason))
