"""Where chat templates run: they are programs that came with a model."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_BITS = 1 << 16
_MOST_REPEATED = 1 << 20
"""Of numbers and of texts that a template makes by multiplying."""


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here its content is just written."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """One that does not compute what would take all memory, either: a template came with a model."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            too_much = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS
        else:
            counts = [each for each in (left, right) if isinstance(each, int)]
            pieces = [each for each in (left, right) if isinstance(each, str | bytes | list | tuple)]
            too_much = bool(counts and pieces) and len(pieces[0]) * counts[0] > _MOST_REPEATED
        if too_much:
            raise TemplateError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


def environment() -> ImmutableSandboxedEnvironment:
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # else {{ 9 ** 9 ** 9 }} in a file is computed when the model is loaded
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
