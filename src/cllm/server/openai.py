"""OpenAI's API: completions, chat completions, models."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import APIRouter, Depends, Request, Response

from cllm.errors import InvalidRequestError
from cllm.server.answers import BATCH, Answer, Answers, unless_gone
from cllm.server.bodies import taken
from cllm.server.cache_control import pins_of, pins_of_chat
from cllm.server.models import served_card
from cllm.server.openai_render import (
    ChatEvents,
    CompletionEvents,
    Head,
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

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.kv.pins import PinMark

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
    echoed = body.logprobs if body.echo else None
    params = _params(body, max_tokens, body.logprobs, echoed)
    texts = _split(body.prompt)
    _check_count(state, len(texts), params.n)
    prompts = await model.texts.encode_prompts(texts, params)
    _check_logprobs(
        model, prompts, params, "logprobs", "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    )
    tokenizer = model.llm.tokenizer
    echoes = await _echoes(model, texts, params.n) if body.echo else {}
    head = _head(request, model, "cmpl")
    batch = 1 if max(map(len, echoes.values()), default=0) > _LONG_ECHO else BATCH
    pins = [pins_of(model, body, prompt) for prompt in prompts]
    answers = _answers(request, model, body, prompts, params, head.id, pins, batch)
    report = PromptReport(answers, tokenizer, params.n, echoed=echoed, told=body.prompt_logprobs)
    if body.stream and params.prompt_logprobs is not None:
        scored = ScoredCompletionEvents(head, tokenizer, report, include_usage=body.include_usage, echoes=echoes)
        return PiecewiseStream(answers, scored)
    if body.stream:
        events = CompletionEvents(head, tokenizer, include_usage=body.include_usage, echoes=echoes)
        return EventStream(answers, events)
    whole = await unless_gone(request.receive, _collect(answers))
    return SlicedJson(completion_pieces(head, whole, usage_of(answers), tokenizer, echoes, report))


@router.post("/chat/completions", response_model=ChatReply, responses={**_ERRORS, **event_stream(_CHAT_STREAM)})
async def chat_completions(
    body: Annotated[ChatRequest, Depends(taken(ChatRequest))], request: Request, state: State
) -> Response:
    """Answer the last message of a conversation."""
    model = await state.model(body.model, request, body.timeout)
    params = _params(body, body.most_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    _check_count(state, 1, params.n)
    prompt = await model.texts.encode_chat([message.plain() for message in body.messages], params)
    _check_logprobs(model, [prompt], params, "top_logprobs")
    tokenizer = model.llm.tokenizer
    head = _head(request, model, "chatcmpl")
    pins = await pins_of_chat(model, body, prompt, params)
    answers = _answers(request, model, body, [prompt], params, head.id, [pins])
    report = PromptReport(answers, tokenizer, params.n, told=body.prompt_logprobs)
    if body.stream and params.prompt_logprobs is not None:
        return PiecewiseStream(answers, ScoredChatEvents(head, tokenizer, report, include_usage=body.include_usage))
    if body.stream:
        return EventStream(answers, ChatEvents(head, tokenizer, include_usage=body.include_usage))
    whole = await unless_gone(request.receive, _collect(answers))
    return SlicedJson(chat_pieces(head, whole, usage_of(answers), tokenizer, report))


@router.get("/models", responses=error_responses(ErrorReply, 401))
async def models(request: Request, state: State) -> ServedList | ModelList:
    """The models that requests may name."""
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


def _card(state: ServerState) -> ModelCard:
    assert state.one is not None
    return ModelCard(id=state.one.served_name, created=state.created, max_model_len=state.one.llm.max_context)


def _params(
    body: OpenAIRequest, max_tokens: int | None, logprobs: int | None, echoed: int | None = None
) -> SamplingParams:
    """`echoed`: alternatives that go with the tokens of an echoed prompt."""
    asked = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return body.sampling(max_tokens=max_tokens, n=body.n, logprobs=logprobs, prompt_logprobs=max(asked, default=None))


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts in `prompt`: a flat list of token ids is one, a list of strings or lists is several. All items are of
    one kind, so that a look at the first will do: there may be very many."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return [*cast("list[str] | list[list[int]]", prompt)] or [[]]


def _check_count(state: ServerState, prompts: int, n: int) -> None:
    most = state.config.server.max_prompts
    if prompts * n > most:
        raise InvalidRequestError(
            f"{prompts} prompts x n = {n} are {prompts * n} answers; "
            f"at most {most} are allowed in one request (server.max_prompts)",
            "prompt" if prompts > 1 else "n",
        )


def _check_logprobs(
    model: ModelState,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    param: str,
    of_prompts: str = "prompt_logprobs",
) -> None:
    """`param` and `of_prompts`: what asked for those of answers, and of prompts."""
    most = model.config.server.max_logprobs
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(params, sum(map(len, prompts)), most, of_prompts)
    if params.logprobs is None:
        return
    tokens = sum(model.llm.answer_limit(len(prompt), params) for prompt in prompts)
    each = 1 + params.logprobs
    if params.n * tokens * each > most:
        raise InvalidRequestError(
            f"n = {params.n} x {tokens} tokens x {each} log probabilities are {params.n * tokens * each}; "
            f"at most {most} are allowed in one request (server.max_logprobs): ask for fewer answers, tokens or "
            f"alternatives",
            param,
        )


def _check_prompt_logprobs(params: SamplingParams, tokens: int, most: int, param: str) -> None:
    assert params.prompt_logprobs is not None
    each = 1 + params.prompt_logprobs
    if params.n * tokens * each > most:
        raise InvalidRequestError(
            f"n = {params.n} x {tokens} tokens of prompts x {each} log probabilities are {params.n * tokens * each}; "
            f"at most {most} are allowed in one request (server.max_logprobs): ask for fewer answers, prompts or "
            f"alternatives",
            param,
        )


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
    batch: int = BATCH,
) -> Answers:
    if body.asker:
        log.info("%s user=%r", request_id, body.asker)
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
    )


async def _collect(answers: Answers) -> list[Answer]:
    async with answers:
        return await answers.collect()
