"""Turns a model's text, as it arrives, into deltas: reasoning first, then text and tool calls in the model's format.

The result does not depend on how the text was cut up. Text before a call loses the blanks at its end, and text after
one those at its beginning; without a call all text is passed on unchanged. A would-be call that fails before its name
is known is emitted as text, with its markers; one that is cut off there is dropped if it follows another call, or if
only calls are allowed. An answer that is nothing but calls without markers is held back until its end. A call whose
arguments turn out not to be JSON, or are cut off, ends there; the answer then ends with `length` or `stop`, never with
`tool_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from cllm.dialect.calls import CallState, Tools
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta, ToolCallStart
from cllm.dialect.reasoning import ReasoningReader

if TYPE_CHECKING:
    from cllm.dialect.syntax import JsonSyntax
    from cllm.dialect.whole_calls import WholeCalls
    from cllm.engine.sampling import TokenLogprob


class Attempt(Protocol):
    """Reads a possible tool call, or several."""

    @property
    def name(self) -> str | None: ...
    @property
    def arguments(self) -> list[str]: ...
    @property
    def took_last(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    def feed(self, char: str) -> CallState: ...


class AnswerReader:
    """`read` every delta of the answer, or `push` its text and end with `finish`."""

    def __init__(
        self,
        index: int,
        *,
        reasoning: ReasoningReader | None = None,
        syntax: JsonSyntax | None = None,
        tools: Tools = MappingProxyType({}),
        most_calls: int | None = None,
        calls_only: bool = False,
        whole: WholeCalls | None = None,
        include_reasoning: bool = True,
        new_id: Callable[[], str] = str,
    ) -> None:
        """`calls_only`: a mask allows nothing else, beside reasoning. `whole`: takes answers that are nothing but calls
        without markers."""
        self.ended = False
        """Whether the rest of the model's text is ignored."""
        self.tokens = 0
        """Tokens that were read, until it ended."""
        self.reasoning_tokens = 0
        self._include_reasoning = include_reasoning
        self._finished = False
        """Whether `read` has returned the last delta."""
        self._logprobs: list[TokenLogprob] = []
        """Log probabilities of tokens that are not known to belong to anything yet."""
        self._in_text = False
        """Whether the last delta was text."""
        self._tokens = 0
        """Since the last delta."""
        self._generated: list[int] = []
        """Tokens since the last delta that was returned, with one that ended the answer."""
        self._index = index
        self._reasoning = reasoning
        self._syntax = syntax if tools else None
        self._tools = tools
        self._most_calls = most_calls
        self._calls_only = calls_only
        self._whole = whole
        self._new_id = new_id
        self._deltas: list[ChatDelta] = []
        self._calls = 0
        self._unfinished = False
        """Whether the last call's arguments are incomplete."""
        self._text = ""
        """Text that may still turn out to begin a call."""
        self._blanks = ""
        self._anything = False
        """Whether there was any text other than blanks."""
        self._after_call = False
        """Whether only blanks have come since the last call."""
        self._closing = False
        """Whether its end may still come."""
        self._attempt: Attempt | None = None
        self._seen = ""
        """The whole attempt, in case it is not a call."""
        self._announced = False

    def read(self, delta: Delta) -> list[ChatDelta]:
        """What a delta of the model's text is: reasoning, text, tool calls, and at last a delta with the finish_reason.
        Log probabilities go with a delta of what their tokens belong to."""
        if self._finished:
            return []
        self.tokens += len(delta.token_ids)
        self._generated += delta.generated
        self._logprobs += delta.logprobs or ()
        new = self.push(delta.text)
        silent = self._silent_delta() if self._logprobs and not new else None
        rest: list[ChatDelta] = []
        reason = delta.finish_reason
        if reason is not None or self.ended:
            self._finished = True
            rest = self.finish()
            reason = self.finish_reason(reason or "stop")
            rest.append(Delta(self._index, "", finish_reason=reason, stop_reason=delta.stop_reason))
        self._tokens += len(delta.token_ids)
        if new or rest:
            self.reasoning_tokens += self._tokens if isinstance((new or rest)[0], ReasoningDelta) else 0
            self._tokens = 0
        if self._logprobs:
            if silent is not None:
                new.append(silent)
            self._add_logprobs(new, rest)
        new += rest
        if not self._include_reasoning:
            new = [each for each in new if not isinstance(each, ReasoningDelta)]
        if new:
            # The last one: whoever counts along is never ahead of the text.
            new[-1].generated, self._generated = self._generated, []
        return new

    def _add_logprobs(self, new: list[ChatDelta], rest: list[ChatDelta]) -> None:
        """`rest`: what the answer's end adds."""
        if new:
            self._in_text = isinstance(new[-1], Delta)
        elif self._in_text and len(rest) == 1:
            rest.insert(0, Delta(self._index, ""))
        if new or rest:
            (new or rest)[0].logprobs, self._logprobs = self._logprobs, []

    def push(self, text: str) -> list[ChatDelta]:
        self._take(text)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[ChatDelta]:
        """The rest, once there is no more text."""
        if not self.ended:
            if self._reasoning is not None:
                for is_reasoning, text in self._reasoning.flush():
                    self._sort(is_reasoning, text)
            self._end_whole()
            self._end_attempt()
            if not self._closing and not self._cut_off:
                self._say(self._text)
            self._emit(self._blanks)
            self.ended = True
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish_reason(self, reason: str) -> str:
        """The answer's finish_reason, given the model's."""
        if self._unfinished:
            return "length" if reason == "length" else "stop"
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _silent_delta(self) -> ChatDelta | None:
        """An empty delta of what the last text belongs to, if that gave no delta: the marks of reasoning and calls.
        None: not known yet."""
        if self._reasoning is not None and self._reasoning.inside:
            return ReasoningDelta(self._index, "") if self._reasoning.separate else None
        in_call = self._announced if self._attempt is not None else self._after_call and not self._pending_text()
        return ToolCallDelta(self._index, self._calls - 1, "") if in_call else None

    def _pending_text(self) -> str:
        """What has come since the last call and its closing marks."""
        if not self._closing or self._syntax is None:
            return self._text
        return self._text[self._syntax.closing(self._text)[0] :]

    # -- reasoning and text ------------------------------------------------------------------------------------

    def _take(self, text: str) -> None:
        if self.ended:
            return
        if self._reasoning is None:
            self._read(text)
            return
        for is_reasoning, part in self._reasoning.push(text):
            self._sort(is_reasoning, part)

    def _sort(self, is_reasoning: bool, text: str) -> None:
        if not is_reasoning:
            self._read(text)
        elif text and self._reasoning is not None:
            kind = ReasoningDelta if self._reasoning.separate else Delta
            self._deltas.append(kind(self._index, text))

    def _read(self, text: str) -> None:
        if self._whole is not None:
            text = self._whole.push(text)
            if not text:
                return
            self._whole = None
        if self._syntax is None:
            self._emit(text)
            return
        while text and not self.ended:
            text = self._read_attempt(text) if self._attempt is not None else self._read_text(self._syntax, text)

    def _read_text(self, syntax: JsonSyntax, text: str) -> str:
        """Pass on what is certainly text. The return value must be read as part of a call."""
        self._text += text
        if self._closing:
            skipped, more = syntax.closing(self._text)
            if more:
                return ""
            self._text, self._closing = self._text[skipped:], False
        at_start = not self._anything and not self._calls
        first, last, held = syntax.begins(self._text, at_start=at_start, after_call=self._after_call)
        known, self._text = self._text, ""
        if first < 0:
            certain = len(known) - held
            self._text = known[certain:]
            self._say(known[:certain])
            return ""
        self._say(known[:first])
        self._seen = known[first:last]
        self._attempt = syntax.attempt(self._seen, self._tools)
        self._announced = False
        return known[last:]

    def _say(self, text: str) -> None:
        """Text for the client; trailing blanks wait, since a call may follow."""
        text = text.lstrip() if self._after_call else text
        body = text.rstrip()
        if not body:
            self._blanks += text
            return
        self._anything, self._after_call = True, False
        self._emit(self._blanks + body)
        self._blanks = text[len(body) :]

    def _emit(self, text: str) -> None:
        if text:
            self._deltas.append(Delta(self._index, text))

    # -- calls -------------------------------------------------------------------------------------------------

    def _read_attempt(self, text: str) -> str:
        attempt = self._attempt
        assert attempt is not None
        for position, char in enumerate(text):
            state = attempt.feed(char)
            if state is CallState.OPEN and attempt.name is None:
                self._seen += char
                continue
            if attempt.name is not None:
                self._announce(attempt)
            if state is CallState.OPEN:
                continue
            rest = text[position + attempt.took_last :]
            if state is CallState.FAILED:
                self._give_up(text[position : position + attempt.took_last])
                return rest
            self._pass_on(attempt)
            self._close_call(broken=state is CallState.BROKEN)
            return rest
        self._pass_on(attempt)
        return ""

    def _announce(self, attempt: Attempt) -> None:
        if self._announced:
            return
        assert attempt.name is not None
        self._announced = True
        self._blanks = ""
        self._deltas.append(ToolCallStart(self._index, self._calls, self._new_id(), attempt.name))
        self._calls += 1

    def _pass_on(self, attempt: Attempt) -> None:
        if self._announced and attempt.arguments:
            self._deltas.append(ToolCallDelta(self._index, self._calls - 1, "".join(attempt.arguments)))
            attempt.arguments.clear()

    def _close_call(self, *, broken: bool) -> None:
        self._attempt = None
        self._after_call = self._closing = True
        self._unfinished = broken
        if broken or self._calls == self._most_calls:
            self.ended = True

    def _end_whole(self) -> None:
        if self._whole is None:
            return
        (calls, text), self._whole = self._whole.flush(), None
        for delta in calls:
            if isinstance(delta, ToolCallStart):
                if self._calls == self._most_calls:
                    break
                self._calls += 1
            self._deltas.append(delta)
        self._read(text)

    def _give_up(self, last: str) -> None:
        """It is not a call: all of it is plain text."""
        text, self._seen, self._attempt = self._seen + last, "", None
        self._say(text)

    def _end_attempt(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if self._announced:
            self._pass_on(attempt)
            self._close_call(broken=not attempt.complete)
        elif not self._cut_off:
            self._give_up("")

    @property
    def _cut_off(self) -> bool:
        """Whether an unfinished beginning of a call at the end can only be a call."""
        return self._calls_only or self._after_call
