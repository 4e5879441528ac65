"""For whom a request is computed."""

from __future__ import annotations

from typing import NamedTuple

from cllm.kv.radix import COMMON_SPACE


class Tenant(NamedTuple):
    """`name` is for people: logs and metrics. `space` decides: sequences share prefixes within theirs, with no other,
    and find those of `EVERYBODY`.

    Whoever takes requests gives them their tenant; nothing that a client sends may become a part of `space`.
    """

    name: str = ""
    space: bytes = b""


NOBODY = Tenant()
"""Of whoever needs no key."""

EVERYBODY = Tenant(space=COMMON_SPACE)
"""For whom what all may find is computed; nothing that somebody sends with a key of its own may be."""
