"""Grammars of tool calls: llguidance takes them, allows calls and nothing else, and what it allows is read as calls."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from cllm.dialect.deltas import Delta, ToolCallDelta, ToolCallStart
from cllm.dialect.formats import FORMATS
from cllm.dialect.grammar import AnswerForm, AnswerGrammar
from cllm.dialect.reader import AnswerReader
from cllm.dialect.reasoning import FORMATS as REASONING
from cllm.errors import InvalidRequestError
from cllm.structured.structure import Structure

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [("f", SCHEMA), ("g", {"type": "object"})]
CALLS = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"x": ["y"]}}]
THINK = REASONING["think"]
MARKERS = re.compile("|".join(map(re.escape, [*THINK, *(mark for each in FORMATS.values() for mark in each.markers)])))
ALL = sorted(FORMATS)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def allows(tokenizer: LLTokenizer, form: AnswerForm, text: str, tool_format: str, *, named: bool = False) -> bool:
    grammar = AnswerGrammar(tool_format, {}, ["[ARGS]"] if named else []).write(form)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return bool(
        matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


def written(tool_format: str, calls: list[dict[str, Any]], *, named: bool = False) -> str:
    if named:
        return "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in calls)
    if tool_format == "qwen3_coder":  # what does not name its arguments is demanded in JSON
        return "\n".join(FORMATS[tool_format if call["name"] == "f" else "hermes"].write([call]) for call in calls)
    return FORMATS[tool_format].write(calls)


def read(tool_format: str, text: str, tools: Any = None) -> list[tuple[str, Any]]:
    ids = itertools.count()
    reader = AnswerReader(
        0, syntax=FORMATS[tool_format].syntax, tools=tools or dict(TOOLS), new_id=lambda: str(next(ids))
    )
    calls: list[tuple[str, str]] = []
    for piece in [*reader.push(text), *reader.finish()]:
        assert not isinstance(piece, Delta)
        if isinstance(piece, ToolCallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, ToolCallDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("tool_format", "named"), [*((each, False) for each in ALL), ("mistral", True)])
def test_required_calls(tokenizer: LLTokenizer, tool_format: str, named: bool) -> None:
    form = AnswerForm(TOOLS, required=True)
    for calls in (CALLS[:1], CALLS[1:], CALLS):
        text = written(tool_format, calls, named=named)
        assert allows(tokenizer, form, text, tool_format, named=named)
        assert read(tool_format, text) == [(call["name"], call["arguments"]) for call in calls]
    for wrong in ("", "Hello", written(tool_format, CALLS[:1], named=named)[:-1]):
        assert not allows(tokenizer, form, wrong, tool_format, named=named)
    unfit = [{"name": "f", "arguments": {"a": "text"}}]
    assert not allows(tokenizer, form, written(tool_format, unfit, named=named), tool_format, named=named)
    unknown = [{"name": "h", "arguments": {}}]
    assert not allows(tokenizer, form, written(tool_format, unknown, named=named), tool_format, named=named)
    one = AnswerForm(TOOLS, required=True, several=False)
    assert allows(tokenizer, one, written(tool_format, CALLS[:1], named=named), tool_format, named=named)
    assert not allows(tokenizer, one, written(tool_format, CALLS, named=named), tool_format, named=named)


@pytest.mark.parametrize(("tool_format", "named"), [*((each, False) for each in ALL), ("mistral", True)])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_blanks_behind_a_call_demand_no_other(
    tokenizer: LLTokenizer, tool_format: str, named: bool, several: bool, required: bool
) -> None:
    """A token may hold the end of a call and a line break, which would be all of what separates two calls."""
    form = AnswerForm(TOOLS, required=required, several=several)
    for calls in (CALLS[:1], CALLS[1:], *([CALLS] if several else [])):
        text = written(tool_format, calls, named=named)
        for blanks in ("\n", "\n\n", " "):
            assert allows(tokenizer, form, text + blanks, tool_format, named=named)
            assert read(tool_format, text + blanks) == read(tool_format, text)
        assert not required or not allows(tokenizer, form, text + "\n" * 9, tool_format, named=named)


class Marked:
    """A vocabulary of bytes and of markers, which are text."""

    def __init__(self, markers: list[str]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(marker.encode() for marker in markers), b"<end>"]
        self.named = {marker: 256 + number for number, marker in enumerate(markers)}
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]


def with_tokens(text: str, named: dict[str, int]) -> list[int]:
    marks = "|".join(map(re.escape, named))
    return [
        token
        for part in re.split(f"({marks})", text)
        for token in ([named[part]] if part in named else list(part.encode()))
    ]


@pytest.mark.parametrize("tool_format", [each for each in ALL if FORMATS[each].markers])
@pytest.mark.parametrize("required", [True, False])
def test_a_marker_that_is_a_token_is_written_as_that_token(tool_format: str, required: bool) -> None:
    spelling = Marked([*FORMATS[tool_format].markers, *THINK])
    vocabulary = LLTokenizer(TokenizerWrapper(spelling), n_vocab=len(spelling.tokens), eos_token=spelling.eos_token_id)
    form = AnswerForm(TOOLS, required=required, marks=THINK)
    grammar = LLMatcher.grammar_from_lark(AnswerGrammar(tool_format, spelling.named).write(form))

    def fits(tokens: list[int]) -> bool:
        matcher = LLMatcher(vocabulary, grammar)
        return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)

    text = "<think>Hm</think>\n" + written(tool_format, CALLS)
    assert MARKERS.search(text) and fits(with_tokens(text, spelling.named))
    for marker in set(spelling.named) & set(MARKERS.findall(text)) - (set() if required else {*THINK}):
        others = {name: token for name, token in spelling.named.items() if name != marker}
        assert not fits(with_tokens(text, others)), marker


@pytest.mark.parametrize(("tool_format", "named"), [*((each, False) for each in ALL), ("mistral", True)])
@pytest.mark.parametrize("several", [True, False])
def test_text_or_calls_that_fit(tokenizer: LLTokenizer, tool_format: str, named: bool, several: bool) -> None:
    form = AnswerForm(TOOLS, several=several)
    call = written(tool_format, CALLS[:1], named=named)
    assert allows(tokenizer, form, "Hello, {you} <b>\nthere.", tool_format, named=named)
    assert allows(tokenizer, form, call, tool_format, named=named)
    unfit = written(tool_format, [{"name": "f", "arguments": {"a": "text"}}], named=named)
    assert not allows(tokenizer, form, unfit, tool_format, named=named)
    if tool_format in ("hermes", "qwen3_coder", "mistral"):
        assert allows(tokenizer, form, f"Well. {call}", tool_format, named=named)
        assert not allows(tokenizer, form, f"Well. {unfit}", tool_format, named=named)
        assert allows(tokenizer, form, f"{call}{call}", tool_format, named=named) == several


def test_tools_without_arguments_get_none(tokenizer: LLTokenizer) -> None:
    form = AnswerForm([("g", None)], required=True)
    assert allows(tokenizer, form, '{"name": "g", "arguments": {}}', "json")
    assert not allows(tokenizer, form, '{"name": "g", "arguments": {"x": 1}}', "json")
    text = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    assert allows(tokenizer, form, text, "qwen3_coder")
    assert read("qwen3_coder", text, {"g": None}) == [("g", {})]


def test_a_call_without_its_marker_fits_as_well(tokenizer: LLTokenizer) -> None:
    """It is read as a call, so it is not text."""
    call = written("qwen3_coder", CALLS[:1]).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert read("qwen3_coder", call) == [("f", {"a": 1})]
    assert not allows(tokenizer, AnswerForm(TOOLS), f"Well. {call}", "qwen3_coder")


def test_mistral_calls_with_ids(tokenizer: LLTokenizer) -> None:
    grammar = AnswerGrammar("mistral", {}, ["[CALL_ID]", "[ARGS]"]).write(AnswerForm(TOOLS, required=True))
    for call_id, fits in (("abcDEF123", True), ("abc", False)):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
        text = f'[TOOL_CALLS]f[CALL_ID]{call_id}[ARGS]{{"a": 1}}'
        assert bool(matcher.consume_tokens(tokenizer.tokenize_bytes(text.encode()))) == fits
        assert read("mistral", text) == [("f", {"a": 1})]


@pytest.mark.parametrize("tool_format", ALL)
def test_special_tokens_are_named_by_their_numbers(tokenizer: LLTokenizer, tool_format: str) -> None:
    special = {name: 200 + number for number, name in enumerate(FORMATS[tool_format].markers)}
    for form in (AnswerForm(TOOLS, required=True), AnswerForm(TOOLS), AnswerForm(TOOLS, marks=THINK)):
        grammar = AnswerGrammar(tool_format, special).write(form)
        assert not LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar)).is_error()
        assert all(json.dumps(name) not in grammar for name in special)


def test_reasoning_may_go_before(tokenizer: LLTokenizer) -> None:
    call = written("hermes", CALLS[:1])
    for thinking, before, fits in (
        ("none", "<think>\nHm {</think>\n\n", True),
        ("none", "", True),
        ("none", "Hm</think>", False),
        ("opened", "Hm <tool_call></think>\n", True),
        ("opened", "", False),
        ("closed", "", True),
        ("closed", "<think>Hm</think>", False),
    ):
        form = AnswerForm(TOOLS, required=True, marks=THINK, thinking=thinking)  # type: ignore[arg-type]
        assert allows(tokenizer, form, before + call, "hermes") == fits, (thinking, before)


@pytest.mark.parametrize(
    ("structure", "right", "wrong"),
    [
        (Structure("json", ""), '{"x": 1}', "[1]"),
        (Structure("json_schema", json.dumps(SCHEMA)), '{"a": 5}', '{"a": "b"}'),
        (Structure("json_schema", "true"), '"x"', "x"),
        (Structure("regex", "a/[0-9]+"), "a/12", "a/"),
        (Structure("regex", r"a\/\d+"), "a/12", "a/\u0663"),
        (Structure("choice", '["yes", "no"]'), "no", "maybe"),
    ],
)
def test_text_of_a_given_form_beside_calls_and_reasoning(
    tokenizer: LLTokenizer, structure: Structure, right: str, wrong: str
) -> None:
    form = AnswerForm(TOOLS, structure=structure)
    assert allows(tokenizer, form, right, "hermes")
    assert allows(tokenizer, form, written("hermes", CALLS), "hermes")
    assert not allows(tokenizer, form, wrong, "hermes")
    alone = AnswerForm((), structure=structure, marks=THINK)
    assert allows(tokenizer, alone, f"<think>x</think>\n{right}", "json")
    assert not allows(tokenizer, alone, f"<think>x</think>\n{wrong}", "json")


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (Structure("json_schema", "{no", "guided_json"), "is not JSON"),
        (Structure("json_schema", "[" * 100_000, "guided_json"), "nested too deeply"),
        (Structure("json_schema", "false", "guided_json"), "allows no answer"),
        (Structure("json_schema", "[1]", "guided_json"), "must be an object"),
        (Structure("choice", "[]", "guided_choice"), "list of strings"),
    ],
)
def test_a_structure_that_is_none_is_refused_by_name(structure: Structure, said: str) -> None:
    for form in (AnswerForm(TOOLS, structure=structure), AnswerForm((), structure=structure, marks=THINK)):
        with pytest.raises(InvalidRequestError, match=said) as caught:
            AnswerGrammar("json", {}).write(form)
        assert caught.value.param == structure.param


def test_a_grammar_of_ones_own_cannot_stand_beside_tools() -> None:
    form = AnswerForm(TOOLS, structure=Structure("lark", 'start: "x"', "guided_grammar"))
    with pytest.raises(InvalidRequestError, match="tools") as caught:
        AnswerGrammar("json", {}).write(form)
    assert caught.value.param == "guided_grammar"


CODED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "count": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["é", 'a "b"']},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "maybe": {"type": ["boolean", "null"]},
    },
    "required": ["text"],
    "$defs": {"item": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"text": "x"}, True),
        ({"text": "\n\n a <b>\n</parameter \n"}, True),
        ({"text": "", "count": 5, "kind": 'a "b"', "list": ["</parameter>", "\n"], "maybe": None}, True),
        ({"text": "5", "kind": "é", "maybe": True}, True),
        ({"count": 5}, False),
        ({"text": "", "count": -1}, False),
        ({"text": "", "count": "many"}, False),
        ({"text": "", "kind": "b"}, False),
        ({"text": "", "maybe": "x"}, False),
        ({"text": "", "other": "x"}, False),
    ],
)
def test_tagged_arguments_fit_and_come_back(tokenizer: LLTokenizer, arguments: dict[str, Any], fits: bool) -> None:
    text = written("qwen3_coder", [{"name": "f", "arguments": arguments}])
    assert allows(tokenizer, AnswerForm([("f", CODED)], required=True), text, "qwen3_coder") == fits
    if fits:
        assert read("qwen3_coder", text, {"f": CODED}) == [("f", arguments)]


@pytest.mark.parametrize(
    "more",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
        {"properties": {"a": {"enum": []}}},
        {"properties": {"a": True}},
        {"properties": {"a b>": {"type": "integer"}}},
        {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "required": ["b"]},
        {"properties": {}, "minProperties": 1},
        {},
    ],
)
def test_what_tags_cannot_guarantee_is_json(more: dict[str, Any]) -> None:
    grammar = AnswerGrammar("qwen3_coder", {}).write(AnswerForm([("f", {"type": "object", **more})], required=True))
    assert "<function=" not in grammar and "args_0: %json" in grammar
