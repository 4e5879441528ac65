"""The dotted keys of all settings, and suggestions for unknown ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cllm.config.schema import Config


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo | None]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield prefix + name, None
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


_ALL = dict(_walk(Config, ""))
KEYS: dict[str, FieldInfo] = {key: field for key, field in _ALL.items() if field is not None}
SECTIONS: frozenset[str] = frozenset(key for key, field in _ALL.items() if field is None)
SECRET_KEYS = frozenset({"server.api_key"})


def is_text(key: str) -> bool:
    """Whether the value is plain text (a string, choice or path) and not parsed as YAML."""
    return not {int, float, bool, tuple} & _plain_types(KEYS[key].annotation)


def is_nullable(key: str) -> bool:
    return type(None) in get_args(KEYS[key].annotation)


def holds_objects(key: str) -> bool:
    """Whether the value is a list of objects."""
    parts = get_args(KEYS[key].annotation)
    return bool(parts) and isinstance(parts[0], type) and issubclass(parts[0], BaseModel)


def _plain_types(annotation: Any) -> set[Any]:
    if annotation in (int, float, bool):
        return {annotation}
    if getattr(annotation, "__origin__", None) is tuple:
        return {tuple}
    return {kind for part in get_args(annotation) for kind in _plain_types(part)}


def suggest(key: str, spell: Callable[[str], str] = str) -> str:
    """A hint for an unknown key; `spell` turns a dotted key into what the user would write."""
    if meant := _nearest(key):
        return f"did you mean {' or '.join(map(spell, meant))}?"
    section = key.rpartition(".")[0]
    if section not in SECTIONS:
        section = ""
    return f"choose from {', '.join(map(spell, children(section)))}"


def children(section: str) -> list[str]:
    return [key for key in _ALL if key.rpartition(".")[0] == section]


def _nearest(key: str) -> list[str]:
    """Keys with the same name in another section or spelling first, then similar ones."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    if plain in _ALL:
        return [plain]
    by_name: dict[str, list[str]] = {}
    for known in _ALL:
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    name = plain.rpartition(".")[2]
    if name in by_name:
        return by_name[name]
    # Do not suggest a section that the key already names.
    known_keys = [known for known in _ALL if not plain.startswith(f"{known}.")]
    if close := get_close_matches(plain, known_keys, n=1, cutoff=0.75):
        return close
    close = get_close_matches(name, by_name, n=1, cutoff=0.7)
    return by_name[close[0]] if close else []
