"""For whom a request is computed."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """`name` is for people: logs and metrics. `space` decides: sequences share prefixes within theirs, with no other.

    Whoever takes requests gives them their tenant; nothing that a client sends may become a part of `space`.
    """

    name: str = ""
    space: bytes = b""


NOBODY = Tenant()
"""Of whoever needs no key."""
