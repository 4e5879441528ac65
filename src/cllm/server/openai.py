"""OpenAI's API: completions, chat completions, models."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from cllm.errors import InvalidRequestError
from cllm.server.answers import Answer, Answers, unless_gone
from cllm.server.openai_render import (
    ChatEvents,
    CompletionEvents,
    Head,
    chat_choice,
    completion_choice,
    usage_of,
)
from cllm.server.openai_replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    ModelCard,
    ModelList,
    error_responses,
    event_stream,
)
from cllm.server.openai_schema import ChatRequest, CompletionRequest, OpenAIRequest
from cllm.server.sse import EventStream
from cllm.server.state import ServerState, State

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams

log = logging.getLogger("cllm.server")

DEFAULT_COMPLETION_TOKENS = 16

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)
_COMPLETION_STREAM = 'data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":" Paris",...}]}'
_CHAT_STREAM = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",...,"choices":[{"index":0,"delta":{...},...}]}'
)

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions", response_model=CompletionReply, responses={**_ERRORS, **event_stream(_COMPLETION_STREAM)})
async def completions(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continue a prompt, or several."""
    state.check_model(body.model)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(state, body, max_tokens, body.logprobs)
    texts = _split(body.prompt)
    _check_count(state, len(texts), params.n)
    prompts = await state.encode_all(texts)
    tokenizer = state.llm.tokenizer
    echoes: dict[int, str] = {}
    if body.echo:
        for number, text in enumerate(texts):
            shown = text if isinstance(text, str) else tokenizer.decode(text, skip_special=False)
            echoes.update((number * params.n + index, shown) for index in range(params.n))
    head = _head(request, state, "cmpl")
    answers = _answers(state, body, prompts, params, head.id)
    if body.stream:
        events = CompletionEvents(head, tokenizer, include_usage=body.include_usage, echoes=echoes)
        return EventStream(answers, events)
    whole = await unless_gone(request.receive, _collect(answers))
    choices = [
        completion_choice(index, answer, tokenizer, echo=echoes.get(index, "")) for index, answer in enumerate(whole)
    ]
    return _reply(CompletionReply(**head._asdict(), choices=choices, usage=usage_of(answers)))


@router.post("/chat/completions", response_model=ChatReply, responses={**_ERRORS, **event_stream(_CHAT_STREAM)})
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer the last message of a conversation."""
    state.check_model(body.model)
    params = _params(state, body, body.most_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    _check_count(state, 1, params.n)
    prompt = await state.encode_chat([message.plain() for message in body.messages])
    tokenizer = state.llm.tokenizer
    head = _head(request, state, "chatcmpl")
    answers = _answers(state, body, [prompt], params, head.id)
    if body.stream:
        return EventStream(answers, ChatEvents(head, tokenizer, include_usage=body.include_usage))
    whole = await unless_gone(request.receive, _collect(answers))
    choices = [chat_choice(index, answer, tokenizer) for index, answer in enumerate(whole)]
    return _reply(ChatReply(**head._asdict(), choices=choices, usage=usage_of(answers)))


@router.get("/models", responses=error_responses(ErrorReply, 401))
async def models(state: State) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[_card(state)])


@router.get("/models/{model_id:path}", responses=error_responses(ErrorReply, 401, 404))
async def model(model_id: str, state: State) -> ModelCard:
    """One model, by any name it is served under."""
    state.check_model(model_id)
    return _card(state)


def _card(state: ServerState) -> ModelCard:
    return ModelCard(id=state.served_name, created=state.created, max_model_len=state.llm.max_context)


def _params(state: ServerState, body: OpenAIRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return body.sampling(
        max_stops=state.config.server.max_stop_strings,
        max_tokens=max_tokens,
        n=body.n,
        logprobs=logprobs,
    )


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts in `prompt`: a flat list of token ids is one, a list of strings or lists is several."""
    if isinstance(prompt, str):
        return [prompt]
    strings_or_lists = [item for item in prompt if not isinstance(item, int)]
    if strings_or_lists:
        return [*strings_or_lists]
    token_ids = [item for item in prompt if isinstance(item, int)]
    return [token_ids]


def _check_count(state: ServerState, prompts: int, n: int) -> None:
    most = state.config.server.max_prompts
    if prompts * n > most:
        raise InvalidRequestError(
            f"{prompts} prompts x n = {n} are {prompts * n} answers; "
            f"at most {most} are allowed in one request (server.max_prompts)",
            "prompt" if prompts > 1 else "n",
        )


def _head(request: Request, state: ServerState, prefix: str) -> Head:
    return Head(f"{prefix}-{request.state.unique_id}", int(time.time()), state.served_name)


def _answers(
    state: ServerState,
    body: OpenAIRequest,
    prompts: list[list[int]],
    params: SamplingParams,
    request_id: str,
) -> Answers:
    if body.asker:
        log.info("%s user=%r", request_id, body.asker)
    return Answers(state.llm, prompts, params, request_id=request_id, priority=body.priority, timeout_s=body.timeout)


async def _collect(answers: Answers) -> list[Answer]:
    async with answers:
        return await answers.collect()


def _reply(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")
