"""The forms of a response: whole ones in pieces, and events built from strings made once per item."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from cllm.dialect.pieces import Piece, TextPiece
from cllm.server.errors import Problem
from cllm.server.logprobs import ChatLogprobs
from cllm.server.pulse import Wire
from cllm.server.runs import Run, Runs
from cllm.server.sliced import as_json, slices, text_pieces
from cllm.server.sse import EventStream

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob
    from cllm.server.answers import Counts
    from cllm.server.chat import Chat

_KINDS = {"text": ("message", "msg"), "reasoning": ("reasoning", "rs"), "call": ("function_call", "fc")}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
_GROWING = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseForm:
    """How one response is written. `echo` are members of a JSON object: what it says of its request."""

    def __init__(self, chat: Chat, echo: str, *, stored: bool) -> None:
        self._chat = chat
        self._echo = f'{echo},"store":{as_json(stored)}'
        self._logprobs = ChatLogprobs(chat.model.llm.tokenizer)

    def begun(self, status: str = "in_progress", error: dict[str, str] | None = None) -> str:
        """A response without its answer."""
        return f'{self._start(status, error=error)}],"usage":null,{self._echo}}}'

    def whole(self, runs: Runs) -> Iterator[str]:
        cut = runs.end is not None and runs.end.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        yield self._start("incomplete" if cut else "completed", details, completed_at=None if cut else int(time.time()))
        for run in runs.all:
            if run.number:
                yield ","
            yield from self.item(run, "incomplete" if cut and run is runs.all[-1] else "completed")
        yield f'],"usage":{as_json(self._usage())},{self._echo}}}'

    def item(self, run: Run, status: str) -> Iterator[str]:
        yield f'{{"id":{as_json(self.item_id(run))},"type":"{_KINDS[run.kind][0]}","status":"{status}",'
        if run.kind == "call":
            yield f'"call_id":{as_json(run.call_id)},"name":{as_json(run.name)},"arguments":'
            yield from text_pieces(run.text)
        else:
            yield '"role":"assistant",' if run.kind == "text" else '"summary":[],"encrypted_content":null,'
            yield '"content":['
            if status != "in_progress":
                yield from self.part(run)
            yield "]"
        yield "}"

    def part(self, run: Run) -> Iterator[str]:
        """The only part of an item's content."""
        yield f'{{"type":"{_PARTS[run.kind]}",'
        if run.kind == "text":
            yield '"annotations":[],"logprobs":'
            yield from self.logprobs(run)
            yield ","
        yield '"text":'
        yield from text_pieces(run.text)
        yield "}"

    def logprobs(self, run: Run) -> Iterator[str]:
        return self.logprobs_of(run.logprobs)

    def logprobs_of(self, entries: Sequence[TokenLogprob]) -> Iterator[str]:
        return self._logprobs.list_pieces(entries)

    def item_id(self, run: Run) -> str:
        return f"{_KINDS[run.kind][1]}_{self._chat.head.id}_{run.number}"

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
        return {
            "input_tokens": chat.prompt_tokens,
            "input_tokens_details": {"cached_tokens": chat.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": chat.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": chat.reasoning_tokens},
            "total_tokens": chat.prompt_tokens + chat.completion_tokens,
        }


class ResponseEvents:
    """Every event has the next number."""

    def __init__(self, form: ResponseForm) -> None:
        self.runs = Runs()
        self._form = form
        self._number = 0
        self._growing = ""
        """An event of the open item up to its number."""
        self._last: Run | None = None
        """The item that ended with the answer."""

    def event(self, piece: Piece) -> str:
        run = self.runs.open
        if type(piece) is TextPiece and piece.logprobs is None and run is not None and run.kind == "text":
            run.parts.append(piece.text)  # as nearly always; what follows would do the same
            return f'{self._growing}{self._next()},"logprobs":[],"delta":{json.dumps(piece.text)}}}\n\n'
        step = self.runs.add(piece)
        written = "" if self._number else self._begin()
        if self.runs.end is not None:
            self._last = step.ended
            return written
        if step.ended is not None:
            written += "".join(self._done(step.ended, "completed"))
        if step.begun is not None:
            written += self._added(step.begun)
        if step.text or step.logprobs:
            written += f"{self._growing}{self._next()}{self._delta_logprobs(step.logprobs)},"
            written += f'"delta":{json.dumps(step.text)}}}\n\n'
        return written

    def end(self, _counts: Counts) -> str:
        return "".join(self.ending(self._form.whole(self.runs)))

    def ending(self, response: Iterator[str]) -> Iterator[str]:
        """What follows the last piece, in pieces; `response` is the whole one."""
        assert self.runs.end is not None
        cut = self.runs.end.finish_reason == "length"
        if not self.runs.all:
            self._last = self.runs.begin_empty()
            yield self._added(self._last)
        if self._last is not None:
            yield from self._done(self._last, "incomplete" if cut else "completed")
        yield f'{self._head("response.incomplete" if cut else "response.completed")},"response":'
        yield from response
        yield "}\n\n"

    def failed(self, problem: Problem) -> str:
        error = {"code": "server_error", "message": problem.message}
        return f'{self._head("response.failed")},"response":{self._form.begun("failed", error)}}}\n\n'

    def _begin(self) -> str:
        response = self._form.begun()
        created = f'{self._head("response.created")},"response":{response}}}\n\n'
        return f'{created}{self._head("response.in_progress")},"response":{response}}}\n\n'

    def _added(self, run: Run) -> str:
        where, empty = self._where(run), replace(run, parts=[], logprobs=[])
        item = "".join(self._form.item(empty, "in_progress"))
        kind = f"{_GROWING[run.kind]}.delta"
        self._growing = f'event: {kind}\ndata: {{"type":"{kind}",{where},"sequence_number":'
        written = f'{self._head("response.output_item.added")},"output_index":{run.number},"item":{item}}}\n\n'
        if run.kind == "call":
            return written
        part = "".join(self._form.part(empty))
        return f'{written}{self._head("response.content_part.added")},{where},"part":{part}}}\n\n'

    def _done(self, run: Run, status: str) -> Iterator[str]:
        where = self._where(run)
        yield f"{self._head(f'{_GROWING[run.kind]}.done')},{where},"
        if run.kind == "call":
            yield f'"name":{as_json(run.name)},"arguments":'
        elif run.kind == "text":
            yield '"logprobs":'
            yield from self._form.logprobs(run)
            yield ',"text":'
        else:
            yield '"text":'
        yield from text_pieces(run.text)
        yield "}\n\n"
        if run.kind != "call":
            yield f'{self._head("response.content_part.done")},{where},"part":'
            yield from self._form.part(run)
            yield "}\n\n"
        yield f'{self._head("response.output_item.done")},"output_index":{run.number},"item":'
        yield from self._form.item(run, status)
        yield "}\n\n"

    def _where(self, run: Run) -> str:
        content = "" if run.kind == "call" else ',"content_index":0'
        return f'"item_id":{as_json(self._form.item_id(run))},"output_index":{run.number}{content}'

    def _delta_logprobs(self, logprobs: Sequence[TokenLogprob]) -> str:
        if self.runs.open is None or self.runs.open.kind != "text":
            return ""
        return ',"logprobs":' + "".join(self._form.logprobs_of(logprobs))

    def _head(self, kind: str) -> str:
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._next()}'

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


class ResponseStream(EventStream):
    """Its end, which holds all of the answer several times, is sent a slice at a time. `whole` makes the last event's
    response, and may take its time first."""

    def __init__(self, chat: Chat, events: ResponseEvents, whole: Callable[[Runs], Awaitable[Iterator[str]]]) -> None:
        super().__init__(chat, events)
        self._response_events = events
        self._whole = whole

    async def _finish(self, wire: Wire) -> None:
        events = self._response_events
        last = ""
        for piece in slices(events.ending(await self._whole(events.runs))):
            if last:
                await wire.write(last, more=True)
                await asyncio.sleep(0)
            last = piece
        await wire.write(last, more=False)

    def _failure(self, problem: Problem, scope: Scope) -> str:
        return self._response_events.failed(problem)
