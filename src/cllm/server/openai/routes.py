"""OpenAI's API: completions, chat completions, models."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from cllm.engine.submission import Submission
from cllm.generation import Completion
from cllm.server.anthropic.replies import AnthropicModel, AnthropicModels
from cllm.server.http.response import DeltaSource, EventStream, SlicedEventStream, SlicedJsonResponse, unless_gone
from cllm.server.inference.chat import ChatInput, open_chat
from cllm.server.inference.limits import check_count, check_logprobs, pins_of
from cllm.server.inference.streams import BATCH, CompletionStream, Head, collect, sent_by
from cllm.server.inference.tokenization import each_prompt
from cllm.server.openai.logprobs import PromptReport, TokenForm
from cllm.server.openai.render import (
    ChatEvents,
    CompletionEvents,
    EventForm,
    chat_pieces,
    completion_pieces,
    usage_of,
)
from cllm.server.openai.replies import ChatReply, CompletionReply, ModelCard, ModelList, ServedCard, ServedList
from cllm.server.openai.schema import ChatRequest, CompletionRequest, OpenAIRequest
from cllm.server.schema.body import JsonBody
from cllm.server.schema.messages import marks_in
from cllm.server.schema.replies import ErrorReply, error_responses, event_stream, groups_of
from cllm.server.schema.structure import compiled
from cllm.server.schema.tools import allowed_of, choice_of
from cllm.server.state import ModelState, ServerState, State, is_operator

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.served import ServedModel

log = logging.getLogger("cllm.server")

DEFAULT_COMPLETION_TOKENS = 16
_LONG_ECHO = 4096
"""Characters of an echoed prompt above which answers are sent one by one."""

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)
_COMPLETION_STREAM = 'data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":" Paris",...}]}'
_CHAT_STREAM = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",...,"choices":[{"index":0,"delta":{...},...}]}'
)

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions", response_model=CompletionReply, responses={**_ERRORS, **event_stream(_COMPLETION_STREAM)})
async def completions(body: JsonBody[CompletionRequest], request: Request, state: State) -> Response:
    """Continue a prompt, or several."""
    model = await state.model(body.model, request, body.timeout)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    # Log probabilities tell which are the best.
    logprobs = 0 if best_of > n and body.logprobs is None else body.logprobs
    echoed = body.logprobs if body.echo else None
    params = _params(body, max_tokens, logprobs, echoed, n=best_of)
    texts = each_prompt(body.prompt)
    check_count(state, len(texts), params.n)
    if body.suffix:
        prompts = await model.encoder.encode_infill(texts, body.suffix, params)
    else:
        prompts = await _prompts(body, model, texts, params)
    asked_by = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_logprobs(model, prompts, params, "best_of" if body.logprobs is None else "logprobs", asked_by)
    form = _token_form(body, model)
    shown: Sequence[str | Sequence[int]] = texts if body.truncation is None else prompts
    echoes = await _echoes(model, shown, n) if body.echo else {}
    head = _head(request, model, "cmpl")
    batch = 1 if max(map(len, echoes.values()), default=0) > _LONG_ECHO else BATCH
    grammar = await compiled(model.llm, params)
    asked = [
        Submission(each, params, pins=pins_of(model, body.cache_control, each), grammar=grammar) for each in prompts
    ]
    _log_user(body, head.id)
    sent = sent_by(request, model, asked, head.id, priority=body.priority, timeout=body.timeout)
    completions = CompletionStream(model.llm, sent, batch, cache_details=bool(body.return_cache_details))
    report = PromptReport(completions, form, n, echoed=echoed, prompt_logprobs=body.prompt_logprobs)
    if body.stream:
        counts = completions if body.continuous_usage else None
        event_form = EventForm(head, form, report, body.include_usage, counts)
        return _stream(body, completions, CompletionEvents(event_form, echoes))
    answers = _whole(len(prompts) * best_of, with_logprobs=logprobs is not None)
    whole = await unless_gone(request.receive, collect(completions, answers))
    if best_of > n:
        whole = keep_best(whole, best_of, n, with_logprobs=body.logprobs is not None)
    return SlicedJsonResponse(completion_pieces(head, whole, usage_of(completions), form, echoes, report))


@router.post("/chat/completions", response_model=ChatReply, responses={**_ERRORS, **event_stream(_CHAT_STREAM)})
async def chat_completions(body: JsonBody[ChatRequest], request: Request, state: State) -> Response:
    """Answer the last message of a conversation."""
    chat = await open_chat(state, request, chat_input_of(body), "chatcmpl-")
    _log_user(body, chat.head.id)
    form, echo = _token_form(body, chat.model), body.echoed
    report = PromptReport(chat, form, body.n or 1, prompt_logprobs=body.prompt_logprobs)
    if body.stream:
        counts = chat if body.continuous_usage else None
        return _stream(body, chat, ChatEvents(EventForm(chat.head, form, report, body.include_usage, counts), echo))
    answers = _whole(body.n or 1, with_logprobs=bool(body.logprobs))
    whole = await unless_gone(request.receive, collect(chat, answers))
    return SlicedJsonResponse(chat_pieces(chat.head, whole, usage_of(chat), form, echo, report))


def _stream(body: OpenAIRequest, source: DeltaSource[Any], events: CompletionEvents | ChatEvents) -> EventStream:
    kind = EventStream if events.report.is_empty else SlicedEventStream
    return kind(source, events, events.progress if body.return_progress else None)


@router.get("/models", responses=error_responses(ErrorReply, 401))
async def models(request: Request, state: State) -> ServedList | ModelList | AnthropicModels:
    """The available models, in Anthropic's format if the header anthropic-version is sent."""
    cards = [card_of(state, served, sees_all=is_operator(request)) for served in state.serves.models]
    if "anthropic-version" in request.headers:
        data = [_anthropic_card(card) for card in cards]
        return AnthropicModels(data=data, first_id=data[0].id, last_id=data[-1].id)
    sharing = state.serves.sharing
    return ModelList(data=cards) if sharing is None else ServedList(data=cards, memory_budget_bytes=sharing.budget)


@router.get("/models/{model_id:path}", responses=error_responses(ErrorReply, 401, 404))
async def model(model_id: str, request: Request, state: State) -> ServedCard | ModelCard | AnthropicModel:
    """One model, by any of its names; in Anthropic's format if the header anthropic-version is sent."""
    card = card_of(state, state.find(model_id), sees_all=is_operator(request))
    return _anthropic_card(card) if "anthropic-version" in request.headers else card


def card_of(state: ServerState, served: ServedModel, *, sees_all: bool) -> ServedCard | ModelCard:
    if state.serves.sharing is not None:
        return served_card(served, state.created, sees_all=sees_all)
    assert served.llm is not None
    return ModelCard(id=served.name, created=state.created, max_model_len=served.llm.text.max_context)


def served_card(served: ServedModel, created: int, *, sees_all: bool) -> ServedCard:
    """`sees_all`: include usage by all keys, and paths and errors of this machine."""
    loaded = served.llm if served.ready else None
    taken = served.account.taken - served.estimate.weights if loaded and served.account is not None else 0
    names = served.names if sees_all else served.entry.aliases
    return ServedCard(
        id=served.name,
        created=created,
        max_model_len=loaded.text.max_context if loaded is not None else served.estimate.context,
        aliases=[name for name in names if name != served.name],
        state=served.state if served.state != "ready" or served.ready else "failed",
        error=served.error if sees_all else None,
        pinned=served.entry.pinned,
        requests=served.users if sees_all else None,
        weights_bytes=served.estimate.weights,
        kv_bytes=taken if sees_all else None,
        kv_bytes_per_token=served.estimate.token_bytes,
        kv_groups=groups_of(served.estimate.groups),
    )


def _anthropic_card(card: ServedCard | ModelCard) -> AnthropicModel:
    return AnthropicModel(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, timezone.utc).isoformat(),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def _params(
    body: OpenAIRequest, max_tokens: int | None, logprobs: int | None, echoed: int | None = None, n: int | None = None
) -> SamplingParams:
    """`echoed`: alternatives for the tokens of an echoed prompt."""
    asked = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return body.sampling(
        max_tokens=max_tokens, n=n or body.n, logprobs=logprobs, prompt_logprobs=max(asked, default=None)
    )


def chat_input_of(body: ChatRequest) -> ChatInput:
    return ChatInput(
        messages=[message.plain() for message in body.messages],
        params=_params(body, body.most_tokens, (body.top_logprobs or 0) if body.logprobs else None),
        tools=allowed_of(body.tools, body.tool_choice),
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_arguments=body.template_arguments,
        separate_reasoning=body.separates_reasoning,
        include_reasoning=body.include_reasoning is not False,
        continue_last=bool(body.continue_final_message),
        truncation=body.truncation,
        asks=body.add_generation_prompt is not False,
        model=body.model,
        priority=body.priority,
        timeout=body.timeout,
        marks=marks_in(body.messages),
        cache_control=body.cache_control,
        cache_details=bool(body.return_cache_details),
    )


def _log_user(body: OpenAIRequest, request_id: str) -> None:
    if body.end_user:
        log.debug("%s user=%r", request_id, body.end_user)


async def _prompts(
    body: CompletionRequest, model: ModelState, texts: list[str | list[int]], params: SamplingParams
) -> list[Sequence[int]]:
    if body.truncation is None:
        return await model.encoder.encode_prompts(texts, params)
    truncation = body.truncation.checked(model.llm, params)
    limit = truncation.reading_limit(model.config)
    return [truncation.cut(ids) for ids in await model.encoder.encode_prompts(texts, params, limit=limit)]


def _token_form(body: OpenAIRequest, model: ModelState) -> TokenForm:
    by_ids, lists_ids = bool(body.return_tokens_as_token_ids), bool(body.return_token_ids)
    return TokenForm(model.llm.text.tokenizer, by_ids=by_ids, lists_ids=lists_ids)


async def _echoes(model: ModelState, texts: Sequence[str | Sequence[int]], n: int) -> dict[int, str]:
    """The prompt in front of each answer, by the answer's index."""
    echoes: dict[int, str] = {}
    for number, text in enumerate(texts):
        shown = text if isinstance(text, str) else await model.encoder.decode(text)
        echoes.update((number * n + index, shown) for index in range(n))
    return echoes


def _head(request: Request, model: ModelState, prefix: str) -> Head:
    return Head(f"{prefix}-{request.state.unique_id}", int(time.time()), model.served_name)


def _whole(count: int, *, with_logprobs: bool) -> list[Completion]:
    return [Completion(logprobs=[] if with_logprobs else None) for _ in range(count)]


def _mean_logprob(answer: Completion) -> float:
    """Minus infinity for an answer without tokens."""
    known = [entry.logprob for entry in answer.logprobs or ()]
    return sum(known) / len(known) if known else -math.inf


def keep_best(whole: Sequence[Completion], generated: int, n: int, *, with_logprobs: bool) -> list[Completion]:
    """The `n` best of each prompt's `generated` answers, best first. Log probabilities are dropped unless requested."""
    kept: list[Completion] = []
    for start in range(0, len(whole), generated):
        kept += sorted(whole[start : start + generated], key=_mean_logprob, reverse=True)[:n]
    if not with_logprobs:
        for answer in kept:
            answer.logprobs = None
    return kept
