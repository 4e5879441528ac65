"""What worker processes do with chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cllm.text.chat_template import ChatTemplate, PromptOptions

TemplateFields = tuple[str, str, str]
"""The fields of a `TemplateSource`."""


@lru_cache(maxsize=4)
def _template(source: TemplateFields) -> ChatTemplate:
    return ChatTemplate.of(source)


def examine(source: TemplateFields) -> dict[str, Any]:
    return _template(source).facts.as_json()


def compose(
    source: TemplateFields,
    special: frozenset[str],
    messages: Sequence[Mapping[str, Any]],
    options: PromptOptions,
    most: int,
) -> tuple[str, list[int]] | None:
    """None: the prompt has more than `most` characters."""
    text, literal = _template(source).compose(special, messages, options)
    return (text, literal) if len(text) <= most else None
