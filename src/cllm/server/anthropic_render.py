"""Anthropic's forms of an answer: whole ones in pieces, and events built from strings made once per block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from cllm.dialect.pieces import Piece, TextPiece
from cllm.server.errors import Problem
from cllm.server.runs import Run, Runs
from cllm.server.sliced import as_json, text_pieces
from cllm.server.sse import EventStream

if TYPE_CHECKING:
    from cllm.server.answers import Counts
    from cllm.server.chat import Chat

SIGNATURE = "cllm"
"""Of thinking blocks: clients expect one and send it back; it is not looked at."""
_PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
_DELTAS = {
    "text": '{"type":"text_delta","text":',
    "reasoning": '{"type":"thinking_delta","thinking":',
    "call": '{"type":"input_json_delta","partial_json":',
}


def usage_of(chat: Chat) -> dict[str, Any]:
    """The prompt is what was found in the cache, what a mark asks to keep of the rest, and the others."""
    created = max(0, chat.marked_tokens - chat.cached_tokens)
    return {
        "input_tokens": chat.prompt_tokens - chat.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": chat.cached_tokens,
        "output_tokens": chat.completion_tokens,
    }


def ending_of(runs: Runs, chat: Chat, max_tokens: int) -> dict[str, Any]:
    assert runs.end is not None
    reason, sequence = runs.end.finish_reason, None
    if reason == "tool_calls":
        reason = "tool_use"
    elif reason == "length":
        reason = "max_tokens" if chat.completion_tokens >= max_tokens else "model_context_window_exceeded"
    elif isinstance(runs.end.stop_reason, str):
        reason, sequence = "stop_sequence", runs.end.stop_reason
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def message_pieces(chat: Chat, runs: Runs, max_tokens: int, *, shows_thinking: bool) -> Iterator[str]:
    """A whole message as JSON."""
    yield _start_of(chat)
    for run in runs.all:
        if run.number:
            yield ","
        if run.kind == "text":
            yield '{"type":"text","text":'
            yield from text_pieces(run.text)
            yield "}"
        elif run.kind == "reasoning":
            yield '{"type":"thinking","thinking":'
            yield from text_pieces(run.text if shows_thinking else "")
            yield f',"signature":"{SIGNATURE}"}}'
        else:
            yield as_json({"type": "tool_use", "id": run.call_id, "name": run.name, "input": _input_of(run)})
    yield f'],{as_json(ending_of(runs, chat, max_tokens))[1:-1]},"usage":{as_json(usage_of(chat))}}}'


def _start_of(chat: Chat) -> str:
    """A message up to where its content begins."""
    head = {"id": chat.head.id, "type": "message", "role": "assistant", "model": chat.head.model}
    return f'{as_json(head)[:-1]},"content":['


def _input_of(run: Run) -> dict[str, Any]:
    """A call's arguments. What was cut off is shown as it is, under the name that Anthropic uses for that."""
    try:
        found = json.loads(run.text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": run.text}


class MessageEvents:
    def __init__(self, chat: Chat, max_tokens: int, *, shows_thinking: bool) -> None:
        self._chat = chat
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._runs = Runs()
        self._begun = False
        self._growing = ""
        """An event of the open block up to the text that is new."""

    def event(self, piece: Piece) -> str:
        run = self._runs.open
        if type(piece) is TextPiece and run is not None and run.kind == "text":
            run.parts.append(piece.text)  # as nearly always; what follows would do the same
            return f"{self._growing}{json.dumps(piece.text)}}}}}\n\n"
        step = self._runs.add(piece)
        written = "" if self._begun else self._begin()
        if step.ended is not None:
            written += self._stop(step.ended)
        if step.begun is not None:
            written += self._start(step.begun)
        if step.text and (self._shows_thinking or self._runs.open is None or self._runs.open.kind != "reasoning"):
            written += f"{self._growing}{json.dumps(step.text)}}}}}\n\n"
        return written

    def end(self, _counts: Counts) -> str:
        delta = ending_of(self._runs, self._chat, self._max_tokens)
        ending = {"type": "message_delta", "delta": delta, "usage": usage_of(self._chat)}
        return _event("message_delta", ending) + _event("message_stop", {"type": "message_stop"})

    def _begin(self) -> str:
        """What the prompt took is known by now; so the usage is there from the start."""
        self._begun = True
        usage = as_json({**usage_of(self._chat), "output_tokens": 0})
        message = f'{_start_of(self._chat)}],"stop_reason":null,"stop_sequence":null,"usage":{usage}}}'
        return f'event: message_start\ndata: {{"type":"message_start","message":{message}}}\n\n{_PING}'

    def _start(self, run: Run) -> str:
        block: dict[str, Any] = {"type": _BLOCKS[run.kind]}
        if run.kind == "text":
            block["text"] = ""
        elif run.kind == "reasoning":
            block |= {"thinking": "", "signature": ""}
        else:
            block |= {"id": run.call_id, "name": run.name, "input": {}}
        delta = f'{{"type":"content_block_delta","index":{run.number},"delta":{_DELTAS[run.kind]}'
        self._growing = f"event: content_block_delta\ndata: {delta}"
        return _event(
            "content_block_start", {"type": "content_block_start", "index": run.number, "content_block": block}
        )

    def _stop(self, run: Run) -> str:
        signed = ""
        if run.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", {"type": "content_block_delta", "index": run.number, "delta": delta})
        return signed + _event("content_block_stop", {"type": "content_block_stop", "index": run.number})


class MessageStream(EventStream):
    def _failure(self, problem: Problem, scope: Scope) -> str:
        return _event("error", problem.body(scope["path"], scope["state"]["request_id"]))


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {as_json(content)}\n\n"
