"""Renders responses: whole ones in pieces, and events from strings built once per item."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from cllm.dialect.deltas import ChatDelta, Delta
from cllm.server.errors import Problem
from cllm.server.http.response import EventStream, ResponseWriter, Turns, as_json, slices, text_pieces, with_more
from cllm.server.inference.blocks import ContentBlock, ContentBlocks
from cllm.server.openai.logprobs import ChatLogprobs, TokenForm
from cllm.server.responses.tools import CalledTool, ToolNames, input_of

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob
    from cllm.server.http.response import ProgressEvent, PromptProgress, TokenCounts
    from cllm.server.inference.streams import ChatStream

_KINDS = {"text": ("message", "msg"), "reasoning": ("reasoning", "rs"), "call": ("function_call", "fc")}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
_GROWING = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
_CUSTOM = "response.custom_tool_call_input"


class ResponseForm:
    """Writes one response. `echo`: the members of its JSON object that repeat the request."""

    def __init__(self, chat: ChatStream, echo: str, names: ToolNames, *, stored: bool) -> None:
        self._chat = chat
        self._names = names
        self._echo = f'{echo},"store":{as_json(stored)}'
        self._logprobs = ChatLogprobs(TokenForm(chat.model.llm.text.tokenizer))

    def begun(self, status: str = "in_progress", error: dict[str, str] | None = None) -> str:
        """A response without output."""
        return f'{self._start(status, error=error)}],"usage":null,{self._echo}}}'

    def whole(self, blocks: ContentBlocks) -> Iterator[str]:
        cut = blocks.end is not None and blocks.end.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        yield self._start("incomplete" if cut else "completed", details, completed_at=None if cut else int(time.time()))
        for block in blocks.all:
            if block.number:
                yield ","
            yield from self.item(block, "incomplete" if cut and block is blocks.all[-1] else "completed")
        yield f'],"usage":{as_json(self._usage())},{self._echo}}}'

    def item(self, block: ContentBlock, status: str) -> Iterator[str]:
        yield f'{{"id":{as_json(self.item_id(block))},'
        if block.kind == "call":
            item = {"status": status, **self.called(block).item(block.call_id)}
            yield f'{as_json(item)[1:-1]},"{self.argument(block)}":'
            yield from text_pieces(self.call_text(block))
        else:
            yield f'"type":"{_KINDS[block.kind][0]}","status":"{status}",'
            yield '"role":"assistant",' if block.kind == "text" else '"summary":[],"encrypted_content":null,'
            yield '"content":['
            if status != "in_progress":
                yield from self.part(block)
            yield "]"
        yield "}"

    def part(self, block: ContentBlock) -> Iterator[str]:
        """The only part of an item's content."""
        yield f'{{"type":"{_PARTS[block.kind]}",'
        if block.kind == "text":
            yield '"annotations":[],"logprobs":'
            yield from self.logprobs(block.logprobs)
            yield ","
        yield '"text":'
        yield from text_pieces(block.text)
        yield "}"

    def logprobs(self, entries: Sequence[TokenLogprob]) -> Iterator[str]:
        return self._logprobs.list_pieces(entries)

    def item_id(self, block: ContentBlock) -> str:
        prefix = "ctc" if self.is_custom(block) else _KINDS[block.kind][1]
        return f"{prefix}_{self._chat.head.id}_{block.number}"

    def called(self, block: ContentBlock) -> CalledTool:
        return self._names.called.get(block.name) or CalledTool(block.name)

    def is_custom(self, block: ContentBlock) -> bool:
        return block.kind == "call" and self.called(block).custom

    def argument(self, block: ContentBlock) -> str:
        """The field of what a tool is called with."""
        return "input" if self.is_custom(block) else "arguments"

    def call_text(self, block: ContentBlock) -> str:
        return input_of(block.text) if block.text and self.is_custom(block) else block.text

    def _start(
        self,
        status: str,
        details: dict[str, str] | None = None,
        error: dict[str, str] | None = None,
        completed_at: int | None = None,
    ) -> str:
        """Up to where the output begins."""
        head = self._chat.head
        start = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": completed_at,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "model": head.model,
        }
        return f'{as_json(start)[:-1]},"output":['

    def _usage(self) -> dict[str, Any]:
        chat = self._chat
        details = {} if chat.cache_details is None else chat.cache_details._asdict()
        return {
            "input_tokens": chat.prompt_tokens,
            "input_tokens_details": {"cached_tokens": chat.cached_tokens, "cache_write_tokens": 0, **details},
            "output_tokens": chat.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": chat.reasoning_tokens},
            "total_tokens": chat.prompt_tokens + chat.completion_tokens,
        }


class ResponseEvents:
    """Numbers all events."""

    def __init__(self, form: ResponseForm) -> None:
        self.blocks = ContentBlocks()
        self._form = form
        self._number = 0
        self._growing = ""
        """The open item's delta event, up to its number."""
        self._grows = True
        """Whether the open item is sent as it grows; the input of a custom tool is known at its end."""
        self._last: ContentBlock | None = None
        """The item that was open when the answer ended."""

    def event(self, delta: ChatDelta) -> str:
        block = self.blocks.open
        if (
            type(delta) is Delta
            and delta.finish_reason is None
            and delta.logprobs is None
            and block is not None
            and block.kind == "text"
        ):
            block.parts.append(delta.text)  # the common case; the code below would do the same
            return f'{self._growing}{self._next()},"logprobs":[],"delta":{json.dumps(delta.text)}}}\n\n'
        change = self.blocks.add(delta)
        written = "" if self._number else f"{self._created()}{self._in_progress()}}}\n\n"
        if self.blocks.end is not None:
            self._last = change.ended
            return written
        if change.ended is not None:
            written += "".join(self._done(change.ended, "completed"))
        if change.begun is not None:
            written += self._added(change.begun)
        if (change.text or change.logprobs) and self._grows:
            written += f"{self._growing}{self._next()}{self._delta_logprobs(change.logprobs)},"
            written += f'"delta":{json.dumps(change.text)}}}\n\n'
        return written

    def end(self, _counts: TokenCounts) -> str:
        return "".join(self.ending(self._form.whole(self.blocks)))

    def ending(self, response: Iterator[str]) -> Iterator[str]:
        """The events after the last delta, in pieces; `response` is the whole response."""
        assert self.blocks.end is not None
        cut = self.blocks.end.finish_reason == "length"
        if not self.blocks.all:
            self._last = self.blocks.begin_empty()
            yield self._added(self._last)
        if self._last is not None:
            yield from self._done(self._last, "incomplete" if cut else "completed")
        yield f'{self._head("response.incomplete" if cut else "response.completed")},"response":'
        yield from response
        yield "}\n\n"

    def progress(self, progress: PromptProgress) -> str:
        """The prompt's progress, as llama-server sends it."""
        created = "" if self._number else self._created()
        return f'{created}{self._in_progress()},"prompt_progress":{progress.json()}}}\n\n'

    def failed(self, problem: Problem) -> str:
        error = {"code": "server_error", "message": problem.message}
        return f'{self._head("response.failed")},"response":{self._form.begun("failed", error)}}}\n\n'

    def _created(self) -> str:
        return f'{self._head("response.created")},"response":{self._form.begun()}}}\n\n'

    def _in_progress(self) -> str:
        """Up to the end of its data."""
        return f'{self._head("response.in_progress")},"response":{self._form.begun()}'

    def _added(self, block: ContentBlock) -> str:
        where, empty = self._where(block), replace(block, parts=[], logprobs=[])
        item = "".join(self._form.item(empty, "in_progress"))
        self._grows = not self._form.is_custom(block)
        kind = f"{_GROWING[block.kind]}.delta"
        self._growing = f'event: {kind}\ndata: {{"type":"{kind}",{where},"sequence_number":'
        written = f'{self._head("response.output_item.added")},"output_index":{block.number},"item":{item}}}\n\n'
        if block.kind == "call":
            return written
        part = "".join(self._form.part(empty))
        return f'{written}{self._head("response.content_part.added")},{where},"part":{part}}}\n\n'

    def _done(self, block: ContentBlock, status: str) -> Iterator[str]:
        where, form = self._where(block), self._form
        if form.is_custom(block):
            yield f'{self._head(f"{_CUSTOM}.delta")},{where},"delta":'
            yield from text_pieces(form.call_text(block))
            yield "}\n\n"
        kind = _CUSTOM if form.is_custom(block) else _GROWING[block.kind]
        yield f"{self._head(f'{kind}.done')},{where},"
        if block.kind == "call":
            yield f'"name":{as_json(form.called(block).name)},"{form.argument(block)}":'
        elif block.kind == "text":
            yield '"logprobs":'
            yield from self._form.logprobs(block.logprobs)
            yield ',"text":'
        else:
            yield '"text":'
        yield from text_pieces(form.call_text(block))
        yield "}\n\n"
        if block.kind != "call":
            yield f'{self._head("response.content_part.done")},{where},"part":'
            yield from self._form.part(block)
            yield "}\n\n"
        yield f'{self._head("response.output_item.done")},"output_index":{block.number},"item":'
        yield from self._form.item(block, status)
        yield "}\n\n"

    def _where(self, block: ContentBlock) -> str:
        content = "" if block.kind == "call" else ',"content_index":0'
        return f'"item_id":{as_json(self._form.item_id(block))},"output_index":{block.number}{content}'

    def _delta_logprobs(self, logprobs: Sequence[TokenLogprob]) -> str:
        if self.blocks.open is None or self.blocks.open.kind != "text":
            return ""
        return ',"logprobs":' + "".join(self._form.logprobs(logprobs))

    def _head(self, kind: str) -> str:
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._next()}'

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


class ResponseStream(EventStream):
    """Sends the end in slices: it repeats the whole answer several times. `whole` makes the last event's response."""

    def __init__(
        self,
        chat: ChatStream,
        events: ResponseEvents,
        whole: Callable[[ContentBlocks], Awaitable[Iterator[str]]],
        progress: ProgressEvent | None = None,
    ) -> None:
        super().__init__(chat, events, progress)
        self._response_events = events
        self._whole = whole

    async def _finish(self, writer: ResponseWriter) -> None:
        events = self._response_events
        turns = Turns()
        for piece, more in with_more(slices(events.ending(await self._whole(events.blocks)))):
            await writer.write(piece, more=more)
            if more:
                await turns.give()

    def _failure(self, problem: Problem, scope: Scope) -> str:
        return self._response_events.failed(problem)
