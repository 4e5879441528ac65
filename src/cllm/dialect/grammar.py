"""Grammars of answers with tool calls, in llguidance's Lark dialect: what they allow is read as calls for certain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cllm.dialect.reasoning import Marks, Thinking
from cllm.dialect.xml_calls import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, TEXT, plain_arguments, types_of
from cllm.errors import InvalidRequestError
from cllm.structured.sources import RULES, pattern_of, rule_of, schema_rule
from cllm.structured.structure import Structure

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"/(.|\n)*/"
_BLANK = r"BLANK: /[ \n]{1,4}/"
"""Not more: where blanks are free, small models write them until the answer is full."""
_TAGGED = ("hermes", "qwen3_coder")
"""Formats with calls between <tool_call> and </tool_call>."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may consist of."""

    tools: Sequence[tuple[str, Mapping[str, Any] | None]]
    """Names and schemas of the tools that may be called."""
    required: bool = False
    """Whether it must be a call."""
    several: bool = True
    """Whether it may be several."""
    structure: Structure | None = None
    """What its text must look like."""
    marks: Marks | None = None
    thinking: Thinking = "none"


class AnswerGrammar:
    def __init__(self, tool_format: str, named: Mapping[str, int], mistral_marks: Sequence[str] = ()) -> None:
        """`named`: tokens that stand for a text as a whole; a mark among them is written in no other way.
        `mistral_marks`: those of Mistral's newer formats that the template writes within a call, [CALL_ID] and
        [ARGS]."""
        self._format = tool_format
        self._named = named
        self._calls_by_id = "[CALL_ID]" in mistral_marks
        self._named_arguments = "[ARGS]" in mistral_marks

    def write(self, form: AnswerForm) -> str:
        """The grammar's text."""
        rules: list[str] = []
        body = self._body(form, rules)
        thought = self._thought(form, rules)
        return "\n".join([f"start: {thought}{body}", *rules, ""])

    def _body(self, form: AnswerForm, rules: list[str]) -> str:
        if form.structure is not None:
            rules.append(f"answer: {_text_rule(form.structure)}")
        if not form.tools:
            assert form.structure is not None
            return "answer"
        for number, (name, schema) in enumerate(form.tools):
            if self._format == "qwen3_coder" and (arguments := plain_arguments(schema)) is not None:
                rules += self._xml_call(name, number, arguments)
                continue
            rules.append(f"call_{number}: {self._call(name, number)}")
            rules.append(f"args_{number}: {schema_rule(schema or _NOTHING)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(form.tools))))
        rules += [f"calls: {self._calls(several=form.several)}", _BLANK]
        if form.required:
            return "calls"
        return "(calls | answer)" if form.structure is not None else self._free(form, rules)

    def _call(self, name: str, number: int) -> str:
        if self._format == "mistral" and self._named_arguments:
            call_id = f"{self._mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if self._calls_by_id else ""
            return f"{json.dumps(name)} {call_id}{self._mark('[ARGS]')} args_{number}"
        arguments = "parameters" if self._format == "llama3" else "arguments"
        begin = f'{{"name": {json.dumps(name)}, "{arguments}": '
        if self._format not in _TAGGED:
            return f'{json.dumps(begin)} args_{number} "}}"'
        head = json.dumps(f"\n{begin}")
        return f'{head} args_{number} "}}\\n" {self._mark("</tool_call>")}'

    def _xml_call(self, name: str, number: int, arguments: Sequence[tuple[str, Any, bool]]) -> Iterator[str]:
        parts = []
        for place, (key, schema, required) in enumerate(arguments):
            value = f"value_{number}_{place}"
            choices = [schema["const"]] if "const" in schema else schema.get("enum")
            end = json.dumps(f"\n{END_PARAMETER}\n")
            if types_of(schema) != TEXT:
                yield f"{value}: {schema_rule(schema)} {end}"
            elif choices is not None:
                yield f"{value}: ({rule_of(Structure('choice', json.dumps(choices)))}) {end}"
            else:
                yield f"{value}_text[lazy]: /(.|\\n)*/ {json.dumps(END_PARAMETER)}"
                yield f'{value}: {value}_text "\\n"'
            begin = json.dumps(f"{PARAMETER}{key}>\n")
            parts.append(f"({begin} {value}){'' if required else '?'}")
        head, tail = json.dumps(f"\n{FUNCTION}{name}>\n"), json.dumps(f"{END_FUNCTION}\n")
        yield f"call_{number}: {head} {' '.join(parts)} {tail} {self._mark('</tool_call>')}"

    def _calls(self, *, several: bool) -> str:
        """With all markers. Blanks may follow the last call: models write them, in one token with the call's end or
        with what separates two calls, and must be able to stop after them."""
        if self._format in _TAGGED:
            opened = f"{self._mark('<tool_call>')} call"
            return f"{opened} (BLANK? {opened})* BLANK?" if several else f"{opened} BLANK?"
        if self._format == "mistral":
            mark = self._mark("[TOOL_CALLS]")
            if self._named_arguments:
                return f"({mark} call)+ BLANK?" if several else f"{mark} call BLANK?"
            return f'{mark} "[" call (", " call)* "]" BLANK?' if several else f'{mark} "[" call "]" BLANK?'
        separator = '"; "' if self._format == "llama3" else "BLANK"
        return f"call ({separator} call)* BLANK?" if several else "call BLANK?"

    def _free(self, form: AnswerForm, rules: list[str]) -> str:
        """Text, in which a call may begin."""
        opener = {**dict.fromkeys(_TAGGED, "<tool_call>"), "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}.get(
            self._format, ""
        )
        if self._format in ("llama3", "json"):
            without = _without(opener) if opener else ""
            rules.append(rf"TEXT: /([^{{\[`\s<](.|\n)*)?/{without}")
            tagged = f" | {self._mark(opener)} calls" if opener in self._named else ""
            return f"(TEXT | calls{tagged})"
        # Models sometimes leave out the opener, and are read as if it were there.
        bare = _without(FUNCTION) if self._format == "qwen3_coder" else ""
        after = self._after_opener(form)
        if opener in self._named:
            rules.append(f"TEXT: {_ANYTHING}{_without(opener)}{bare}")
            rules.append(f"called: TEXT {self._mark(opener)} {after}")
        else:
            rules.append(f"TEXT: {_ANYTHING}{bare}")
            rules.append(f"head[lazy]: TEXT {json.dumps(opener)}")
            rules.append(f"called: head {after}")
        return "(called* TEXT)" if form.several else "(called BLANK? | TEXT)"

    def _after_opener(self, form: AnswerForm) -> str:
        if self._format in _TAGGED or self._named_arguments:
            return "call"
        return '"[" call (", " call)* "]"' if form.several else '"[" call "]"'

    def _thought(self, form: AnswerForm, rules: list[str]) -> str:
        if form.marks is None or form.thinking == "closed":
            return ""
        begin, end = form.marks
        if end in self._named:
            rules.append(f"THOUGHT: {_ANYTHING}{_without(end)}")
            rules.append(f"thought: THOUGHT {self._mark(end)} /\\s*/")
        else:
            rules.append(f"thinks[lazy]: {_ANYTHING} {json.dumps(end)}")
            rules.append("thought: thinks /\\s*/")
        return "thought " if form.thinking == "opened" else f"({self._mark(begin)} thought)? "

    def _mark(self, text: str) -> str:
        token = self._named.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _without(text: str) -> str:
    """What is behind a regular expression whose matches do not contain the text."""
    return f" & ~/(.|\\n)*{pattern_of(text)}(.|\\n)*/"


def _text_rule(structure: Structure) -> str:
    if structure.kind not in RULES:
        raise InvalidRequestError(
            f"{structure.param} cannot be combined with tools; send tool_choice: none", structure.param
        )
    try:
        return rule_of(structure)
    except ValueError as error:
        raise InvalidRequestError(f"{structure.param}: {error}", structure.param) from None
