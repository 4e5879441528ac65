"""Ollama's API for answers: `/api/chat` and `/api/generate`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError
from cllm.generation import Completion
from cllm.server.http.response import SlicedJsonResponse, unless_gone
from cllm.server.inference.chat import ChatInput, open_chat
from cllm.server.inference.limits import check_params
from cllm.server.inference.streams import ChatStream, CompletionStream, Head, collect, sent_by
from cllm.server.ollama.render import Lines, LineStream, now
from cllm.server.ollama.replies import OllamaError
from cllm.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from cllm.server.schema.body import OllamaBody
from cllm.server.schema.replies import error_responses
from cllm.server.schema.structure import compiled
from cllm.server.state import ServerState, State

router = APIRouter(prefix="/api", tags=["Ollama"])

_ANSWER: dict[int | str, dict[str, Any]] = {
    **error_responses(OllamaError, 400, 401, 404, 408, 409, 413, 429, 500, 503),
    200: {"content": {"application/json": {}, "application/x-ndjson": {"schema": {"type": "string"}}}},
}


@router.post("/chat", response_class=Response, responses=_ANSWER)
async def chat(body: OllamaBody[OllamaChatRequest], request: Request, state: State) -> Response:
    """Answer the last message of a conversation, or continue it if it is the assistant's."""
    if not body.conversation:
        return await _load(body, request, state, {"message": {"role": "assistant", "content": ""}})
    opened = await _open(body, body.conversation, request, state)
    return await _answer(body, request, opened, as_chat=True)


@router.post("/generate", response_class=Response, responses=_ANSWER)
async def generate(body: OllamaBody[OllamaGenerateRequest], request: Request, state: State) -> Response:
    """Answer a prompt, or continue it."""
    if not body.prompt and not body.suffix:
        return await _load(body, request, state, {"response": ""})
    if body.raw or body.suffix:
        opened = await _open_plain(body, request, state)
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        opened = await _open(body, [*messages, {"role": "user", "content": body.prompt}], request, state)
    return await _answer(body, request, opened, as_chat=False)


async def _load(body: OllamaRequest, request: Request, state: ServerState, empty: dict[str, Any]) -> Response:
    model = await state.model(body.name, request)
    check_params(model, body.sampling())
    loaded = {"model": model.served_name, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    return JSONResponse(loaded)


async def _open(
    body: OllamaRequest, messages: list[dict[str, Any]], request: Request, state: ServerState
) -> ChatStream:
    call = ChatInput(
        messages,
        body.sampling(),
        tools=body.chat_tools if isinstance(body, OllamaChatRequest) else (),
        continue_last=isinstance(body, OllamaChatRequest) and body.continues,
        template_arguments=body.template_arguments,
        separate_reasoning=True if body.think else None,
        model=body.name,
    )
    opened = await open_chat(state, request, call, "ollama-")
    if body.think and opened.model.llm.text.dialect.marks is None:
        raise InvalidRequestError(
            f"{opened.head.model} does not reason; leave think out or send false. If its template does not tell, "
            "chat.reasoning_format does.",
            "think",
        )
    return opened


async def _open_plain(body: OllamaGenerateRequest, request: Request, state: ServerState) -> ChatStream:
    """Without the chat template."""
    params, prompt = body.sampling(), body.prompt or ""
    model = await state.model(body.name, request)
    check_params(model, params)
    if body.suffix:
        (tokens,) = await model.encoder.encode_infill([prompt], body.suffix, params)
    else:
        tokens = await model.encoder.encode_prompt(prompt, params)
    head = Head(f"ollama-{request.state.unique_id}", int(time.time()), model.served_name)
    asked = Submission(tokens, params, grammar=await compiled(model.llm, params))
    return ChatStream(head, model, CompletionStream(model.llm, sent_by(request, model, [asked], head.id)))


async def _answer(body: OllamaRequest, request: Request, opened: ChatStream, *, as_chat: bool) -> Response:
    lines = Lines(opened, as_chat=as_chat)
    if body.stream is not False:
        return LineStream(opened, lines)
    (whole,) = await unless_gone(request.receive, collect(opened, [Completion()]))
    return SlicedJsonResponse(lines.whole(whole))
