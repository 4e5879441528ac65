"""Calls in reasoning that is not closed: only those that end the answer are calls, and nothing else waits for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, SupportsIndex

import pytest

from cllm.dialect import call_runs
from cllm.dialect.call_runs import CallRuns
from cllm.dialect.calls import CallReader
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta
from cllm.dialect.formats import HERMES, QWEN3_CODER, ToolFormat
from cllm.dialect.reader import AnswerReader
from cllm.dialect.reasoning import FORMATS, ReasoningReader
from cllm.dialect.xml_calls import XmlAttempt

TOOLS: Any = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ARGUMENTS = '{"a": "1"}'
MENTION = 'The form is <tool_call>{"name": "..."}</tool_call>, I must be careful with the secret plan. So:'
BEGUN = '<tool_call>{"name": "f", "arguments": {"a": "'
FORMAT = {"hermes": HERMES, "xml": QWEN3_CODER}


def thoughts(form: ToolFormat) -> ReasoningReader:
    assert form.call_marks is not None
    runs = CallRuns(form.call_marks, form.syntax, TOOLS)
    return ReasoningReader(FORMATS["think"], opened=True, calls=runs)


def reader(form: ToolFormat) -> AnswerReader:
    return AnswerReader(0, reasoning=thoughts(form), syntax=form.syntax, tools=TOOLS)


def read(form: ToolFormat, *texts: str) -> tuple[str, list[str], str]:
    """(reasoning, arguments of the calls, text)"""
    one = reader(form)
    deltas: list[ChatDelta] = [delta for text in texts for delta in one.push(text)] + one.finish()
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            arguments[delta.number] = arguments.get(delta.number, "") + delta.text
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return reasoning, [*arguments.values()], "".join(delta.text for delta in deltas if isinstance(delta, Delta))


@pytest.mark.parametrize(
    ("form", "thought", "calls", "expected"),
    [
        ("hermes", MENTION, CALL, [ARGUMENTS]),
        ("hermes", f"Perhaps {CALL}? No.", f"{CALL}\n{CALL}\n", [ARGUMENTS] * 2),
        ("hermes", f"Perhaps {CALL}\n{CALL}, or", CALL, [ARGUMENTS]),
        ("hermes", f"{CALL}{MENTION}", "", []),
        ("hermes", f"Like {CALL}<", CALL, [ARGUMENTS]),
        ("hermes", f"Like {CALL}<tool_", CALL, [ARGUMENTS]),
        ("hermes", f"Perhaps\n{CALL}\n<tool_c", "", []),
        ("hermes", f"Perhaps {CALL}\n{BEGUN}", "", []),
        ("hermes", 'Like <tool_call>{"name": "don\'t know. So:', CALL, [ARGUMENTS]),
        ("hermes", "I write <tool_call><tool_call>, that is", CALL, [ARGUMENTS]),
        ("hermes", "I write <tool_call></tool_call>", "", []),
        ("hermes", 'An unknown tool: <tool_call>{"name": "g", "arguments": {}}</tool_call>', "", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', "", []),
        (
            "hermes",
            "Marks within a string are part of it.",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>, <tool_call>{"}}</tool_call>',
            ['{"a": "</tool_call>, <tool_call>{"}'],
        ),
        (
            "hermes",
            "Several calls between one pair of marks.",
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]</tool_call>',
            ["{}"] * 2,
        ),
        ("hermes", "A bracket is missing.", '<tool_call>{"name": "f", "arguments": {}</tool_call>', ["{}"]),
        ("xml", f"Like {XML}, but", XML, [ARGUMENTS]),
        ("xml", "Like <tool_call><function=name>. Or <tool_call><function=, or", f"{XML}\n{XML}", [ARGUMENTS] * 2),
        ("xml", f"{XML} or rather {CALL} and", CALL, [ARGUMENTS]),
        (
            "xml",
            "Marks within a value are part of it.",
            XML.replace("\n1\n", "<tool_call>, </tool_call>."),
            ['{"a": "<tool_call>, </tool_call>."}'],
        ),
    ],
)
def test_only_calls_that_end_the_answer_are_calls(form: str, thought: str, calls: str, expected: list[str]) -> None:
    text = f"{thought}\n{calls}" if calls else thought
    whole = read(FORMAT[form], text)
    assert whole == (thought, expected, "")
    for cut in range(1, len(text)):
        assert read(FORMAT[form], text[:cut], text[cut:]) == whole, text[:cut]
    assert read(FORMAT[form], *text) == whole


def test_a_bracket_too_many_does_not_lose_the_call() -> None:
    reasoning, arguments, _ = read(HERMES, f"Hm. {CALL.replace('}</', '}}</')}")
    assert (reasoning, arguments) == ("Hm.", [ARGUMENTS])


@pytest.mark.parametrize(
    "begun",
    [
        "<tool_call>{",
        "<tool_call>{…}",
        '<tool_call>{"name": "f", "arguments": {',
        '<tool_call>{"name": "g", ',
        CALL.removesuffix("</tool_call>"),
        CALL,
        f"{CALL}\n<tool_call>",
    ],
)
def test_reasoning_goes_on_after_the_beginning_of_a_call(begun: str) -> None:
    one = reader(HERMES)
    assert one.push(f"As {begun} as") + one.push(" before") == [
        ReasoningDelta(0, f"As {begun} as"),
        ReasoningDelta(0, " before"),
    ]


def test_a_call_that_is_too_long_is_let_go_of() -> None:
    one = thoughts(HERMES)
    assert one.push(BEGUN + "x" * (call_runs.MOST_HELD - len(BEGUN))) == []
    assert one.push("x") == [(True, BEGUN + "x" * (call_runs.MOST_HELD - len(BEGUN) + 1))]
    assert one.push("x") == [(True, "x")]
    assert one.push(f" {CALL}") == []
    assert one.flush() == [(False, CALL)]


def test_where_a_call_becomes_too_long_does_not_depend_on_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_runs, "MOST_HELD", len(CALL) + 5)
    for first in (f"{CALL}   ", f"{CALL}    ", CALL, f"{CALL}\n<tool", f"{BEGUN}{'x' * 9}<tool_call>"):
        text = f"{first}\n{CALL}"
        whole = read(HERMES, text)
        assert whole == (first.rstrip(), [ARGUMENTS], "")
        for cut in range(1, len(text)):
            assert read(HERMES, text[:cut], text[cut:]) == whole, text[:cut]
    assert read(HERMES, f"{CALL}      ") == (CALL, [], "")


@pytest.mark.parametrize("form", FORMAT)
def test_a_long_call_is_a_call(form: str) -> None:
    value = "a long value, " * (65536 // 14)
    call = FORMAT[form].write([{"name": "f", "arguments": {"a": value}}])
    reasoning, (arguments,), text = read(FORMAT[form], f"{MENTION}\n{call}")
    assert (reasoning, json.loads(arguments), text) == (MENTION, {"a": value}, "")


class Counted(str):
    """Counts the characters that are searched or copied, in what is made of it, too."""

    __slots__ = ()
    touched = 0

    @classmethod
    def made(cls, text: str) -> Counted:
        cls.touched += len(text)
        return cls(text)

    def __add__(self, other: str) -> Counted:
        return self.made(str(self).__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self.made(other.__add__(str(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> Counted:
        return self.made(super().__getitem__(key))

    def lstrip(self, chars: str | None = None, /) -> Counted:
        return self.made(super().lstrip(chars))

    def rstrip(self, chars: str | None = None, /) -> Counted:
        return self.made(super().rstrip(chars))

    def find(self, *given: Any) -> int:
        found = super().find(*given)
        start = given[1] if len(given) > 1 else 0
        Counted.touched += (len(self) if found < 0 else found) - start
        return found


LONG_THOUGHTS = {
    "a call without end": BEGUN + "x" * 6000,
    "blanks before the mark": " " * 6000,
    "blanks": f"Hm{' ' * 6000}",
    "blanks after a call": CALL + " " * 6000,
    "blanks after the mark": f"Hm</think>{' ' * 6000}",
    "beginnings": "<tool_call>{" * 500,
    "marks": "<tool_call>" * 500,
    "calls": CALL * 100,
    "calls and words": f"{CALL} or " * 100,
}


@pytest.mark.parametrize("cut", [tuple, lambda text: (text,)], ids=["in characters", "in one"])
@pytest.mark.parametrize("name", LONG_THOUGHTS)
def test_the_work_is_proportional_to_the_text(
    name: str, cut: Callable[[str], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far below what it would be if all that is held were read again for each character, about 3000 times its size."""
    monkeypatch.setattr(Counted, "touched", 0)
    one, text = thoughts(HERMES), LONG_THOUGHTS[name]
    for piece in cut(text):
        one.push(Counted(piece))
    assert 0 < Counted.touched < 40 * len(text)


@pytest.mark.parametrize(
    ("form", "attempt", "text"),
    [
        ("hermes", CallReader, f"{CALL}, " * 100),
        ("hermes", CallReader, (CALL * 20 + "x") * 5),
        ("hermes", CallReader, f"{BEGUN}{BEGUN[:-1]}" * 100),
        ("xml", XmlAttempt, ("<tool_call><function=f><parameter=a>" * 100 + "</parameter>x") * 3),
    ],
)
def test_every_character_is_read_at_most_twice(
    form: str, attempt: type[CallReader | XmlAttempt], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = 0
    feed = attempt.feed

    def counting(self: Any, char: str) -> Any:
        nonlocal fed
        fed += 1
        return feed(self, char)

    monkeypatch.setattr(attempt, "feed", counting)
    one = thoughts(FORMAT[form])
    one.push(text)
    assert 0 < fed <= 2 * len(text)
