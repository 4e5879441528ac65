"""Renders answers for Anthropic's API: whole ones in pieces, and events from strings built once per block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from cllm.dialect.deltas import ChatDelta, Delta
from cllm.server.errors import Problem
from cllm.server.http.response import EventStream, as_json, text_pieces
from cllm.server.inference.blocks import ContentBlock, ContentBlocks

if TYPE_CHECKING:
    from cllm.server.http.response import TokenCounts
    from cllm.server.inference.streams import ChatStream

SIGNATURE = "cllm"
"""The signature of thinking blocks: clients expect one and send it back; it is ignored."""
_PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
_DELTAS = {
    "text": '{"type":"text_delta","text":',
    "reasoning": '{"type":"thinking_delta","thinking":',
    "call": '{"type":"input_json_delta","partial_json":',
}


def usage_of(chat: ChatStream) -> dict[str, Any]:
    """The prompt's tokens are split into cached ones, those that cache_control adds to the cache, and others."""
    created = max(0, chat.marked_tokens - chat.cached_tokens)
    return {
        "input_tokens": chat.prompt_tokens - chat.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": chat.cached_tokens,
        "output_tokens": chat.completion_tokens,
        **({} if chat.cache_details is None else {"cache_details": chat.cache_details._asdict()}),
    }


def ending_of(blocks: ContentBlocks, chat: ChatStream, max_tokens: int) -> dict[str, Any]:
    assert blocks.end is not None
    reason, sequence = blocks.end.finish_reason, None
    if reason == "tool_calls":
        reason = "tool_use"
    elif reason == "length":
        reason = "max_tokens" if chat.completion_tokens >= max_tokens else "model_context_window_exceeded"
    elif isinstance(blocks.end.stop_reason, str):
        reason, sequence = "stop_sequence", blocks.end.stop_reason
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def message_pieces(chat: ChatStream, blocks: ContentBlocks, max_tokens: int, *, shows_thinking: bool) -> Iterator[str]:
    """A whole message as JSON."""
    yield _start_of(chat)
    for block in blocks.all:
        if block.number:
            yield ","
        if block.kind == "text":
            yield '{"type":"text","text":'
            yield from text_pieces(block.text)
            yield "}"
        elif block.kind == "reasoning":
            yield '{"type":"thinking","thinking":'
            yield from text_pieces(block.text if shows_thinking else "")
            yield f',"signature":"{SIGNATURE}"}}'
        else:
            yield as_json({"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input_of(block)})
    yield f'],{as_json(ending_of(blocks, chat, max_tokens))[1:-1]},"usage":{as_json(usage_of(chat))}}}'


def _start_of(chat: ChatStream) -> str:
    """A message up to its content."""
    head = {"id": chat.head.id, "type": "message", "role": "assistant", "model": chat.head.model}
    return f'{as_json(head)[:-1]},"content":['


def _input_of(block: ContentBlock) -> dict[str, Any]:
    """A call's arguments. If they were cut off, their text, under the name that Anthropic uses for that."""
    try:
        found = json.loads(block.text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": block.text}


class MessageEvents:
    def __init__(self, chat: ChatStream, max_tokens: int, *, shows_thinking: bool) -> None:
        self._chat = chat
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._runs = ContentBlocks()
        self._begun = False
        self._growing = ""
        """The open block's delta event, up to its text."""

    def event(self, delta: ChatDelta) -> str:
        block = self._runs.open
        if type(delta) is Delta and delta.finish_reason is None and block is not None and block.kind == "text":
            block.parts.append(delta.text)  # the common case; the code below would do the same
            return f"{self._growing}{json.dumps(delta.text)}}}}}\n\n"
        change = self._runs.add(delta)
        written = "" if self._begun else self._begin()
        if change.ended is not None:
            written += self._stop(change.ended)
        if change.begun is not None:
            written += self._start(change.begun)
        if change.text and (self._shows_thinking or self._runs.open is None or self._runs.open.kind != "reasoning"):
            written += f"{self._growing}{json.dumps(change.text)}}}}}\n\n"
        return written

    def end(self, _counts: TokenCounts) -> str:
        delta = ending_of(self._runs, self._chat, self._max_tokens)
        ending = {"type": "message_delta", "delta": delta, "usage": usage_of(self._chat)}
        return _event("message_delta", ending) + _event("message_stop", {"type": "message_stop"})

    def _begin(self) -> str:
        """The prompt is computed by now, so the first event has its usage."""
        self._begun = True
        usage = as_json({**usage_of(self._chat), "output_tokens": 0})
        message = f'{_start_of(self._chat)}],"stop_reason":null,"stop_sequence":null,"usage":{usage}}}'
        return f'event: message_start\ndata: {{"type":"message_start","message":{message}}}\n\n{_PING}'

    def _start(self, block: ContentBlock) -> str:
        shown: dict[str, Any] = {"type": _BLOCKS[block.kind]}
        if block.kind == "text":
            shown["text"] = ""
        elif block.kind == "reasoning":
            shown |= {"thinking": "", "signature": ""}
        else:
            shown |= {"id": block.call_id, "name": block.name, "input": {}}
        delta = f'{{"type":"content_block_delta","index":{block.number},"delta":{_DELTAS[block.kind]}'
        self._growing = f"event: content_block_delta\ndata: {delta}"
        return _event(
            "content_block_start", {"type": "content_block_start", "index": block.number, "content_block": shown}
        )

    def _stop(self, block: ContentBlock) -> str:
        signed = ""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event(
                "content_block_delta", {"type": "content_block_delta", "index": block.number, "delta": delta}
            )
        return signed + _event("content_block_stop", {"type": "content_block_stop", "index": block.number})


class MessageStream(EventStream):
    def _failure(self, problem: Problem, scope: Scope) -> str:
        return _event("error", problem.body(scope["path"], scope["state"]["request_id"]))


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {as_json(content)}\n\n"
