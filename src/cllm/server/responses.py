"""OpenAI's Responses: answers in items, which later requests can go on from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from cllm.errors import InvalidRequestError
from cllm.server.answers import unless_gone
from cllm.server.bodies import taken
from cllm.server.chat import ChatCall, NamedTool, ToolChoice, open_chat
from cllm.server.errors import ApiError
from cllm.server.openai_replies import ErrorReply, error_responses, event_stream
from cllm.server.responses_items import Turns, with_instructions
from cllm.server.responses_render import ResponseEvents, ResponseForm, ResponseStream
from cllm.server.responses_replies import DeletedReply, ResponseReply
from cllm.server.responses_schema import AllowedTools, ResponsesRequest, ResponseToolChoice
from cllm.server.responses_store import Stored
from cllm.server.runs import Runs, collect
from cllm.server.sliced import SlicedJson
from cllm.server.state import ServerState, State, tenant_of
from cllm.server.validation import shorten

if TYPE_CHECKING:
    from cllm.engine.tenant import Tenant

log = logging.getLogger("cllm.server")

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)
_STREAM = 'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",...,"delta":" Paris"}'
_STORED_ERRORS = error_responses(ErrorReply, 400, 401, 404)

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])


@router.post("", response_model=ResponseReply, responses={**_ERRORS, **event_stream(_STREAM)})
async def create(
    body: Annotated[ResponsesRequest, Depends(taken(ResponsesRequest))], request: Request, state: State
) -> Response:
    """Answer a text or a conversation, which may go on from an earlier response."""
    before = await _before(state, request, body)
    size = len(before) + len(await request.body())
    turns = await state.bodies.run(size, lambda: _turns(before, body))
    call = _call_of(body, turns)
    if not call.messages:
        raise ApiError(400, "input holds nothing to answer; give at least one message.", param="input")
    try:
        chat = await open_chat(state, request, call, "resp")
    except InvalidRequestError as error:
        if error.param == "messages":  # as chats call what is the input here
            error.param = "input"
        raise
    if body.asker:
        log.info("%s user=%r", chat.head.id, body.asker)
    keeper = _Keeper(state, tenant_of(request), chat.head.id, turns, size) if _stores(state, body) else None
    form = ResponseForm(chat, body.echo, stored=keeper is not None)

    async def whole(runs: Runs) -> Iterator[str]:
        return form.whole(runs) if keeper is None else await keeper.keep(runs, form.whole(runs))

    if body.stream:
        return ResponseStream(chat, ResponseEvents(form), whole)
    runs = await unless_gone(request.receive, collect(chat))
    if not runs.all:
        runs.begin_empty()
    return SlicedJson(await whole(runs))


@router.post("/input_tokens", include_in_schema=False)
async def count_input() -> ErrorReply:
    """Not supported: POST /tokenize counts the tokens of messages."""
    raise ApiError(
        400, "input_tokens is not supported; POST /tokenize counts the tokens of messages.", code="unsupported"
    )


@router.get("/{response_id}/input_items", include_in_schema=False)
async def input_items(response_id: str) -> ErrorReply:
    """Not supported: a response is kept with its conversation, not with the items of its input."""
    raise ApiError(
        400, "input_items is not supported: the items of a response's input are not kept as such.", code="unsupported"
    )


@router.get("/{response_id}", response_model=ResponseReply, responses=_STORED_ERRORS)
async def retrieve(response_id: str, request: Request, state: State) -> Response:
    """A response that is still stored."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise ApiError(400, "stream is not supported here: only whole responses are stored.", param="stream")
    stored = state.responses.get(tenant_of(request), response_id)
    if stored is None:
        raise _not_stored(state, response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/{response_id}", responses=_STORED_ERRORS)
async def delete(response_id: str, request: Request, state: State) -> DeletedReply:
    """Forget a response. Those that went on from it stay."""
    if state.responses.remove(tenant_of(request), response_id) is None:
        raise _not_stored(state, response_id)
    return DeletedReply(id=response_id)


@router.post("/{response_id}/cancel", include_in_schema=False)
async def cancel(response_id: str) -> ErrorReply:
    """Not supported: no response runs in the background."""
    raise ApiError(
        400,
        "cancel is not supported: this server has no background responses. Close the connection to end one that runs.",
        param="background",
        code="unsupported",
    )


async def _before(state: ServerState, request: Request, body: ResponsesRequest) -> bytes:
    """The conversation that the request goes on from, as it is stored."""
    if body.previous_response_id is None:
        return b"[]"
    stored = state.responses.get(tenant_of(request), body.previous_response_id)
    if stored is None:
        raise _not_stored(state, body.previous_response_id, "previous_response_id")
    return stored.conversation


def _turns(before: bytes, body: ResponsesRequest) -> Turns:
    turns = Turns(json.loads(before))
    turns.add(body.input)
    return turns


def _call_of(body: ResponsesRequest, turns: Turns) -> ChatCall:
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatCall(
        messages=with_instructions(body.instructions, turns.messages),
        params=body.sampling(max_tokens=body.max_output_tokens, logprobs=body.logprobs),
        tools=body.chat_tools,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structure=body.structure,
        template_arguments=_template_arguments(effort),
        separate_reasoning=True,
        model=body.model,
        priority=body.priority,
        timeout=body.timeout,
        cache_control=body.cache_control,
    )


def _template_arguments(effort: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return {**given, "enable_thinking": False} if effort == "none" else given


def _choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        return NamedTool(choice.name)
    return choice.mode if isinstance(choice, AllowedTools) else choice or "auto"


def _stores(state: ServerState, body: ResponsesRequest) -> bool:
    return body.store is not False and state.responses.keeps


def _not_stored(state: ServerState, response_id: str, param: str | None = None) -> ApiError:
    settings = state.config.responses
    why = (
        f"responses are kept for {settings.stored_s:g} s after their last use, at most {settings.max_stored} of them "
        "and those with store = false not at all"
        if state.responses.keeps
        else "this server keeps none (responses.max_stored is 0)"
    )
    message = f"There is no response {shorten(repr(response_id))}: {why}. Send the whole conversation as input."
    return ApiError(404, message, param=param, code="response_not_found")


class _Keeper:
    """Stores a response before its last byte is sent: whoever has read it can go on from it."""

    def __init__(self, state: ServerState, tenant: Tenant, response_id: str, turns: Turns, size: int) -> None:
        """`size` is about that of the turns as JSON."""
        self._state = state
        self._tenant = tenant
        self._id = response_id
        self._turns = turns
        self._size = size

    async def keep(self, runs: Runs, response: Iterator[str]) -> Iterator[str]:
        """The same pieces; with the last one the response is stored."""
        conversation = await self._state.bodies.run(self._size, lambda: self._conversation(runs))
        return self._kept(conversation, response)

    def _conversation(self, runs: Runs) -> bytes:
        self._turns.add_answer(runs)
        return json.dumps(self._turns.messages, ensure_ascii=False, separators=(",", ":")).encode()

    def _kept(self, conversation: bytes, response: Iterator[str]) -> Iterator[str]:
        pieces = []
        for piece in response:
            pieces.append(piece)
            yield piece
        if not self._state.responses.put(self._tenant, self._id, Stored(conversation, "".join(pieces).encode())):
            log.info("%s is larger than responses.max_stored_bytes and not stored", self._id)
