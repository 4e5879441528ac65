"""Renders answers for Ollama's API: lines of JSON, or one object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from cllm.server.errors import Problem
from cllm.server.http.response import EventStream, as_json
from cllm.server.inference.blocks import ContentBlocks
from cllm.server.openai.logprobs import ChatLogprobs, TokenForm

if TYPE_CHECKING:
    from cllm.dialect.deltas import ChatDelta
    from cllm.engine.sampling import TokenLogprob
    from cllm.generation import Completion
    from cllm.server.http.response import TokenCounts
    from cllm.server.inference.streams import ChatStream

Call = tuple[str, str, str]
"""Id, name and arguments."""


class Lines:
    """An answer as lines of JSON: some text or a whole call in each, statistics in the last."""

    def __init__(self, chat: ChatStream, *, as_chat: bool) -> None:
        self._chat = chat
        self._as_chat = as_chat
        self._blocks = ContentBlocks()
        self._logprobs = ChatLogprobs(TokenForm(chat.model.llm.text.tokenizer))
        self._unsent: list[TokenLogprob] = []
        self._calls = 0

    def event(self, delta: ChatDelta) -> str:
        change = self._blocks.add(delta)
        self._unsent += delta.logprobs or ()
        written = ""
        if change.ended is not None and change.ended.kind == "call":
            block = change.ended
            written = self._line(calls=self._written([(block.call_id, block.name, block.text)]))
        grown = self._blocks.open
        if change.text and grown is not None and grown.kind != "call":
            thinks = grown.kind == "reasoning"
            written += self._line("" if thinks else change.text, change.text if thinks else "")
        return written

    def end(self, _counts: TokenCounts) -> str:
        assert self._blocks.end is not None
        last = {**self._content("", "", []), **self._statistics(self._blocks.end.finish_reason)}
        return "".join(self._with_logprobs(last, self._unsent)) + "\n"

    def whole(self, answer: Completion) -> Iterator[str]:
        calls = self._written([(call.id, call.name, call.arguments) for call in answer.tool_calls])
        whole = {**self._content(answer.text, answer.reasoning, calls), **self._statistics(answer.finish_reason)}
        return self._with_logprobs(whole, answer.logprobs or ())

    def _line(self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> str:
        if not (text or thinking or calls):  # a call that was cut off
            return ""
        logprobs, self._unsent = self._unsent, []
        return "".join(self._with_logprobs({**self._content(text, thinking, calls), "done": False}, logprobs)) + "\n"

    def _with_logprobs(self, answer: dict[str, Any], logprobs: Sequence[TokenLogprob]) -> Iterator[str]:
        if not logprobs:
            yield as_json(answer)
            return
        yield f'{as_json(answer)[:-1]},"logprobs":'
        yield from self._logprobs.list_pieces(logprobs)
        yield "}"

    def _content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            extra["tool_calls"] = calls
        answer: dict[str, Any] = {"message": {"role": "assistant", "content": text, **extra}}
        if not self._as_chat:
            answer = {"response": text, **extra}
        return {"model": self._chat.head.model, "created_at": now(), **answer}

    def _written(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Without one that was cut off: Ollama has no form for it, and done_reason says so."""
        written = []
        for call_id, name, arguments in calls:
            if (found := _arguments(arguments)) is not None:
                function = {"index": self._calls, "name": name, "arguments": found}
                written.append({"id": call_id, "function": function})
                self._calls += 1
        return written

    def _statistics(self, reason: str | None) -> dict[str, Any]:
        timings = self._chat.generations[0].timings
        return {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": round(timings.total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._chat.prompt_tokens,
            "prompt_eval_duration": round(timings.ttft_s * 1e9),
            "eval_count": self._chat.completion_tokens,
            "eval_duration": round(timings.decode_s * 1e9),
        }


class LineStream(EventStream):
    media_type = "application/x-ndjson"
    comments = False

    def _failure(self, problem: Problem, scope: Scope) -> str:
        return json.dumps(problem.body(scope["path"])) + "\n"


def now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
