"""Validation of request bodies: strict types, `null` for the default, and errors that name the parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

_SHOWN = 60
MOST_PROBLEMS = 8
"""Listed in an error, of one object."""
A_HINT = "A hint: accepted, without effect."
NOT_SUPPORTED = "Not supported; only values without effect are accepted."
_SHOULD = re.compile("^(Input|String) should")
_SHORT = Repr()  # looks at the beginning of a value only
_SHORT.maxstring = _SHORT.maxother = _SHOWN
_OWN_KINDS = frozenset({"refused", "wrong"})
_TEXTS = "a string, a list of strings, a list of token ids or a list of lists of token ids"
_ITEMS = "a string or a list of items, at least one"
_MUST_BE = {
    "prompt": _TEXTS,
    "input": _TEXTS,
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(f"contains an unpaired surrogate at character {error.start}") from None
    return text


def _whole_numbers(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Accepts 5.0 as 5, also in lists: JSON does not distinguish them."""
    try:
        return handler(value)
    except ValidationError:
        as_integers = [_as_integer(each) for each in value] if isinstance(value, list) else _as_integer(value)
        if as_integers == value:
            return handler(as_integers)
        raise


def _as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = WrapValidator(_whole_numbers)
"""Goes last in the annotation of an integer or a list of integers."""

Text = Annotated[str, AfterValidator(_whole_characters)]
"""A string that can be encoded as UTF-8."""
Words = Annotated[Text, Field(json_schema_extra={"minLength": 1})]
"""A text that must not be empty; its users report that themselves."""
Texts = Annotated[list[Words], Field(fail_fast=True)]
Hint = Annotated[Any, Field(description=A_HINT)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
"""With `le`: pydantic shows a bound that is no such integer itself, as 2**63 is none, rounded."""
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"x-token-id": True})]],
    Field(fail_fast=True),
    WHOLE,
]
Tokens = Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})]
ModelName = Annotated[Text, Field(max_length=512)]
UserName = Annotated[Text, Field(max_length=256)]

Unsupported = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class AtMost:
    """Limits a list or an object to the setting server.`setting`, from the validation's context.

    They are counted before any of them is looked at. `items`: only lists of this type are meant.
    """

    setting: str
    things: str
    items: type = object

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), AT_MOST: self.setting}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, (list, dict)) and info.context is not None:
            most: int = getattr(info.context, self.setting)
            if len(value) > most and isinstance(next(iter(value)), self.items):
                reason = f"has {len(value)} {self.things}; at most {most} are allowed (server.{self.setting})"
                raise wrong(reason)
        return value


AT_MOST = "x-at-most"
"""In a schema: the setting that limits this list, object or text. The API's description has its value instead."""
TOKEN_ID = "x-token-id"
"""In a schema: this number is a token id. The description has the largest there is."""
TOKEN_IDS_AS_KEYS = "x-token-ids-as-keys"


class RequestModel(BaseModel):
    """A JSON object from a client. Unknown keys and wrong types are errors, never guesses, and of a key that is refused
    the error says whether it is unknown, or known and not supported.

    Lists in requests are `fail_fast`: a list of a million wrong items is one error, not a million.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[Unsupported] = {}
    """Parameters of the API that are not supported, each with the values that have no effect."""
    hints: ClassVar[frozenset[str]] = frozenset()
    """Parameters that cannot change an answer: accepted with any value, and ignored."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        properties.update((name, {"description": A_HINT}) for name in sorted(cls.hints))
        properties.update(
            (name, {"enum": [None, *harmless], "description": NOT_SUPPORTED})
            for name, harmless in cls.unsupported.items()
        )
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _find_all_problems(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Report refused keys, wrong values and contradictions in one error."""
        if not isinstance(data, dict):
            return handler(data)
        taken, refused = cls._sort_keys(data)
        try:
            checked = handler(taken)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=True)
            if any(each.get("ctx", {}).get("whole") for each in found):
                raise
            lines = [_as_line(each) for each in found]
        else:
            lines = [InitErrorDetails(type=each, input=None) for each in checked.contradictions()]
            if not lines and not refused:
                return checked
        lines += [InitErrorDetails(type=each, input=None) for each in refused]
        raise ValidationError.from_exception_data(cls.__name__, lines)

    def contradictions(self) -> Iterator[PydanticCustomError]:
        """Values that are valid alone but not together, as `refusal`s."""
        yield from ()

    @classmethod
    @cache
    def field_names(cls) -> frozenset[str]:
        """As clients write them."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _sort_keys(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[PydanticCustomError]]:
        """(the keys to validate, errors for the refused ones; of very many, for the first)."""
        taken: dict[str, Any] = {}
        refused: list[PydanticCustomError] = []
        known = cls.field_names()
        for name, value in data.items():
            if name in known:
                taken[name] = value
            elif name not in cls.hints and len(refused) < MOST_PROBLEMS:
                if name not in cls.unsupported:
                    refused.append(refusal(name, "is not a parameter of this request"))
                elif value is not None and not any(_same(value, harmless) for harmless in cls.unsupported[name]):
                    choices = ["leave it out", *(f"send {json.dumps(harmless)}" for harmless in cls.unsupported[name])]
                    refused.append(refusal(name, f"is not supported by this server; {' or '.join(choices)}"))
        return taken, refused


def _as_line(error: ErrorDetails) -> InitErrorDetails:
    """A reported error, to be raised again."""
    kind, context = error["type"], error.get("ctx", {})
    again: Any = PydanticCustomError(kind, "{reason}", context) if kind in _OWN_KINDS else kind
    return {"type": again, "loc": error["loc"], "input": error["input"], "ctx": context}


def _same(value: Any, other: Any) -> bool:
    """Equal and of the same type: 0 is not false."""
    return type(value) is type(other) and bool(value == other)


def wrong(reason: str) -> PydanticCustomError:
    """For validators of a single value."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason})


def refusal(param: str, reason: str, *, whole: bool = False) -> PydanticCustomError:
    """For validators of an object, which must name the parameter. `whole`: it is a different kind of object, so no
    further errors are reported."""
    return PydanticCustomError("refused", "{reason}", {"param": shorten(param), "reason": reason, "whole": whole})


def describe_invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """(first parameter, message), with a sentence for each error."""
    sentences: dict[str | None, str] = {}
    for group in _by_parameter(errors):
        for error in [each for each in group if each["type"] in _OWN_KINDS] or [max(group, key=_clarity)]:
            param, sentence = _describe(error, group)
            sentences.setdefault(param, sentence)
    shown = list(sentences.values())[:MOST_PROBLEMS]
    if len(sentences) > len(shown):
        shown.append("There are more errors.")
    return next(iter(sentences)), " ".join(shown)


def _by_parameter(errors: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group errors by parameter: a value that fits no branch of a union has an error per branch."""
    groups: dict[str | int | None, list[Mapping[str, Any]]] = {}
    for error in errors:
        groups.setdefault(next(iter(_path_of(error)), None), []).append(error)
    return list(groups.values())


def _describe(error: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    path = _path_of(error)
    if not path and error["type"] == "string_unicode":
        return None, f"The body has the key {show(error['input'])}, which is not valid text."
    if not path:
        return None, "The body must be a JSON object, sent with content-type: application/json."
    param = shorten("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:])
    return param, f"{param} {_reason(error, path[-1], group)}."


def _clarity(error: Mapping[str, Any]) -> tuple[bool, int]:
    """Of the errors of a union's branches, our own are the clearest, then the one that got furthest into the value; but
    of alternatives that look alike, only the whole can be named."""
    loc = error["loc"]
    alike = bool(loc) and loc[0] in ("prompt", "input", "stop") and not any(map(_is_field_name, loc[1:]))
    return error["type"] in _OWN_KINDS, -len(loc) if alike else len(loc)


def _path_of(error: Mapping[str, Any]) -> list[str | int]:
    """Where the error is, without pydantic's marks of union branches (`str`, `list[int]`, ...)."""
    path = [part for part in error["loc"] if isinstance(part, int) or _is_field_name(part)]
    if error["type"] == "refused":
        path.append(error["ctx"]["param"])
    return path


def _is_field_name(part: str | int) -> bool:
    return isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "float", "bool")


def _reason(error: Mapping[str, Any], name: str | int, errors: Sequence[Mapping[str, Any]]) -> str:
    kind = error["type"]
    if kind in _OWN_KINDS:
        return str(error["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return "is empty"
    if kind in ("too_long", "string_too_long"):
        given = error.get("input")
        unit = "characters" if isinstance(given, str) else "items"
        return f"has more than {error['ctx']['max_length']} {unit}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be an object, not {show(error.get('input'))}"
    expected = _SHOULD.sub("must", str(error["msg"]))
    if name in _MUST_BE and len(errors) > 1:
        texts_or_items = name == "input" and len(errors) == 2  # a response's, which takes no tokens
        expected = f"must be {_ITEMS if texts_or_items else _MUST_BE[str(name)]}"
    return f"{expected}, not {show(error.get('input'))}"


def show(value: Any) -> str:
    """A client's value, as an error shows it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        return shorten(_SHORT.repr(value))
    except ValueError:  # an integer of more digits than Python prints
        return "a number too large to show"


def shorten(text: str) -> str:
    """A client's input, short enough to show."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
