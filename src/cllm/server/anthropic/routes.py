"""Anthropic's endpoints: messages, and counting their tokens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from cllm.server.anthropic.render import MessageEvents, MessageStream, message_pieces
from cllm.server.anthropic.replies import AnthropicError, MessageReply, TokenCount
from cllm.server.anthropic.schema import CountRequest, MessagesInput, MessagesRequest
from cllm.server.http.response import SlicedJsonResponse, unless_gone
from cllm.server.inference.blocks import ContentBlocks
from cllm.server.inference.chat import ChatInput, open_chat, tokens_of_chat
from cllm.server.inference.streams import collect
from cllm.server.schema.body import JsonBody
from cllm.server.schema.replies import error_responses, event_stream
from cllm.server.schema.tools import NamedTool, ToolChoice
from cllm.server.state import State

if TYPE_CHECKING:
    from cllm.server.anthropic.schema import ToolChoiceFields

log = logging.getLogger("cllm.server")

_ERRORS = error_responses(AnthropicError, 400, 401, 404, 408, 413, 429, 500, 503)
_STREAM = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",...}}'

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])


@router.post("", response_model=MessageReply, responses={**_ERRORS, **event_stream(_STREAM)})
async def messages(body: JsonBody[MessagesRequest], request: Request, state: State) -> Response:
    """Answer the last message of a conversation, or continue it if it is the assistant's."""
    chat = await open_chat(state, request, _chat_input(body, body.max_tokens), "msg_")
    if body.metadata is not None and body.metadata.user_id is not None:
        log.debug("%s user=%r", chat.head.id, body.metadata.user_id)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    if body.stream:
        return MessageStream(chat, MessageEvents(chat, body.max_tokens, shows_thinking=shows_thinking))
    (blocks,) = await unless_gone(request.receive, collect(chat, [ContentBlocks()]))
    return SlicedJsonResponse(message_pieces(chat, blocks, body.max_tokens, shows_thinking=shows_thinking))


@router.post("/count_tokens", responses=_ERRORS)
async def count_tokens(body: JsonBody[CountRequest], request: Request, state: State) -> TokenCount:
    """Count the prompt tokens of a conversation, with system prompt and tools. Nothing is generated."""
    return TokenCount(input_tokens=len(await tokens_of_chat(state, request, _chat_input(body, 1))))


def _chat_input(body: MessagesInput, max_tokens: int) -> ChatInput:
    conversation, choice = body.conversation, body.tool_choice
    return ChatInput(
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
        cache_details=bool(body.return_cache_details),
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
