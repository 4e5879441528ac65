"""The one path of all chat APIs: a conversation in, pieces of answers out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cllm.dialect.pieces import CallArguments, CallBegin, ChatEnd, Piece, ReasoningPiece, TextPiece
from cllm.server.answers import Answers, Head
from cllm.server.cache_control import CacheControl, Mark, pins_of_chat
from cllm.server.limits import check_count, check_logprobs
from cllm.server.state import tenant_of, time_left

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.engine.params import SamplingParams
    from cllm.engine.sampling import TokenLogprob
    from cllm.generation import Delta
    from cllm.server.state import ModelState, ServerState
    from cllm.structured.structure import Structure


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None: it takes none."""
    strict: bool = False
    """Whether the arguments are guaranteed to fit the schema."""


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
    continue_last: bool = False
    """Go on with the last message, which is the assistant's, instead of beginning another."""
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    marks: Sequence[Mark] = ()
    """Marks of cache_control: the messages up to each."""
    cache_control: CacheControl | None = None
    """The mark on the request itself."""


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChatAnswer:
    """One whole answer, put together from its pieces."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def add(self, piece: Piece) -> None:
        self.logprobs += piece.logprobs or ()
        if isinstance(piece, TextPiece):
            self.texts.append(piece.text)
        elif isinstance(piece, ReasoningPiece):
            self.thoughts.append(piece.text)
        elif isinstance(piece, CallBegin):
            self.calls.append(ToolCall(piece.id, piece.name, ""))
        elif isinstance(piece, CallArguments):
            self.calls[piece.number].arguments += piece.text
        else:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Chat:
    """The answers to one conversation: `async with` submits and cleans up, `async for` yields batches of pieces."""

    def __init__(self, head: Head, model: ModelState, answers: Answers, n: int) -> None:
        self.head = head
        self.model = model
        self._answers = answers
        self._n = n

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
                _read_plain(delta, pieces)
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
    def completion_tokens(self) -> int:
        return self._answers.completion_tokens


async def open_chat(state: ServerState, request: Request, call: ChatCall, prefix: str) -> Chat:
    """Everything that can be refused is refused here; nothing runs before the chat is entered. Ids begin with
    `prefix`."""
    model = await state.model(call.model, request, call.timeout)
    check_count(state, 1, call.params.n)
    prompt = await model.texts.encode_chat(call.messages, call.params)
    check_logprobs(model, [prompt], call.params, "top_logprobs")
    pins = await pins_of_chat(model, call.marks, call.cache_control, prompt, call.params)
    head = Head(f"{prefix}-{request.state.unique_id}", int(time.time()), model.served_name)
    answers = Answers(
        model.llm,
        [prompt],
        call.params,
        request_id=head.id,
        priority=call.priority,
        timeout_s=time_left(request, model, call.timeout),
        tenant=tenant_of(request),
        pins=[pins],
    )
    return Chat(head, model, answers, call.params.n)


def _read_plain(delta: Delta, pieces: list[Piece]) -> None:
    """A delta of an answer that holds nothing but text."""
    if delta.finish_reason is None:
        pieces.append(TextPiece(delta.index, delta.text, delta.logprobs))
        return
    if delta.text or delta.logprobs:
        pieces.append(TextPiece(delta.index, delta.text, delta.logprobs))
    pieces.append(ChatEnd(delta.index, delta.finish_reason, delta.stop_reason))
