"""Structured output: the parameters of OpenAI, vLLM and llama-server for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import PydanticCustomError

from cllm.server.schema.validation import MustBe, RequestModel, Text, Unsupported, Words, raised_by, refusal
from cllm.structured.schemas import lenient
from cllm.structured.structure import Structure, StructureKind

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM
    from cllm.structured.matcher import Grammar

_FORMATS = "text, json_object, json_schema or structural_tag"
JsonObject = dict[str, Any]
JsonSchema = Annotated[JsonObject | Words, MustBe("a JSON schema: an object, or its text")]
Choices = Annotated[list[Words], Field(fail_fast=True, min_length=1)]


class StructuredOutputs(RequestModel):
    """vLLM's parameter: exactly one of these."""

    hints = frozenset({"disable_any_whitespace", "disable_fallback", "backend"})
    unsupported: ClassVar[Unsupported] = {"disable_additional_properties": (False,), "whitespace_pattern": ()}

    json_: JsonSchema | None = Field(None, alias="json")  # pydantic has a method of that name
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Words | None = None
    json_object: bool | None = None
    structural_tag: Annotated[JsonObject | Words, MustBe("an object, or its text")] | None = None


class StructureFields(RequestModel):
    """At most one of these may be set."""

    response_format: JsonObject | None = Field(
        None,
        description='What the answer is: {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
        examples=[{"type": "json_object"}],
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's name: json (a schema), regex, choice, grammar, json_object or structural_tag."
    )
    guided_json: JsonSchema | None = Field(None, description="vLLM's old name: a JSON schema.")
    guided_regex: Text | None = Field(None, description="vLLM's old name: a regular expression.")
    guided_choice: Choices | None = Field(None, description="vLLM's old name: the answer is one of these.")
    guided_grammar: Words | None = Field(None, description="vLLM's old name: a grammar in GBNF or Lark.")
    json_schema: JsonSchema | None = Field(None, description="llama-server's and SGLang's name: a JSON schema.")
    grammar: Words | None = Field(None, description="llama-server's name: a grammar in GBNF (or Lark).")
    regex: Text | None = Field(None, description="SGLang's name: a regular expression.")
    ebnf: Words | None = Field(None, description="SGLang's name: a grammar in GBNF (or Lark).")

    def contradictions(self) -> Iterator[PydanticCustomError]:
        """Also reads the structure: in the thread that parses large bodies."""
        yield from raised_by(lambda: self.structure)

    @cached_property
    def structure(self) -> Structure | None:
        asked = (self._of_this_api(), self._from_format(), self._from_outputs(), *self._from_fields())
        found = [each for each in asked if each is not None]
        if len(found) > 1:
            raise refusal(found[1].param, f"is not allowed together with {found[0].param}: an answer has one structure")
        return found[0] if found else None

    def _of_this_api(self) -> Structure | None:
        """From parameters of one API only."""
        return None

    def _from_format(self) -> Structure | None:
        given = self.response_format
        if given is None:
            return None
        kind, param = given.get("type"), "response_format"
        if kind == "text":
            return None
        if kind == "json_object":
            schema = given.get("schema")
            return (
                Structure("json", "", param) if schema is None else _of_json("json_schema", schema, f"{param}.schema")
            )
        if kind == "json_schema":
            described, param = _described_schema(given, param)
            return _of_json("json_schema", lenient_unless_strict(described), f"{param}.schema")
        if kind == "structural_tag":
            return _of_json("structural_tag", given, param)
        raise refusal(param, f"must have one of the types {_FORMATS}")

    def _from_outputs(self) -> Structure | None:
        given = self.structured_outputs
        if given is None:
            return None
        name = "structured_outputs"
        found = [
            *_of_texts({f"{name}.regex": ("regex", given.regex), f"{name}.grammar": ("gbnf", given.grammar)}),
            *_of_objects(
                {
                    f"{name}.json": ("json_schema", given.json_),
                    f"{name}.choice": ("choice", given.choice),
                    f"{name}.structural_tag": ("structural_tag", given.structural_tag),
                }
            ),
        ]
        if given.json_object:
            found.append(Structure("json", "", f"{name}.json_object"))
        if len(found) != 1:
            raise refusal(name, "must have exactly one of json, regex, choice, grammar, json_object, structural_tag")
        return found[0]

    def _from_fields(self) -> list[Structure]:
        texts: _Named = {
            "guided_regex": ("regex", self.guided_regex),
            "guided_grammar": ("gbnf", self.guided_grammar),
            "grammar": ("gbnf", self.grammar),
            "regex": ("regex", self.regex),
            "ebnf": ("gbnf", self.ebnf),
        }
        objects: _Named = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_choice": ("choice", self.guided_choice),
            "json_schema": ("json_schema", self.json_schema),
        }
        return [*_of_texts(texts), *_of_objects(objects)]


_Named = dict[str, tuple[StructureKind, Any]]


def _described_schema(given: JsonObject, param: str) -> tuple[JsonObject, str]:
    """The object that has the schema, and its name: `json_schema`, or the response format itself."""
    outer, inner = given.get("schema"), given.get("json_schema")
    if outer is not None and inner is not None:
        raise refusal(f"{param}.json_schema", f"is not allowed together with {param}.schema; send one of them")
    described, where = (given, param) if outer is not None else (inner, f"{param}.json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise refusal(param, "must have json_schema.schema")
    if not isinstance(described.get("strict"), bool | None):
        raise refusal(f"{where}.strict", "must be true or false")
    return described, where


def lenient_unless_strict(described: Mapping[str, Any]) -> Any:
    """The schema; with `strict: false`, what cannot be enforced of it is ignored."""
    schema = described["schema"]
    if described.get("strict") is not False or not isinstance(schema, dict):
        return schema
    return lenient(schema)


def _of_texts(named: _Named) -> list[Structure]:
    return [Structure(kind, text, param) for param, (kind, text) in named.items() if text is not None]


def _of_objects(named: _Named) -> list[Structure]:
    return [_of_json(kind, value, param) for param, (kind, value) in named.items() if value is not None]


def _of_json(kind: StructureKind, value: Any, param: str) -> Structure:
    """`value` as JSON, or JSON already."""
    if isinstance(value, str):
        return Structure(kind, value, param)
    try:
        return Structure(kind, json.dumps(value, ensure_ascii=False), param)
    except RecursionError:
        raise refusal(param, "is nested too deeply") from None


async def compiled(llm: AsyncLLM, params: SamplingParams) -> Grammar | None:
    """The grammar of `params.structured`, if set."""
    return None if params.structured is None else await llm.text.compile(params.structured)
