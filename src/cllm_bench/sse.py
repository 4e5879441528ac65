"""Server-sent events, as far as OpenAI-compatible servers use them."""

from __future__ import annotations


class EventReader:
    """Turns raw bytes, cut anywhere, into the payloads of complete `data:` lines.

    These servers send one `data:` line per event, so a line is an event. Comments and other fields are left out.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
