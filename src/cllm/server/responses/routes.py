"""OpenAI's Responses: answers in items, which later requests can continue."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cllm.errors import InvalidRequestError
from cllm.server.errors import ApiError
from cllm.server.http.response import SlicedJsonResponse, unless_gone
from cllm.server.inference.blocks import ContentBlocks
from cllm.server.inference.chat import ChatInput, open_chat, tokens_of_chat
from cllm.server.inference.streams import collect
from cllm.server.responses.input_items import Page, items_of
from cllm.server.responses.items import ConversationBuilder, with_instructions
from cllm.server.responses.render import ResponseEvents, ResponseForm, ResponseStream
from cllm.server.responses.replies import DeletedReply, InputItemsReply, InputTokensReply, ResponseReply
from cllm.server.responses.schema import AllowedTools, ResponsesRequest, ResponseToolChoice
from cllm.server.responses.store import Stored
from cllm.server.responses.tools import ToolNames
from cllm.server.schema.body import JsonBody
from cllm.server.schema.messages import effort_arguments
from cllm.server.schema.replies import ErrorReply, error_responses, event_stream
from cllm.server.schema.tools import NamedTool, ToolChoice
from cllm.server.schema.validation import shorten
from cllm.server.state import ServerState, State, tenant_of

if TYPE_CHECKING:
    from cllm.engine.tenant import Tenant

log = logging.getLogger("cllm.server")

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)
_STREAM = 'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",...,"delta":" Paris"}'
_STORED_ERRORS = error_responses(ErrorReply, 400, 401, 404)

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])


@router.post("", response_model=ResponseReply, responses={**_ERRORS, **event_stream(_STREAM)})
async def create(body: JsonBody[ResponsesRequest], request: Request, state: State) -> Response:
    """Answer a text or a conversation, which may continue an earlier response."""
    conversation, size = await _read(state, request, body)
    with _as_input():
        chat = await open_chat(state, request, _chat_input(body, conversation), "resp_")
    if body.tool_names.left_out:
        log.info("%s: left out, as this server has none of them: %s", chat.head.id, ", ".join(body.tool_names.left_out))
    if body.end_user:
        log.debug("%s user=%r", chat.head.id, body.end_user)
    saver = None
    if body.store is not False and state.responses.keeps:
        saver = _ResponseSaver(state, tenant_of(request), chat.head.id, conversation, size, body.tool_names)
    form = ResponseForm(chat, body.echo, body.tool_names, stored=saver is not None)

    async def whole(blocks: ContentBlocks) -> Iterator[str]:
        return form.whole(blocks) if saver is None else await saver.save(blocks, form.whole(blocks))

    if body.stream:
        events = ResponseEvents(form)
        return _marked(body, ResponseStream(chat, events, whole, events.progress if body.return_progress else None))
    (blocks,) = await unless_gone(request.receive, collect(chat, [ContentBlocks()]))
    if not blocks.all:
        blocks.begin_empty()
    return _marked(body, SlicedJsonResponse(await whole(blocks)))


def _marked(body: ResponsesRequest, response: Response) -> Response:
    """Say which tools were left out."""
    if left_out := body.tool_names.left_out:
        response.headers["x-tools-left-out"] = ", ".join(dict.fromkeys(left_out))
    return response


@router.post("/input_tokens", responses=_ERRORS)
async def count_input(body: JsonBody[ResponsesRequest], request: Request, state: State) -> InputTokensReply:
    """Count the prompt tokens of a request for a response. Nothing is generated."""
    conversation, _ = await _read(state, request, body)
    with _as_input():
        return InputTokensReply(input_tokens=len(await tokens_of_chat(state, request, _chat_input(body, conversation))))


@router.get("/{response_id}/input_items", response_model=InputItemsReply, responses=_STORED_ERRORS)
async def input_items(response_id: str, request: Request, state: State) -> Response:
    """The items that a stored response answers, those of the responses that it continues included. The newest first,
    unless `order` is `asc`; `limit` and `after` as in OpenAI's API."""
    page = Page.of(request.query_params)
    conversation, _, asked = _stored(state, request, response_id)
    items = await state.bodies.run(len(conversation), lambda: items_of(json.loads(conversation)[:asked], response_id))
    return SlicedJsonResponse(page.pieces(items))


@router.get("/{response_id}", response_model=ResponseReply, responses=_STORED_ERRORS)
async def retrieve(response_id: str, request: Request, state: State) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise ApiError(400, "stream is not supported here: only whole responses are stored.", param="stream")
    return Response(_stored(state, request, response_id).response, media_type="application/json")


@router.delete("/{response_id}", responses=_STORED_ERRORS)
async def delete(response_id: str, request: Request, state: State) -> DeletedReply:
    """Delete a response. Those that continue it stay."""
    if state.responses.remove(tenant_of(request), response_id) is None:
        raise _not_stored(state, response_id)
    return DeletedReply(id=response_id)


@router.post("/{response_id}/cancel", include_in_schema=False)
async def cancel(response_id: str) -> ErrorReply:
    """Not supported: no response runs in the background."""
    raise ApiError(
        400,
        "cancel is not supported: there are no background responses. Close the connection to cancel a response.",
        param="background",
        code="unsupported",
    )


@router.post("/compact", include_in_schema=False)
async def compact() -> ErrorReply:
    """Not supported."""
    raise ApiError(400, "compact is not supported: this server does not shorten conversations.", code="unsupported")


def _stored(state: ServerState, request: Request, response_id: str, param: str | None = None) -> Stored:
    stored = state.responses.get(tenant_of(request), response_id)
    if stored is None:
        raise _not_stored(state, response_id, param)
    return stored


async def _read(state: ServerState, request: Request, body: ResponsesRequest) -> tuple[ConversationBuilder, int]:
    """The conversation, and about its size as JSON."""
    continued = body.previous_response_id
    before = b"[]" if continued is None else _stored(state, request, continued, "previous_response_id").conversation
    size = len(before) + len(await request.body())
    conversation = await state.bodies.run(size, lambda: _conversation(before, body))
    if not with_instructions(body.instructions, conversation.messages):
        raise ApiError(400, "input has no message to answer.", param="input")
    return conversation, size


def _conversation(before: bytes, body: ResponsesRequest) -> ConversationBuilder:
    conversation = ConversationBuilder(json.loads(before))
    conversation.add(body.input)
    return conversation


@contextmanager
def _as_input() -> Iterator[None]:
    """What chats call messages is the input here."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


def _chat_input(body: ResponsesRequest, conversation: ConversationBuilder) -> ChatInput:
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatInput(
        messages=with_instructions(body.instructions, conversation.messages),
        params=body.sampling(max_tokens=body.max_output_tokens, logprobs=body.logprobs),
        tools=body.chat_tools,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structure=body.structure,
        template_arguments=effort_arguments(effort),
        separate_reasoning=True,
        model=body.model,
        priority=body.priority,
        timeout=body.timeout,
        cache_control=body.cache_control,
        cache_details=bool(body.return_cache_details),
    )


def _choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        return NamedTool(body.tool_names.find(choice.name) or choice.name)
    return choice.mode if isinstance(choice, AllowedTools) else choice or "auto"


def _not_stored(state: ServerState, response_id: str, param: str | None = None) -> ApiError:
    settings = state.config.responses
    why = (
        f"responses are kept for {settings.stored_s:g} s after their last use, at most {settings.max_stored} of them, "
        "unless store is false"
        if state.responses.keeps
        else "this server keeps none (responses.max_stored is 0)"
    )
    message = f"Response {shorten(repr(response_id))} not found: {why}. Send the whole conversation as input."
    return ApiError(404, message, param=param, code="response_not_found")


class _ResponseSaver:
    """Stores a response before its last byte is sent, so that a client that has read it can continue it."""

    def __init__(
        self,
        state: ServerState,
        tenant: Tenant,
        response_id: str,
        conversation: ConversationBuilder,
        size: int,
        names: ToolNames,
    ) -> None:
        """`size`: about that of the conversation as JSON."""
        self._state = state
        self._tenant = tenant
        self._id = response_id
        self._conversation = conversation
        self._asked = len(conversation.messages)
        self._size = size
        self._names = names

    async def save(self, blocks: ContentBlocks, response: Iterator[str]) -> Iterator[str]:
        """The same pieces; after the last one the response is stored."""
        conversation = await self._state.bodies.run(self._size, lambda: self._encode(blocks))
        return self._saving(conversation, response)

    def _encode(self, blocks: ContentBlocks) -> bytes:
        self._conversation.add_answer(blocks, self._names)
        return json.dumps(self._conversation.messages, ensure_ascii=False, separators=(",", ":")).encode()

    def _saving(self, conversation: bytes, response: Iterator[str]) -> Iterator[str]:
        pieces = []
        for piece in response:
            pieces.append(piece)
            yield piece
        stored = Stored(conversation, "".join(pieces).encode(), self._asked)
        if not self._state.responses.put(self._tenant, self._id, stored):
            log.info("%s is larger than responses.max_stored_bytes and was not stored", self._id)
