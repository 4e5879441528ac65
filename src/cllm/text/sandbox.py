"""The Jinja sandbox for chat templates, which are untrusted programs that come with a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_BITS = 1 << 16
_MAX_REPEATED = 1 << 20
"""Maximum size of numbers and texts that a template makes by multiplication or padding."""
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(?:\d{7}|\*|\d*\.(?:\d{7}|\*))")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{7}|\{)")
"""Fields of format strings with a width or precision of seven digits, or one that comes as an argument."""
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it does nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses operations that would use up all memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            too_much = isinstance(left, str) and _WIDE_PERCENT.search(left) is not None
        elif operator == "**":
            too_much = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS
        else:
            counts = [each for each in (left, right) if isinstance(each, int)]
            pieces = [each for each in (left, right) if isinstance(each, str | bytes | list | tuple)]
            too_much = bool(counts and pieces) and len(pieces[0]) * counts[0] > _MAX_REPEATED
        if too_much:
            raise TemplateError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method, text = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        padded = isinstance(text, str) and method in _PADDING
        if padded and any(isinstance(each, int) and each > _MAX_REPEATED for each in args):
            raise TemplateError(f"the result of {method}() would be too large")
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        formats = isinstance(text, str) and value.__name__ in ("format", "format_map")
        if formats and _WIDE_BRACES.search(str(text).replace("{{", "")) is not None:
            raise TemplateError(f"the result of {value.__name__}() would be too large")
        return super().wrap_str_format(value)


def environment() -> ImmutableSandboxedEnvironment:
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # otherwise {{ 9 ** 9 ** 9 }} is computed when the template is compiled
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    made.filters |= {"tojson": _to_json, "format": _format, "center": _center}
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text = str(value)
    if _WIDE_PERCENT.search(text) is not None:
        raise TemplateError("the result of the filter format would be too large")
    return text % (kwargs or args)


def _center(value: Any, width: int = 80) -> str:
    return str(value).center(min(width, _MAX_REPEATED))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
