"""The formats of tool calls: detecting the one of a chat template, writing calls in it, and reading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cllm.dialect.reasoning import Marks
from cllm.dialect.syntax import JsonSyntax, MistralSyntax
from cllm.dialect.xml_calls import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, XmlSyntax

_TAGS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    markers: tuple[str, ...]
    """Texts that are special tokens in some vocabularies and must stay visible in answers."""
    syntax: JsonSyntax
    write: Callable[[Sequence[Mapping[str, Any]]], str]
    """Calls, each with name and arguments, as the model would write them."""

    @property
    def call_marks(self) -> Marks | None:
        """The markers around each call."""
        return Marks(*self.markers) if self.markers == _TAGS else None


def _object(call: Mapping[str, Any], arguments: str = "arguments") -> str:
    return json.dumps({"name": call["name"], arguments: call["arguments"]}, ensure_ascii=False)


def _hermes(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _qwen3_coder(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{_function(call)}\n</tool_call>" for call in calls)


def _function(call: Mapping[str, Any]) -> str:
    given = call["arguments"]
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in (given.items() if isinstance(given, Mapping) else ())
    }
    values = [f"{PARAMETER}{key}>\n{text}\n{END_PARAMETER}" for key, text in texts.items()]
    return "\n".join([f"{FUNCTION}{call['name']}>", *values, END_FUNCTION])


def _llama3(calls: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral(calls: Sequence[Mapping[str, Any]]) -> str:
    return f"[TOOL_CALLS][{', '.join(map(_object, calls))}]"


def _json(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(map(_object, calls))


HERMES = ToolFormat("hermes", _TAGS, JsonSyntax("<tool_call>", close=("</tool_call>",)), _hermes)
QWEN3_CODER = ToolFormat("qwen3_coder", _TAGS, XmlSyntax(), _qwen3_coder)
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), JsonSyntax("<|python_tag|>", bare=True), _llama3)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), MistralSyntax(), _mistral)
JSON = ToolFormat("json", (), JsonSyntax(bare=True), _json)
FORMATS = {each.name: each for each in (HERMES, QWEN3_CODER, LLAMA3, MISTRAL, JSON)}


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template uses; None: none of these."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return QWEN3_CODER if FUNCTION in template else HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return LLAMA3
    return None
