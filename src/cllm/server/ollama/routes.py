"""Ollama's API for chats and completions: `/api/chat`, `/api/generate`, and what its clients request first."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import Scope

from cllm import __version__
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta
from cllm.generation import Completion
from cllm.server.errors import Problem
from cllm.server.http.response import EventStream, TokenCounts, unless_gone
from cllm.server.inference.chat import ChatInput, open_chat
from cllm.server.inference.limits import check_params
from cllm.server.inference.streams import ChatStream, CompletionStream, Head, collect
from cllm.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest, ShowRequest
from cllm.server.schema.body import json_body
from cllm.server.schema.replies import error_responses
from cllm.server.schema.structure import compiled
from cllm.server.state import ModelState, ServerState, State, session_of, tenant_of

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams

router = APIRouter(prefix="/api", tags=["Ollama"])


class OllamaError(BaseModel):
    error: str


_ERRORS = error_responses(OllamaError, 400, 401, 404, 408, 409, 413, 429, 500, 503)
_ANSWER: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    200: {"content": {"application/json": {}, "application/x-ndjson": {"schema": {"type": "string"}}}},
}


class _Lines:
    """An answer as lines of JSON: a delta in each, statistics in the last."""

    def __init__(self, chat: ChatStream, *, as_chat: bool) -> None:
        self._chat = chat
        self._model = chat.head.model
        self._as_chat = as_chat
        self._reason = "stop"

    def event(self, delta: ChatDelta) -> str:
        if isinstance(delta, Delta) and delta.finish_reason is not None:
            self._reason = delta.finish_reason
            return ""
        text = delta.text if isinstance(delta, Delta) else ""
        thinking = delta.text if isinstance(delta, ReasoningDelta) else ""
        return json.dumps({**self._content(text, thinking), "done": False}) + "\n"

    def end(self, counts: TokenCounts) -> str:
        return json.dumps(self.whole("", "")) + "\n"

    def whole(self, text: str, thinking: str) -> dict[str, Any]:
        timings = self._chat.generations[0].timings
        return {
            **self._content(text, thinking),
            "done": True,
            "done_reason": self._reason,
            "total_duration": round(timings.total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._chat.prompt_tokens,
            "prompt_eval_duration": round(timings.ttft_s * 1e9),
            "eval_count": self._chat.completion_tokens,
            "eval_duration": round(timings.decode_s * 1e9),
        }

    def _content(self, text: str, thinking: str) -> dict[str, Any]:
        extra = {"thinking": thinking} if thinking else {}
        answer: dict[str, Any] = {"message": {"role": "assistant", "content": text, **extra}}
        if not self._as_chat:
            answer = {"response": text, **extra}
        return {"model": self._model, "created_at": _now(), **answer}


class LineStream(EventStream):
    media_type = "application/x-ndjson"
    comments = False

    def _failure(self, problem: Problem, scope: Scope) -> str:
        return json.dumps(problem.body(scope["path"])) + "\n"


@router.post("/chat", response_class=Response, responses=_ANSWER)
async def chat(
    body: Annotated[OllamaChatRequest, Depends(json_body(OllamaChatRequest))], request: Request, state: State
) -> Response:
    """Answer the last message of a conversation."""
    messages = [{"role": each.role, "content": each.content} for each in body.messages]
    call = ChatInput(messages, body.sampling(), model=body.name)
    return await _answer(body, request, await open_chat(state, request, call, "ollama"), as_chat=True)


@router.post("/generate", response_class=Response, responses=_ANSWER)
async def generate(
    body: Annotated[OllamaGenerateRequest, Depends(json_body(OllamaGenerateRequest))], request: Request, state: State
) -> Response:
    """Answer a prompt."""
    params = body.sampling()
    if not body.prompt:
        model = await state.model(body.name, request)
        check_params(model, params)
        loaded = {"model": model.served_name, "created_at": _now(), "response": "", "done": True}
        return JSONResponse({**loaded, "done_reason": "load"})
    if body.raw:
        opened = await _open_raw(body.prompt, body.name, params, request, state)
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        call = ChatInput([*messages, {"role": "user", "content": body.prompt}], params, model=body.name)
        opened = await open_chat(state, request, call, "ollama")
    return await _answer(body, request, opened, as_chat=False)


@router.get("/tags", responses=error_responses(OllamaError, 401))
async def tags(state: State) -> dict[str, Any]:
    """The available models."""
    if state.several is not None:
        names = [served.name for served in state.several.models]
    else:
        assert state.one is not None
        names = [state.one.served_name]
    modified = datetime.fromtimestamp(state.created, timezone.utc).isoformat()
    shown = {"modified_at": modified, "size": 0, "digest": "", "details": _details(None)}
    return {"models": [{"name": name, "model": name, **shown} for name in names]}


@router.post("/show", responses=_ERRORS)
async def show(body: Annotated[ShowRequest, Depends(json_body(ShowRequest))], state: State) -> dict[str, Any]:
    """A model's properties."""
    model = state.loaded(body.name)
    shape = model.llm.shape
    info = {
        "general.architecture": shape.architecture,
        f"{shape.architecture}.context_length": model.llm.max_context,
        f"{shape.architecture}.embedding_length": shape.n_embd,
        f"{shape.architecture}.block_count": shape.n_layers,
    }
    return {
        "template": model.llm.chat_template.source,
        "details": _details(model),
        "model_info": info,
        "capabilities": ["completion"],
    }


@router.get("/version", responses=error_responses(OllamaError, 401))
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


async def _answer(body: OllamaRequest, request: Request, opened: ChatStream, *, as_chat: bool) -> Response:
    lines = _Lines(opened, as_chat=as_chat)
    if body.stream is not False:
        return LineStream(opened, lines)
    (whole,) = await unless_gone(request.receive, collect(opened, [Completion()]))
    lines.event(Delta(0, "", finish_reason=whole.finish_reason, stop_reason=whole.stop_reason))
    return JSONResponse(lines.whole(whole.text, whole.reasoning))


async def _open_raw(prompt: str, name: str, params: SamplingParams, request: Request, state: ServerState) -> ChatStream:
    model = await state.model(name, request)
    tokens = await model.encoder.encode_prompt(prompt, params)
    head = Head(f"ollama-{request.state.unique_id}", int(time.time()), model.served_name)
    completions = CompletionStream(
        model.llm,
        [tokens],
        params,
        request_id=head.id,
        session=session_of(request),
        tenant=tenant_of(request),
        grammar=await compiled(model.llm, params),
    )
    return ChatStream(head, model, completions)


def _details(model: ModelState | None) -> dict[str, Any]:
    family = model.llm.shape.architecture if model is not None else ""
    return {"format": "gguf", "family": family, "families": [family] if family else [], "parameter_size": ""}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
