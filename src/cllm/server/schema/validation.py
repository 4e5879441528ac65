"""Validation of request bodies: strict types, `null` for the default, and errors that name the parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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

from cllm.errors import InvalidRequestError

_SHOWN = 60
MOST_PROBLEMS = 8
"""Listed in an error, of one object."""
A_HINT = "A hint: accepted, without effect."
NOT_SUPPORTED = "Not supported; only values without effect are accepted."
_WORD = re.compile(r"\w+")
_SHORT = Repr()  # looks at the beginning of a value only
_SHORT.maxstring = _SHORT.maxother = _SHOWN
OWN_KINDS = frozenset({"refused", "wrong"})
"""Errors with a reason in our own words."""


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
    list[Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"x-token-id": True})]], Field(fail_fast=True), WHOLE
]
Tokens = Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})]
ModelName = Annotated[Text, Field(max_length=512)]
UserName = Annotated[Text, Field(max_length=256)]
END_USER = "Identifies the end user; logged with the request id at level debug."

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


@dataclass(frozen=True)
class MustBe:
    """Marks a union with what a value may be, for the error if it is of no such kind. What is wrong within an object,
    and what is said in our own words, stays as it is."""

    expected: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if all(map(_is_about_its_kind, error.errors(include_url=False, include_input=False))):
                raise wrong(f"must be {self.expected}, not {show(value)}") from None
            raise


def _is_about_its_kind(error: ErrorDetails) -> bool:
    """Whether it is about a branch of a union, which comes first in its place, or about an item of that."""
    return error["type"] not in OWN_KINDS and all(isinstance(part, int) for part in error["loc"][1:])


A_STRING_OR_STRINGS = MustBe("a string or a list of strings")
PROMPTS = MustBe("a string, a list of strings, a list of token ids or a list of lists of token ids")

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
    instead: ClassVar[Mapping[str, str]] = {}
    """For parameters of `unsupported` that have another name here: that name."""
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
            wrong_ones = {each["loc"][0] for each in found if each["loc"]}
            refused = [*_contradictions_beside(wrong_ones, taken, handler), *refused]
        else:
            refused = [*checked.contradictions(), *refused]
            if not refused:
                return checked
            lines = []
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
                if value is None:
                    continue  # the default, whatever it is: clients send fields of newer versions empty
                if name not in cls.unsupported:
                    refused.append(refusal(name, "is not a parameter of this request"))
                elif not any(_same(value, harmless) for harmless in cls.unsupported[name]):
                    refused.append(refusal(name, f"is not supported by this server; {cls._advice(name)}"))
        return taken, refused

    @classmethod
    def _advice(cls, name: str) -> str:
        """What to do with a parameter that is not supported."""
        if name in cls.instead:
            return f"send {cls.instead[name]} instead"
        return " or ".join(["leave it out", *(f"send {json.dumps(harmless)}" for harmless in cls.unsupported[name])])


def _contradictions_beside(
    names: Set[str | int], given: Mapping[str, Any], handler: ModelWrapValidatorHandler[Any]
) -> list[PydanticCustomError]:
    """The contradictions of an object without its wrong parameters `names`; those that mention one may follow from
    it. None if the object needs them."""
    try:
        checked = handler({name: value for name, value in given.items() if name not in names})
    except ValidationError:
        return []
    return [each for each in checked.contradictions() if not names & {*_WORD.findall(each.message())}]


def raised_by(check: Callable[[], object]) -> Iterator[PydanticCustomError]:
    """What a check raises, as a contradiction."""
    try:
        check()
    except PydanticCustomError as error:
        yield error
    except InvalidRequestError as error:
        param = error.param or ""
        yield refusal(param, str(error).removeprefix(f"{param} ").removesuffix("."))


def _as_line(error: ErrorDetails) -> InitErrorDetails:
    """A reported error, to be raised again."""
    kind, context = error["type"], error.get("ctx", {})
    again: Any = PydanticCustomError(kind, "{reason}", context) if kind in OWN_KINDS else kind
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
