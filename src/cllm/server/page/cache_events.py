"""Events of the prefix tree as the page shows them: one entry for what follows on what was stored just before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cllm.kv.events import KVEvent

MOST = 32
"""Entries in a message; where there are more, the newest."""
SHOWN_BYTES = 6
"""How much of a name is sent: enough to tell blocks apart."""


def summarize(events: Iterable[KVEvent]) -> list[dict[str, Any]]:
    """`stored` and `removed` with the number of blocks and the name of the last one, stored also with the name that
    the first one follows on; `cleared`, and `gap` where events were lost."""
    entries: list[dict[str, Any]] = []
    stored: dict[str, dict[str, Any]] = {}
    """Entries by the name that they end with."""
    for event in events:
        if event.kind == "stored":
            parent, last = short_name(event.parent), short_name(event.names[-1])
            entry = stored.pop(parent, None)
            if entry is None:
                entry = {"kind": "stored", "blocks": 0, "parent": parent}
                entries.append(entry)
            stored[last] = entry
            entry |= {"blocks": entry["blocks"] + len(event.names), "name": last}
        elif event.kind == "removed":
            if not entries or entries[-1]["kind"] != "removed":
                entries.append({"kind": "removed", "blocks": 0})
            stored.clear()
            entries[-1] |= {"blocks": entries[-1]["blocks"] + len(event.names), "name": short_name(event.names[-1])}
        else:
            entries.append({"kind": event.kind})
    return entries[-MOST:]


def short_name(name: bytes) -> str:
    return name[:SHOWN_BYTES].hex()
