"""GBNF, prepared for llguidance's converter to Lark.

The converter loses the brackets of a repeated group if what is in it is repeated, too, takes names that differ in `-`
and `_` for the same one, calls the root `start`, and writes long escapes with too few digits. So repeated groups become
rules of their own, such names get others, and escapes become characters.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    (?P<other> \#[^\n]* | "(?:[^"\\]|\\.)*"? | \[(?:[^\]\\]|\\.)*\]? )
    | (?P<name> [A-Za-z][A-Za-z0-9_-]* )
    | (?P<open> \( )
    | (?P<close> \)[ \t]*(?P<repeated> [*+?{] )? )
    """,
    re.VERBOSE | re.DOTALL,
)
_ROOT = "start"
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def for_the_converter(source: str) -> str:
    """Raises `ValueError` for an escape that is no character."""
    names = _Names(source)
    groups: list[str] = []
    open_groups: list[list[str]] = []
    parts: list[str] = []
    done = 0
    for found in _TOKEN.finditer(source):
        parts.append(source[done : found.start()])
        done = found.end()
        if found["open"]:
            open_groups.append(parts)
            parts = []
        elif found["close"] and open_groups:
            group = f"({''.join(parts)})"
            parts = open_groups.pop()
            if repeated := found["repeated"]:
                name = names.unused(f"group_{len(groups)}")
                groups.append(f"{name} ::= {group}")  # a rule is on one line, unless it is in brackets
                group = name + repeated
            parts.append(group)
        elif found["name"]:
            parts.append(names.plain(found["name"]))
        else:
            parts.append(_ESCAPE.sub(_as_itself, found[0]))
    parts.append(source[done:])
    for outer in reversed(open_groups):  # not closed: the converter says where
        parts = [*outer, "(", *parts]
    return "\n".join(["".join(parts), *groups, ""]) if groups else "".join(parts)


class _Names:
    """The names of rules, and others for those that the converter would confuse."""

    def __init__(self, source: str) -> None:
        self._others: dict[str, str] = {}
        self._taken = {found["name"] for found in _TOKEN.finditer(source) if found["name"]}

    def plain(self, name: str) -> str:
        if ("-" in name or name == _ROOT) and name not in self._others:
            self._others[name] = self.unused(name.replace("-", "_"))
        return self._others.get(name, name)

    def unused(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _as_itself(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"has the escape {escape[0]}, which is no character")
    return chr(code)
