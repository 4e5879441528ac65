"""The owner of a request."""

from __future__ import annotations

from typing import NamedTuple

from cllm.kv.radix import COMMON_SPACE


class Tenant(NamedTuple):
    """`name` appears in logs and metrics. Cached prefixes are shared only within a `space`, and everyone finds those of
    `COMMON`.

    The server assigns tenants; nothing that a client sends may become part of `space`.
    """

    name: str = ""
    space: bytes = b""


ANONYMOUS = Tenant()
"""Requests without a key."""

COMMON = Tenant(space=COMMON_SPACE)
"""Computes prefixes that everyone may find. Never for a request with a key of its own."""
