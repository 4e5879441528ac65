"""OpenAI's API: completions, chat completions, models."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import APIRouter, Depends, Request, Response

from cllm.server.answers import BATCH, Answer, Answers, Head, unless_gone
from cllm.server.anthropic_replies import AnthropicModel, AnthropicModels
from cllm.server.best_of import keep_best
from cllm.server.bodies import taken
from cllm.server.cache_control import marks_in, pins_of
from cllm.server.chat import ChatCall, open_chat
from cllm.server.limits import check_count, check_logprobs
from cllm.server.models import served_card
from cllm.server.openai_render import (
    ChatEvents,
    CompletionEvents,
    ScoredChatEvents,
    ScoredCompletionEvents,
    chat_pieces,
    completion_pieces,
    usage_of,
)
from cllm.server.openai_replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    ModelCard,
    ModelList,
    ServedCard,
    ServedList,
    error_responses,
    event_stream,
)
from cllm.server.openai_schema import ChatRequest, CompletionRequest, OpenAIRequest
from cllm.server.prompt_logprobs import PiecewiseStream, PromptReport
from cllm.server.sliced import SlicedJson
from cllm.server.sse import EventStream
from cllm.server.state import ModelState, ServerState, State, is_operators, tenant_of, time_left
from cllm.server.structure_fields import compiled
from cllm.server.tools_schema import allowed_of, choice_of

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.kv.pins import PinMark
    from cllm.structured.matcher import Grammar

log = logging.getLogger("cllm.server")

DEFAULT_COMPLETION_TOKENS = 16
_LONG_ECHO = 4096
"""Characters of prompts to echo from which on the answers' beginnings are sent one by one."""

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)
_COMPLETION_STREAM = 'data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":" Paris",...}]}'
_CHAT_STREAM = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",...,"choices":[{"index":0,"delta":{...},...}]}'
)

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions", response_model=CompletionReply, responses={**_ERRORS, **event_stream(_COMPLETION_STREAM)})
async def completions(
    body: Annotated[CompletionRequest, Depends(taken(CompletionRequest))], request: Request, state: State
) -> Response:
    """Continue a prompt, or several."""
    model = await state.model(body.model, request, body.timeout)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    # Which are the best, their log probabilities say.
    logprobs = 0 if best_of > n and body.logprobs is None else body.logprobs
    echoed = body.logprobs if body.echo else None
    params = _params(body, max_tokens, logprobs, echoed, n=best_of)
    texts = _split(body.prompt)
    check_count(state, len(texts), params.n)
    if body.suffix:
        prompts = await model.texts.encode_infill(texts, body.suffix, params)
    else:
        prompts = await model.texts.encode_prompts(texts, params)
    asked_by = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_logprobs(model, prompts, params, "best_of" if body.logprobs is None else "logprobs", asked_by)
    tokenizer = model.llm.tokenizer
    echoes = await _echoes(model, texts, n) if body.echo else {}
    head = _head(request, model, "cmpl")
    batch = 1 if max(map(len, echoes.values()), default=0) > _LONG_ECHO else BATCH
    pins = [pins_of(model, body.cache_control, prompt) for prompt in prompts]
    grammar = await compiled(model.llm, params)
    answers = _answers(request, model, body, prompts, params, head.id, pins, grammar, batch)
    report = PromptReport(answers, tokenizer, n, echoed=echoed, told=body.prompt_logprobs)
    if body.stream:
        usage, counts = body.include_usage, answers if body.continuous_usage else None
        if params.prompt_logprobs is not None:
            scored = ScoredCompletionEvents(head, tokenizer, report, include_usage=usage, echoes=echoes, counts=counts)
            return PiecewiseStream(answers, scored, scored.progress if body.return_progress else None)
        events = CompletionEvents(head, tokenizer, include_usage=usage, echoes=echoes, counts=counts)
        return EventStream(answers, events, events.progress if body.return_progress else None)
    whole = await unless_gone(request.receive, _collect(answers))
    if best_of > n:
        whole = keep_best(whole, best_of, n, with_logprobs=body.logprobs is not None)
    return SlicedJson(completion_pieces(head, whole, usage_of(answers), tokenizer, echoes, report))


@router.post("/chat/completions", response_model=ChatReply, responses={**_ERRORS, **event_stream(_CHAT_STREAM)})
async def chat_completions(
    body: Annotated[ChatRequest, Depends(taken(ChatRequest))], request: Request, state: State
) -> Response:
    """Answer the last message of a conversation."""
    chat = await open_chat(state, request, call_of(body), "chatcmpl")
    _log_asker(body, chat.head.id)
    tokenizer = chat.model.llm.tokenizer
    report = PromptReport(chat, tokenizer, body.n or 1, told=body.prompt_logprobs)
    if body.stream:
        usage, counts = body.include_usage, chat if body.continuous_usage else None
        if body.prompt_logprobs is not None:
            scored = ScoredChatEvents(chat.head, tokenizer, report, include_usage=usage, counts=counts)
            return PiecewiseStream(chat, scored, scored.progress if body.return_progress else None)
        events = ChatEvents(chat.head, tokenizer, include_usage=usage, counts=counts)
        return EventStream(chat, events, events.progress if body.return_progress else None)
    whole = await unless_gone(request.receive, chat.collect())
    return SlicedJson(chat_pieces(chat.head, whole, usage_of(chat), tokenizer, report))


@router.get("/models", responses=error_responses(ErrorReply, 401))
async def models(request: Request, state: State) -> ServedList | ModelList | AnthropicModels:
    """The models that requests may name, in Anthropic's form for who sends the header anthropic-version."""
    if "anthropic-version" in request.headers:
        return _for_anthropic(state)
    if state.several is not None:
        sees_all = is_operators(request)
        cards = [served_card(served, state.created, sees_all=sees_all) for served in state.several.models]
        return ServedList(data=list(cards), memory_budget_bytes=state.several.budget)
    return ModelList(data=[_card(state)])


@router.get("/models/{model_id:path}", responses=error_responses(ErrorReply, 401, 404))
async def model(model_id: str, request: Request, state: State) -> ServedCard | ModelCard:
    """One model, by any name it is served under."""
    if state.several is not None:
        return served_card(state.find(model_id), state.created, sees_all=is_operators(request))
    assert state.one is not None
    state.one.check_name(model_id)
    return _card(state)


def _for_anthropic(state: ServerState) -> AnthropicModels:
    created_at = datetime.fromtimestamp(state.created, timezone.utc).isoformat()
    if state.several is None:
        assert state.one is not None
        sizes = {state.one.served_name: state.one.llm.max_context}
    else:
        sizes = {
            served.name: served_card(served, state.created, sees_all=False).max_model_len
            for served in state.several.models
        }
    cards = [
        AnthropicModel(id=name, display_name=name, created_at=created_at, max_input_tokens=size, max_tokens=size)
        for name, size in sizes.items()
    ]
    return AnthropicModels(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


def _card(state: ServerState) -> ModelCard:
    assert state.one is not None
    return ModelCard(id=state.one.served_name, created=state.created, max_model_len=state.one.llm.max_context)


def _params(
    body: OpenAIRequest,
    max_tokens: int | None,
    logprobs: int | None,
    echoed: int | None = None,
    n: int | None = None,
) -> SamplingParams:
    """`echoed`: alternatives that go with the tokens of an echoed prompt."""
    asked = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return body.sampling(
        max_tokens=max_tokens, n=n or body.n, logprobs=logprobs, prompt_logprobs=max(asked, default=None)
    )


def call_of(body: ChatRequest) -> ChatCall:
    return ChatCall(
        messages=[message.plain() for message in body.messages],
        params=_params(body, body.most_tokens, (body.top_logprobs or 0) if body.logprobs else None),
        tools=allowed_of(body.tools, body.tool_choice),
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_arguments=body.template_arguments,
        separate_reasoning=body.tells_reasoning_apart,
        include_reasoning=body.include_reasoning is not False,
        continue_last=bool(body.continue_final_message),
        asks=body.add_generation_prompt is not False,
        model=body.model,
        priority=body.priority,
        timeout=body.timeout,
        marks=marks_in(body),
        cache_control=body.cache_control,
    )


def _log_asker(body: OpenAIRequest, request_id: str) -> None:
    if body.asker:
        log.info("%s user=%r", request_id, body.asker)


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts in `prompt`: a flat list of token ids is one, a list of strings or lists is several. All items are of
    one kind, so that a look at the first will do: there may be very many."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return [*cast("list[str] | list[list[int]]", prompt)] or [[]]


async def _echoes(model: ModelState, texts: list[str | list[int]], n: int) -> dict[int, str]:
    """What goes in front of each answer: its prompt."""
    echoes: dict[int, str] = {}
    for number, text in enumerate(texts):
        shown = text if isinstance(text, str) else await model.texts.decode(text)
        echoes.update((number * n + index, shown) for index in range(n))
    return echoes


def _head(request: Request, model: ModelState, prefix: str) -> Head:
    return Head(f"{prefix}-{request.state.unique_id}", int(time.time()), model.served_name)


def _answers(
    request: Request,
    model: ModelState,
    body: OpenAIRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    request_id: str,
    pins: Sequence[Sequence[PinMark]],
    grammar: Grammar | None,
    batch: int = BATCH,
) -> Answers:
    _log_asker(body, request_id)
    return Answers(
        model.llm,
        prompts,
        params,
        request_id=request_id,
        priority=body.priority,
        timeout_s=time_left(request, model, body.timeout),
        batch=batch,
        tenant=tenant_of(request),
        pins=pins,
        grammar=grammar,
    )


async def _collect(answers: Answers) -> list[Answer]:
    async with answers:
        return await answers.collect()
