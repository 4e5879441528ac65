"""Answers read back: text, reasoning and tool calls, however they are cut up, cut off or malformed."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.dialect import call_runs
from cllm.dialect.call_runs import CallRuns
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta, ToolCallStart
from cllm.dialect.json_scan import JsonScanner, repaired
from cllm.dialect.reader import AnswerReader
from cllm.dialect.reasoning import FORMATS, Marks, ReasoningReader
from cllm.dialect.syntax import JsonSyntax, MistralSyntax
from cllm.dialect.whole_calls import WholeCalls
from cllm.dialect.xml_calls import XmlSyntax

TOOLS: Any = {"f": {"properties": {"a": {"type": "integer"}, "c": {}}}, "get_weather": None}
HERMES = JsonSyntax("<tool_call>", close=("</tool_call>",))
LLAMA3 = JsonSyntax("<|python_tag|>", bare=True)
MISTRAL = MistralSyntax()
PLAIN = JsonSyntax(bare=True)
XML_SYNTAX = XmlSyntax()
SYNTAXES: dict[str, JsonSyntax] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "json": PLAIN,
    "xml": XML_SYNTAX,
}
CALL = '{"name": "f", "arguments": {"a": 1}}'
XML = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
F = ("call", "f", '{"a": 1}')
FENCED = f"```json\n{CALL}\n```"
PRETTY = json.dumps(json.loads(CALL), indent=2)
PRETTY_F = ("call", "f", '{\n    "a": 1\n  }')
MARKED = ["hermes", "mistral", "xml"]
"""Formats whose calls stand behind markers."""

Read = list[tuple[str, ...]]


def reader(syntax: JsonSyntax | None, *, thinks: str = "", **options: Any) -> AnswerReader:
    marked = syntax in (HERMES, XML_SYNTAX)
    calls = CallRuns(Marks("<tool_call>", "</tool_call>"), syntax, TOOLS) if syntax and marked else None
    reasoning = ReasoningReader(FORMATS["think"], opened=thinks == "opened", calls=calls) if thinks else None
    ids = itertools.count()
    whole = None
    if isinstance(syntax, JsonSyntax) and not syntax.bare:
        bare_ids = itertools.count()
        whole = WholeCalls(AnswerReader(0, syntax=PLAIN, tools=TOOLS, new_id=lambda: f"call_{next(bare_ids)}"))
    return AnswerReader(
        0, syntax=syntax, tools=TOOLS, reasoning=reasoning, whole=whole, new_id=lambda: f"call_{next(ids)}", **options
    )


def joined(pieces: list[ChatDelta]) -> Read:
    """Pieces in their order, neighbours of one kind as one. Arguments follow only the call they belong to."""
    read: Read = []
    calls = 0
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            assert (piece.number, piece.id) == (calls, f"call_{calls}")
            calls += 1
            read.append(("call", piece.name, ""))
        elif isinstance(piece, ToolCallDelta):
            assert read[-1][0] == "call" and piece.number == calls - 1 and piece.text
            read[-1] = (*read[-1][:2], read[-1][2] + piece.text)
        else:
            assert isinstance(piece, Delta | ReasoningDelta) and piece.text
            kind = "text" if isinstance(piece, Delta) else "reasoning"
            if read and read[-1][0] == kind:
                read[-1] = (kind, read[-1][1] + piece.text)
            else:
                read.append((kind, piece.text))
    return read


def read_whole(text: str, syntax: JsonSyntax | None, **options: Any) -> tuple[Read, str]:
    one = reader(syntax, **options)
    return joined([*one.push(text), *one.finish()]), one.finish_reason("stop")


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [F]),
        (
            "hermes",
            f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
            [("text", "Let me see."), F, F],
        ),
        ("hermes", f"<tool_call>{CALL}", [F]),
        ("xml", f"Look.\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>{XML}", [("text", "Look."), F, F]),
        ("xml", f"<tool_call>{CALL}</tool_call> Done.", [F, ("text", "Done.")]),
        ("xml", "<tool_call><function=f></function></tool_call>", [("call", "f", "{}")]),
        (
            "xml",
            "<tool_call><function=g></function></tool_call>",
            [("text", "<tool_call><function=g></function></tool_call>")],
        ),
        ("xml", "<tool_call> <func", [("text", "<tool_call> <func")]),
        ("xml", f"Look.\n{XML}\n</tool_call>\n{XML}", [("text", "Look."), F, F]),
        ("xml", "Not <function=g>, <function", [("text", "Not <function=g>, <function")]),
        ("hermes", f"<tool_call>{CALL}</tool_c", [F]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\nDone. ", [F, ("text", "Done. ")]),
        ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", [F, F]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
            [F],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("call", "f", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {"}}</tool_call>',
            [("call", "f", '{"a": "</tool_call> {"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny\x01"}}</tool_call>',
            [("call", "f", '{"a": "x\\ny\\u0001"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": [{"b": {}}, -1.5e3, null]}}',
            [("call", "f", '{"a": [{"b": {}}, -1.5e3, null]}')],
        ),
        ("hermes", f"<tool_call><tool_call>{CALL}</tool_call>", [("text", "<tool_call>"), F]),
        ("hermes", "<tool_call> not json </tool_call>", [("text", "<tool_call> not json </tool_call>")]),
        (
            "hermes",
            '<tool_call>{"name": "unknown", "arguments": {}}',
            [("text", '<tool_call>{"name": "unknown", "arguments": {}}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arg', [("text", '<tool_call>{"name": "f", "arg')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}', [("text", '<tool_call>{"name": "f", "arguments": 5}')]),
        ("hermes", f"<tool_call>{{{CALL}}}</tool_call>", [F]),
        ("hermes", f"<tool_call>{{{CALL} \n}}</tool_call>\n<tool_call>{{{CALL}</tool_call>", [F, F]),
        ("hermes", "a < b <tool_", [("text", "a < b <tool_")]),
        ("hermes", " plain \n", [("text", " plain \n")]),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', [F]),
        ("llama3", f"<|python_tag|>{CALL}; {CALL}", [F, F]),
        ("llama3", f"Hm. <|python_tag|>{CALL}", [("text", "Hm."), F]),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [F]),
        ("llama3", "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
        ("llama3", '{"answer": 42}', [("text", '{"answer": 42}')]),
        ("llama3", '{"name": "f"}', [("text", '{"name": "f"}')]),
        ("llama3", f"Say: {CALL}", [("text", f"Say: {CALL}")]),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", [F, F]),
        ("mistral", f"[TOOL_CALLS] {CALL}", [F]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 1}', [F, F]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', [F]),
        ("mistral", '[TOOL_CALLS]g[ARGS]{"a": 1}', [("text", '[TOOL_CALLS]g[ARGS]{"a": 1}')]),
        ("mistral", "[TOOL_CALLS]I would rather not, [TOOL", [("text", "[TOOL_CALLS]I would rather not, [TOOL")]),
        ("json", f" {CALL}\n", [F]),
        ("json", f"```json\n[{CALL},\n{CALL}]\n```\nThere.", [F, F, ("text", "There.")]),
        ("json", "```json\n[1, 2]\n```", [("text", "```json\n[1, 2]\n```")]),
        ("json", "[a link](x)", [("text", "[a link](x)")]),
    ],
)
def test_formats(syntax: str, text: str, expected: Read) -> None:
    read, end = read_whole(text, SYNTAXES[syntax])
    assert read == expected
    assert end == ("tool_calls" if any(each[0] == "call" for each in expected) else "stop")


@pytest.mark.parametrize("syntax", MARKED)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [F]),
        (f"\n {CALL}\n\n", [F]),
        (FENCED, [F]),
        (f"```json\n{PRETTY}\n```", [PRETTY_F]),
        (f"```\n{CALL}```\n", [F]),
        (f"[{CALL}, {CALL}]", [F, F]),
        (f"```json\n[\n{CALL},\n{CALL}\n]\n```", [F, F]),
        (f"{CALL}\n{CALL}", [F, F]),
        (f"{FENCED}\n\n{FENCED}", [F, F]),
        (f"```json\n{CALL}", [F]),
        (f"{{{CALL}}}", [F]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [F]),
    ],
)
def test_nothing_but_calls_without_markers(syntax: str, text: str, expected: Read) -> None:
    assert read_whole(text, SYNTAXES[syntax]) == (expected, "tool_calls")
    thoughtful = f"<think>Hm</think>\n{text}"
    assert read_whole(thoughtful, SYNTAXES[syntax], thinks="yes")[0] == [("reasoning", "Hm"), *expected]


@pytest.mark.parametrize("syntax", MARKED)
@pytest.mark.parametrize(
    "text",
    [
        f"So: {CALL}",
        f"{CALL} So.",
        f"{FENCED}\n\nThis calls f.",
        f"Call it:\n{FENCED}",
        f"{FENCED}\n```python\nprint()\n```",
        f'{CALL}\n{{"name": "g", "arguments": {{}}}}',
        '{"name": "g", "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": {"a": 1}, "more": 2}x',
        '{"answer": 42}',
        '```json\n{"name": "f", "arguments": {"a": 1,}}\n```',
        '{"name": "f", "arguments": {"a": "b',
        '{{"name": "f", "arguments"',
        " ```json\n[1, 2]\n```\n",
        "```js",
        "",
    ],
)
def test_what_only_begins_like_a_call_is_text_as_it_stands(syntax: str, text: str) -> None:
    assert read_whole(text, SYNTAXES[syntax]) == ([("text", text)] if text else [], "stop")


def test_no_more_is_held_back_than_may_be_a_call() -> None:
    for text in ("Hello", "```python", '{"answer"', '{"name": "g"', f"{CALL}\nso"):
        one = reader(HERMES)
        assert joined(one.push(text)) == [("text", text)], text
    one = reader(HERMES)
    assert one.push(f"{CALL}\n") == []
    assert joined(one.finish()) == [F]


def test_one_call_of_several_without_markers_where_only_one_is_wanted() -> None:
    one = reader(HERMES, most_calls=1)
    assert joined([*one.push(f"[{CALL}, {CALL}]"), *one.finish()]) == [F]
    assert one.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}} <tool_call>', '{"a": 1,'),
        ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>text', '{"a": tru'),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}', "{"),
    ],
)
def test_arguments_that_are_cut_off_or_broken_end_the_answer(text: str, arguments: str) -> None:
    one = reader(HERMES)
    assert joined([*one.push(text), *one.finish()]) == [("call", "f", arguments)]
    assert (one.finish_reason("stop"), one.finish_reason("length")) == ("stop", "length")
    assert one.ended


@pytest.mark.parametrize(
    ("syntax", "text", "calls_only", "expected"),
    [
        ("json", CALL + '\n{"name": "f", "argu', False, [F]),
        ("json", '{"name": "ge', True, []),
        ("json", '{"name": "ge', False, [("text", '{"name": "ge')]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_c", False, [F]),
        ("hermes", '<tool_call>\n{"name": "', True, []),
        ("hermes", "<tool_c", True, []),
        ("hermes", f'<tool_call>{CALL}</tool_call>\nSo: <tool_call>{{"na', False,
         [F, ("text", 'So: <tool_call>{"na')]),
        ("mistral", f"[TOOL_CALLS][{CALL}, {{", False, [F]),
    ],
)  # fmt: skip
def test_the_beginning_of_a_call_that_is_cut_off(syntax: str, text: str, calls_only: bool, expected: Read) -> None:
    """Beside calls it is left out."""
    one = reader(SYNTAXES[syntax], calls_only=calls_only)
    assert joined([*one.push(text), *one.finish()]) == expected
    assert one.finish_reason("length") == "length"


def test_one_call_where_only_one_is_wanted() -> None:
    one = reader(HERMES, most_calls=1)
    assert joined(one.push(f"<tool_call>{CALL}</tool_call>more<tool_call>{CALL}")) == [F]
    assert one.ended
    assert (one.push("x"), one.finish(), one.finish_reason("stop")) == ([], [], "tool_calls")


@pytest.mark.parametrize(
    ("thinks", "text", "expected"),
    [
        ("yes", "<think>\nHm.\n</think>\n\nYes. ", [("reasoning", "Hm."), ("text", "Yes. ")]),
        ("yes", "\n<think>Hm", [("reasoning", "Hm")]),
        ("yes", "No <think>Hm</think>", [("text", "No <think>Hm</think>")]),
        ("yes", "<think>a</think> b </think>", [("reasoning", "a"), ("text", "b </think>")]),
        ("yes", "<thi", [("text", "<thi")]),
        ("yes", "<think>\n\n</think>\n\nYes", [("text", "Yes")]),
        ("opened", "\nHm </b> \n</think>\nYes", [("reasoning", "Hm </b>"), ("text", "Yes")]),
        ("opened", f"<tool_call>{CALL}</think><tool_call>{CALL}", [("reasoning", f"<tool_call>{CALL}"), F]),
        ("opened", "<think>\nHm</think>Yes", [("reasoning", "Hm"), ("text", "Yes")]),
        ("opened", "<thi", [("reasoning", "<thi")]),
        ("opened", f"Hm.\n<tool_call>{CALL}</tool_call>\n", [("reasoning", "Hm."), F]),
        ("yes", f"<think>A <tool_call>. <tool_call>{CALL}</tool_call>", [("reasoning", "A <tool_call>."), F]),
        ("opened", f"Hm <tool_call>{CALL}</tool_call> or", [("reasoning", f"Hm <tool_call>{CALL}</tool_call> or")]),
        ("opened", f"Hm <tool_call>{CALL}", [("reasoning", f"Hm <tool_call>{CALL}")]),
    ],
)
def test_reasoning(thinks: str, text: str, expected: Read) -> None:
    assert read_whole(text, HERMES, thinks=thinks)[0] == expected


def test_reasoning_that_is_not_told_apart_is_text() -> None:
    reasoning = ReasoningReader(FORMATS["think"], opened=False, separate=False)
    one = AnswerReader(0, reasoning=reasoning, syntax=HERMES, tools=TOOLS, new_id=lambda: "call_0")
    text = f" <think>\n<tool_call>{CALL}\n</think>\n\n"
    assert joined([*one.push(f"{text}<tool_call>{CALL}"), *one.finish()]) == [("text", text.rstrip()), F]


def test_a_mark_in_the_prompt_is_part_of_reasoning_that_is_not_told_apart() -> None:
    for continues, begin in ((False, "<think>"), (True, "")):
        marks = FORMATS["think"]
        reasoning = ReasoningReader(marks, opened=True, continues=continues, separate=False)
        assert reasoning.push("Hm</think>\nYes") == [
            *([(True, begin)] if begin else []),
            (True, "Hm</think>"),
            (False, "\nYes"),
        ]


def test_reasoning_that_cannot_be_a_call_is_not_held_back() -> None:
    one = reader(HERMES, thinks="opened")
    assert joined(one.push("I may use <tool_call> or")) == [("reasoning", "I may use <tool_call> or")]


ATOMS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<think>",
        "</think>",
        "```json",
        "```",
    ),
    *("<function=f>", "<parameter=a>", "<parameter=b>", "</parameter>", "</function>", "["),
    *(
        CALL,
        '{"name": "f", "arguments": {',
        '"name": "f"',
        '"arguments": ',
        '{"a": "',
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
    ),
    *(f"<tool_call>{CALL}</tool_call>", f"<tool_call>{XML}</tool_call>", '<tool_call>{"name": "..."}</tool_call>, or'),
    *(" ", "\n", "f", "x", "tru", "true", "1", "-", "\\", "\\u00e9", "é", "<", "`", ";"),
]
TEXTS = st.lists(st.sampled_from(ATOMS), max_size=12).map("".join)


@given(
    text=TEXTS,
    cuts=st.sets(st.integers(0, 120), max_size=20),
    thinks=st.sampled_from(["", "yes", "opened"]),
    most_held=st.sampled_from([30, 80, call_runs.MOST_HELD]),
)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_how_the_text_is_cut_up_changes_nothing(
    syntax: str, text: str, cuts: set[int], thinks: str, most_held: int
) -> None:
    pieces: list[ChatDelta] = []
    with mock.patch.object(call_runs, "MOST_HELD", most_held):
        one = reader(SYNTAXES[syntax], thinks=thinks)
        for start, stop in itertools.pairwise([0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]):
            pieces += one.push(text[start:stop])
        pieces += one.finish()
        assert joined(pieces) == read_whole(text, SYNTAXES[syntax], thinks=thinks)[0]


@given(text=TEXTS.filter(lambda text: "</think>" not in text))
@pytest.mark.parametrize("syntax", ["hermes", "xml"])
def test_reasoning_that_is_not_closed_is_never_text(syntax: str, text: str) -> None:
    """But for what stands between a call and its mark, as a bracket too many."""
    read, _ = read_whole(text, SYNTAXES[syntax], thinks="opened")
    assert all(re.fullmatch(r"([\]},;\s]|</tool_call>)*", each[1]) for each in read if each[0] == "text")


BLANKS = st.text(st.sampled_from(" \n"), max_size=3)
WRAPPINGS = ["{}", "```json\n{}\n```", "```\n{}```", "[{}]", "```json\n[\n{}\n]\n```"]


@given(
    calls=st.lists(st.sampled_from([CALL, PRETTY, f"{{{CALL}}}"]), min_size=1, max_size=3),
    between=st.sampled_from([", ", ",\n", "\n"]),
    wrapping=st.sampled_from(WRAPPINGS),
    around=st.tuples(BLANKS, BLANKS),
    more=st.sampled_from([("", ""), ("", ""), ("So: ", ""), ("", "x"), ("", " Done."), ("Hm.\n", "\nDone.")]),
    cuts=st.sets(st.integers(0, 160), max_size=20),
)
@pytest.mark.parametrize("syntax", MARKED)
def test_calls_without_markers_are_calls_if_nothing_else_is_there(
    syntax: str,
    calls: list[str],
    between: str,
    wrapping: str,
    around: tuple[str, str],
    more: tuple[str, str],
    cuts: set[int],
) -> None:
    text = more[0] + around[0] + wrapping.format(between.join(calls)) + around[1] + more[1]
    one = reader(SYNTAXES[syntax])
    pieces: list[ChatDelta] = []
    for start, stop in itertools.pairwise([0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]):
        pieces += one.push(text[start:stop])
    read = joined([*pieces, *one.finish()])
    expected = [("text", text)] if any(more) else [PRETTY_F if call == PRETTY else F for call in calls]
    assert read == expected


@given(text=TEXTS)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_whatever_comes_is_text_or_calls(syntax: str, text: str) -> None:
    one = reader(SYNTAXES[syntax])
    read = joined([*one.push(text), *one.finish()])
    calls = [each for each in read if each[0] == "call"]
    if not calls:
        assert "".join(each[1] for each in read) == text
    whole = one.finish_reason("stop") == "tool_calls"
    for number, (_, name, arguments) in enumerate(calls, 1):
        assert name in TOOLS
        if whole or number < len(calls):
            assert isinstance(json.loads(arguments), dict)
        else:
            scanner = JsonScanner()
            assert all(map(scanner.feed, arguments)) and not scanner.done


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_the_scanner_takes_all_json(value: Any, indent: int | None, escaped: bool) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=escaped)
    scanner = JsonScanner()
    assert all(map(scanner.feed, text)) and scanner.done and not scanner.feed("x")


@given(st.text(st.sampled_from('{}[]",:\\truefalsn0123.eE+-u\n '), max_size=16))
def test_the_scanner_takes_nothing_else(text: str) -> None:
    text = "[" + text
    scanner = JsonScanner()
    clean = ""
    for char in text:
        was_string = scanner.in_string
        if not scanner.feed(char):
            break
        clean += repaired(char) if was_string else char
        if scanner.done:
            json.loads(clean)
            break
    else:
        with pytest.raises(ValueError, match=r"."):
            json.loads(clean)


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("text", '\nsay "é"\n\tx\n', 'say "é"\n\tx'),
        ("text", "\n\n a </para <b>\n\n", "\n a </para <b>\n"),
        ("text", "5", "5"),
        ("unknown", "5", "5"),
        ("count", "\n5\n", 5),
        ("count", "many", "many"),
        ("count", "5.5", "5.5"),
        ("on", "True", True),
        ("on", "false", False),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("list", '["</parameter>", "a\nb"]', ["</parameter>", "a\nb"]),
        ("list", '["</parameter>', None),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "NaN", "NaN"),
        ("any", "a b", "a b"),
        ("float", "3.5", 3.5),
    ],
)
def test_values_between_tags(key: str, written: str, read: Any) -> None:
    properties = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array"},
        "any": {},
        "float": {"type": "float"},
    }
    text = f"<tool_call><function=f><parameter={key}>{written}</parameter></function></tool_call>"
    one = AnswerReader(0, syntax=XmlSyntax(), tools={"f": {"properties": properties}}, new_id=lambda: "call_0")
    ((_, name, arguments),) = joined([*one.push(text), *one.finish()])
    if one.finish_reason("stop") == "tool_calls":
        assert (name, json.loads(arguments)) == ("f", {key: read})
    else:
        assert (key, written) == ("list", '["</parameter>'), "what is cut off within a string of JSON is not whole"


@pytest.mark.parametrize("rest", ["", "\n<parameter=b>x", "\n<parameter", "\nx</function>"])
def test_tagged_calls_that_are_not_whole(rest: str) -> None:
    read, reason = read_whole(f"<tool_call><function=f><parameter=a>1</parameter>{rest}", SYNTAXES["xml"])
    assert (read[0][1], reason) == ("f", "stop")
    assert read[0][2] in ('{"a": 1', '{"a": 1, "b": "x')
