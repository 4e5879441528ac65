"""Anthropic's API: messages, and how many tokens they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from cllm.server.answers import unless_gone
from cllm.server.anthropic_render import MessageEvents, MessageStream, message_pieces
from cllm.server.anthropic_replies import AnthropicError, MessageReply, TokenCount
from cllm.server.anthropic_schema import CountRequest, MessagesInput, MessagesRequest
from cllm.server.bodies import taken
from cllm.server.chat import ChatCall, NamedTool, ToolChoice, count_chat, open_chat
from cllm.server.openai_replies import error_responses, event_stream
from cllm.server.runs import collect
from cllm.server.sliced import SlicedJson
from cllm.server.state import State

if TYPE_CHECKING:
    from cllm.server.anthropic_schema import ToolChoiceFields

log = logging.getLogger("cllm.server")

_ERRORS = error_responses(AnthropicError, 400, 401, 404, 408, 413, 429, 500, 503)
_STREAM = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",...}}'

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])


@router.post("", response_model=MessageReply, responses={**_ERRORS, **event_stream(_STREAM)})
async def messages(
    body: Annotated[MessagesRequest, Depends(taken(MessagesRequest))], request: Request, state: State
) -> Response:
    """Answer the last message of a conversation, or go on with it if it is the assistant's."""
    chat = await open_chat(state, request, _call_of(body, body.max_tokens), "msg")
    if body.metadata is not None and body.metadata.user_id is not None:
        log.info("%s user=%r", chat.head.id, body.metadata.user_id)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    if body.stream:
        return MessageStream(chat, MessageEvents(chat, body.max_tokens, shows_thinking=shows_thinking))
    runs = await unless_gone(request.receive, collect(chat))
    return SlicedJson(message_pieces(chat, runs, body.max_tokens, shows_thinking=shows_thinking))


@router.post("/count_tokens", responses=_ERRORS)
async def count_tokens(
    body: Annotated[CountRequest, Depends(taken(CountRequest))], request: Request, state: State
) -> TokenCount:
    """How many tokens the prompt of such a conversation has, with system prompt and tools. Nothing is generated."""
    return TokenCount(input_tokens=await count_chat(state, request, _call_of(body, 1)))


def _call_of(body: MessagesInput, max_tokens: int) -> ChatCall:
    conversation, choice = body.conversation, body.tool_choice
    return ChatCall(
        messages=conversation.messages,
        params=body.sampling(max_tokens=max_tokens),
        tools=body.chat_tools,
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        structure=body.structure,
        template_arguments=_template_arguments(body),
        separate_reasoning=True,
        continue_last=conversation.continues,
        model=body.model,
        priority=body.priority,
        timeout=body.timeout,
        marks=conversation.marks,
        cache_control=body.cache_control,
    )


def _choice(choice: ToolChoiceFields | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.name is not None:
        return NamedTool(choice.name)
    return "required" if choice.type == "any" else "none"


def _template_arguments(body: MessagesInput) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        given["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        given["enable_thinking"] = body.thinking.type == "enabled"
    return given
