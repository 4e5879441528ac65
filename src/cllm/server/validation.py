"""What all request bodies share: strict types, `null` as the default, and errors that name the parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_SHOWN = 60
_SHOULD = re.compile("^(Input|String) should")
_SHORT = Repr()  # looks at the beginning of a value only
_SHORT.maxstring = _SHORT.maxother = _SHOWN
_OWN_KINDS = frozenset({"refused", "wrong"})
_MUST_BE = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(f"holds half of a surrogate pair at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
"""A string that can be written as UTF-8."""
Texts = Annotated[list[Text], Field(fail_fast=True)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

Unsupported = Mapping[str, Sequence[Any]]


class StrictModel(BaseModel):
    """A JSON object from a client. Unknown keys and wrong types are errors, never guesses.

    Lists in requests are `fail_fast`: a list of a million wrong items is one error, not a million.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RequestModel(StrictModel):
    """One that says of every key it refuses whether it is unknown or known and not supported."""

    unsupported: ClassVar[Unsupported] = {}
    """Parameters that the API knows and this server does not have, each with the values that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        taken = {}
        for name, value in data.items():
            if name in cls.model_fields:
                taken[name] = value
            elif name not in cls.unsupported:
                raise refusal(name, "is not a parameter of this request")
            elif value is not None and value not in cls.unsupported[name]:
                choices = ["leave it out", *(f"send {json.dumps(harmless)}" for harmless in cls.unsupported[name])]
                raise refusal(name, f"is not supported by this server; {' or '.join(choices)}")
        return taken


def wrong(reason: str) -> PydanticCustomError:
    """For validators of one value."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason})


def refusal(param: str, reason: str) -> PydanticCustomError:
    """For validators of a whole object, which have to say which parameter they mean."""
    return PydanticCustomError("refused", "{reason}", {"param": _shorten(param), "reason": reason})


def describe_invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """(parameter, message) for the error that says most."""
    error = max(errors, key=_clarity)
    if error["type"] == "json_invalid":
        reason, at = error.get("ctx", {}).get("error", "broken"), error["loc"][-1]
        return None, f"The body is not valid JSON: {reason} (at character {at})."
    path = _path_of(error)
    if not path and error["type"] == "string_unicode":
        return None, f"The body has the key {_show(error['input'])}, which is not valid text."
    if not path:
        return None, "The body must be a JSON object, sent with content-type: application/json."
    param = _shorten("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:])
    return param, f"{param} {_reason(error, path[-1], errors)}."


def _clarity(error: Mapping[str, Any]) -> tuple[bool, int]:
    """A value that fits no branch of a union yields an error per branch. Our own are the clearest, then the one
    that got furthest into the value; but of alternatives that look alike, only the whole can be named."""
    loc = error["loc"]
    alike = len(loc) > 1 and loc[1] in ("prompt", "stop")
    return error["type"] in _OWN_KINDS, -len(loc) if alike else len(loc)


def _path_of(error: Mapping[str, Any]) -> list[str | int]:
    """Where the error is, without pydantic's marks of union branches (`str`, `list[int]`, ...)."""
    *inner, last = error["loc"]
    if error["type"] != "extra_forbidden":
        inner.append(last)
    path = [part for part in inner[1:] if isinstance(part, int) or _is_field_name(part)]
    if error["type"] == "extra_forbidden":
        path.append(last)
    if error["type"] == "refused":
        path.append(error["ctx"]["param"])
    return path


def _is_field_name(part: str) -> bool:
    return part.isidentifier() and part not in ("str", "int", "float", "bool")


def _reason(error: Mapping[str, Any], name: str | int, errors: Sequence[Mapping[str, Any]]) -> str:
    kind = error["type"]
    if kind in _OWN_KINDS:
        return str(error["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return "is empty"
    if kind == "too_long":
        return f"holds more than {error['ctx']['max_length']} items"
    if kind == "model_attributes_type":
        return f"must be an object, not {_show(error.get('input'))}"
    if kind == "extra_forbidden":
        return "is not a parameter of this request"
    expected = _SHOULD.sub("must", str(error["msg"]))
    if name in _MUST_BE and len(errors) > 1:
        expected = f"must be {_MUST_BE[str(name)]}"
    return f"{expected}, not {_show(error.get('input'))}"


def _show(value: Any) -> str:
    try:
        return _shorten(_SHORT.repr(value))
    except ValueError:  # an integer of more digits than Python prints
        return "a number too large to show"


def _shorten(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
