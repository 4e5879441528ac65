"""Renders answers for OpenAI's API: whole ones in pieces, and events from strings built once per request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta, ToolCallStart
from cllm.engine.sampling import TokenLogprob
from cllm.server.http.response import DONE, PromptProgress, TokenCounts, as_json, list_pieces, text_pieces
from cllm.server.inference.streams import Head
from cllm.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptReport, TokenForm
from cllm.server.openai.replies import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from cllm.generation import Completion


def usage_of(answers: TokenCounts, generated: int | None = None) -> Usage:
    """`generated`: how many tokens were generated, if not all of them count yet."""
    generated = answers.completion_tokens if generated is None else generated
    details = {} if answers.cache_details is None else answers.cache_details._asdict()
    return Usage(
        prompt_tokens=answers.prompt_tokens,
        completion_tokens=generated,
        total_tokens=answers.prompt_tokens + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=answers.cached_tokens, **details),
    )


def completion_pieces(
    head: Head,
    whole: Sequence[Completion],
    usage: Usage,
    form: TokenForm,
    echoes: Mapping[int, str],
    report: PromptReport,
) -> Iterator[str]:
    """A `CompletionReply`. `echoes`: the prompts to put in front of answers."""
    logprobs = CompletionLogprobs(form)
    start = head.start("text_completion")
    for index, answer in enumerate(whole):
        yield f'{start}{{"index":{index},"text":'
        yield from text_pieces(echoes.get(index, ""), answer.text)
        yield ',"logprobs":'
        entries = joined(report.entries(index), answer.logprobs or ())
        yield from logprobs.pieces(entries) if len(entries) or answer.logprobs is not None else ("null",)
        yield _ending(answer)
        yield from _ids(answer, form)
        yield from report.fields(index)
        yield "}"
        start = ","
    yield f'],"usage":{usage.model_dump_json(exclude_none=True)}}}'


def chat_pieces(
    head: Head, whole: Sequence[Completion], usage: Usage, form: TokenForm, echo: str, report: PromptReport
) -> Iterator[str]:
    """A `ChatReply`. `echo`: the text in front of answers."""
    logprobs = ChatLogprobs(form)
    start = head.start("chat.completion")
    for index, answer in enumerate(whole):
        yield f'{start}{{"index":{index},"message":{{"role":"assistant","content":'
        has_text = echo or answer.text or not answer.tool_calls
        yield from text_pieces(echo, answer.text) if has_text else ("null",)
        if answer.reasoning:
            yield ',"reasoning_content":'
            yield from text_pieces(answer.reasoning)
        yield from _call_pieces(answer)
        yield ',"refusal":null},"logprobs":'
        yield from logprobs.pieces(answer.logprobs) if answer.logprobs is not None else ("null",)
        yield _ending(answer)
        yield from _ids(answer, form)
        yield "}"
        start = ","
    yield f'],"usage":{usage.model_dump_json(exclude_none=True)}'
    yield from report.fields(0)
    yield "}"


def _call_pieces(answer: Completion) -> Iterator[str]:
    start = ',"tool_calls":['
    for call in answer.tool_calls:
        yield f'{start}{{"id":{as_json(call.id)},"type":"function","function":{{"name":{as_json(call.name)}'
        yield ',"arguments":'
        yield from text_pieces(call.arguments)
        yield "}}"
        start = ","
    if answer.tool_calls:
        yield "]"


def _ending(answer: Completion) -> str:
    return f',"finish_reason":{as_json(answer.finish_reason)},"stop_reason":{as_json(answer.stop_reason)}'


def _ids(answer: Completion, form: TokenForm) -> Iterator[str]:
    if form.lists_ids:
        yield ',"token_ids":'
        yield from list_pieces(map(str, answer.generated), entries=4096)


class EventForm(NamedTuple):
    """What the events of a stream have in common."""

    head: Head
    tokens: TokenForm
    report: PromptReport
    include_usage: bool
    counts: TokenCounts | None = None
    """For usage in every event, if requested."""


class _OpenAIEvents:
    """An event is a constant start, the text and a constant end. No model is built per token."""

    _object: str

    _nothing: str
    """The content of an answer that has not begun."""

    def __init__(self, form: EventForm) -> None:
        self._lists_ids = form.tokens.lists_ids
        self._include_usage = form.include_usage
        self._counts = form.counts
        self.report = form.report
        self._generated = 0
        """Tokens whose text is in the events so far."""
        self._start = f"data: {form.head.start(self._object)}"
        self._end_events(())

    def _end_events(self, generated: Sequence[int]) -> None:
        """`generated`: the tokens that the next event brings."""
        self._generated += len(generated)
        ids = f',"token_ids":{as_json([*generated])}' if self._lists_ids else ""
        usage = ',"usage":null' if self._include_usage else ""
        if self._counts is not None:
            usage = f',"usage":{usage_of(self._counts, self._generated).model_dump_json(exclude_none=True)}'
        self._stop = f"{ids}}}]{usage}}}\n\n"
        self._running = f',"logprobs":null,"finish_reason":null{self._stop}'

    def progress(self, progress: PromptProgress) -> str:
        """The prompt's progress, as llama-server sends it."""
        choice = f'{{"index":0,{self._nothing},"logprobs":null,"finish_reason":null}}'
        return f'{self._start}{choice}],"prompt_progress":{progress.json()}}}\n\n'

    def end(self, answers: TokenCounts) -> str:
        if not self._include_usage:
            return DONE
        return f'{self._start}],"usage":{usage_of(answers).model_dump_json(exclude_none=True)}}}\n\n{DONE}'

    def _count(self, delta: ChatDelta) -> None:
        """Before an event is written."""
        if self._counts is not None or self._lists_ids:
            self._end_events(delta.generated)

    def _rest(self, logprobs: str, finish_reason: str | None = None, stop_reason: str | int | None = None) -> str:
        """The rest of an event, after its text."""
        if finish_reason is None:
            return self._running if logprobs == "null" else f',"logprobs":{logprobs},"finish_reason":null{self._stop}'
        finish, stop = json.dumps(finish_reason), json.dumps(stop_reason)
        return f',"logprobs":{logprobs},"finish_reason":{finish},"stop_reason":{stop}{self._stop}'


class CompletionEvents(_OpenAIEvents):
    _object = "text_completion"
    _nothing = '"text":""'

    def __init__(self, form: EventForm, echoes: Mapping[int, str]) -> None:
        """`echoes`: the prompts to put in front of answers."""
        super().__init__(form)
        self._logprobs = CompletionLogprobs(form.tokens)
        # As JSON without its quotes, once for all answers to a prompt.
        written = {text: "".join(text_pieces(text))[1:-1] for text in set(echoes.values())}
        self._echoes = {index: written[text] for index, text in echoes.items()}
        self._offsets: dict[int, int] = {}
        self._reported: set[int] = set()

    def event(self, delta: Delta) -> str:
        self._count(delta)
        echo = self._echoes.pop(delta.index, "") if self._echoes else ""
        logprobs = "null" if delta.logprobs is None else "".join(self._logprob_pieces(delta.index, delta.logprobs))
        text = json.dumps(delta.text)
        rest = self._rest(logprobs, delta.finish_reason, delta.stop_reason)
        return f'{self._start}{{"index":{delta.index},"text":"{echo}{text[1:]}{rest}'

    def _logprob_pieces(self, index: int, entries: Sequence[TokenLogprob]) -> Iterator[str]:
        self._offsets[index] = yield from self._logprobs.pieces(entries, self._offsets.get(index, 0))

    def pieces(self, delta: Delta) -> Iterator[str]:
        """The first event of each answer also has what the report says of its prompt."""
        index = delta.index
        if index in self._reported:
            yield self.event(delta)
            return
        self._reported.add(index)
        self._count(delta)
        entries = joined(self.report.entries(index), delta.logprobs or ())
        text = json.dumps(delta.text)[1:]
        yield f'{self._start}{{"index":{index},"text":"{self._echoes.pop(index, "")}{text},"logprobs":'
        wanted = len(entries) or delta.logprobs is not None
        yield from self._logprob_pieces(index, entries) if wanted else ("null",)
        yield self._rest("null", delta.finish_reason, delta.stop_reason)[len(',"logprobs":null') : -len(self._stop)]
        yield from self.report.fields(index)
        yield self._stop


class ChatEvents(_OpenAIEvents):
    _object = "chat.completion.chunk"
    _nothing = '"delta":{}'

    def __init__(self, form: EventForm, echo: str) -> None:
        """`echo`: the text in front of answers."""
        super().__init__(form)
        self._logprobs = ChatLogprobs(form.tokens)
        self._echo = json.dumps(echo) if echo else ""
        self._introduced: set[int] = set()
        self._reported = False

    def pieces(self, delta: ChatDelta) -> Iterator[str]:
        """The first event also has what the report says of the prompt."""
        event = self.event(delta)
        if self._reported:
            yield event
            return
        self._reported = True
        yield event[: -len("}\n\n")]
        yield from self.report.fields(0)
        yield "}\n\n"

    def event(self, delta: ChatDelta) -> str:
        if self._echo and delta.index not in self._introduced:
            self._introduced.add(delta.index)
            self._end_events(())
            echoed = f'{{"index":{delta.index},"delta":{{"role":"assistant","content":{self._echo}}}{self._running}'
            return f"{self._start}{echoed}{self.event(delta)}"
        self._count(delta)
        role = ""
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            role = '"role":"assistant",'
        logprobs = "null" if delta.logprobs is None else "".join(self._logprobs.pieces(delta.logprobs))
        if isinstance(delta, Delta):
            if delta.finish_reason is None:
                content = f'{{{role}"content":{json.dumps(delta.text)}}}{self._rest(logprobs)}'
            else:
                empty = f'{{{role}"content":""}}' if role else "{}"
                content = empty + self._rest(logprobs, delta.finish_reason, delta.stop_reason)
        elif isinstance(delta, ReasoningDelta):
            content = f'{{{role}"reasoning_content":{json.dumps(delta.text)}}}{self._rest(logprobs)}'
        else:
            null = f'{role}"content":null,' if role else ""
            content = f'{{{null}"tool_calls":[{_call_delta(delta)}]}}{self._rest(logprobs)}'
        return f'{self._start}{{"index":{delta.index},"delta":{content}'


def _call_delta(delta: ToolCallStart | ToolCallDelta) -> str:
    if isinstance(delta, ToolCallDelta):
        return f'{{"index":{delta.number},"function":{{"arguments":{json.dumps(delta.text)}}}}}'
    name = json.dumps(delta.name)
    function = f'{{"name":{name},"arguments":""}}'
    return f'{{"index":{delta.number},"id":{json.dumps(delta.id)},"type":"function","function":{function}}}'


def joined(prompt: Sequence[TokenLogprob], answer: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Both in one sequence, without copying the first."""
    return _Joined(prompt, answer) if len(prompt) else answer


class _Joined(Sequence[TokenLogprob]):
    def __init__(self, first: Sequence[TokenLogprob], second: Sequence[TokenLogprob]) -> None:
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return chain(self._first, self._second)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]
