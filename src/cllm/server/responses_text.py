"""The form that a response's text must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag
from typing_extensions import NotRequired, TypedDict

from cllm.server.sliced import as_json
from cllm.server.tool_fields import JsonObject, by_kind, known_kinds
from cllm.server.validation import RequestModel, Text
from cllm.structured.structure import Structure


class PlainFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class SchemaFormat(TypedDict):  # pydantic's models have an attribute of the name `schema`
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    type: Literal["json_schema"]
    name: Annotated[Text, Field(max_length=128)]
    description: NotRequired[Text | None]
    schema: JsonObject
    strict: NotRequired[Annotated[bool | None, Field(description="The answer fits the schema in any case.")]]


Format = Annotated[
    Annotated[PlainFormat, Tag("text object")]
    | Annotated[JsonObjectFormat, Tag("json_object object")]
    | Annotated[SchemaFormat, Tag("json_schema object")],
    by_kind(),
    known_kinds(("text", "json_object", "json_schema")),
]


class TextFields(RequestModel):
    format: Format | None = None
    verbosity: Annotated[Any, Field(description="A hint, which changes nothing here.")] = None

    def structure(self) -> Structure | None:
        if isinstance(self.format, dict):
            return Structure("json_schema", as_json(self.format["schema"]), "text.format.schema")
        return Structure("json", "", "text.format") if isinstance(self.format, JsonObjectFormat) else None
