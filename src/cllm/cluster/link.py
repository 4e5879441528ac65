"""Links: one TCP connection between an ingress and a replica, for everything that comes often.

Ray Serve routes each request and watches it. Tokens, events of the prefix cache and numbers take this way instead: a
message of a link costs microseconds, and one message carries what a step gave all requests of an ingress.

A message is a pickled value after its length in four bytes. Nothing is unpickled before the other side has proved that
it knows the replica's secret, which Ray passes on within the cluster; each side proves it, so that neither can be
impersonated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import pickle
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<I")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
MOST_BYTES = 1 << 30
_PIECE_BYTES = 1 << 18
HANDSHAKE_S = 10.0
UNACKNOWLEDGED_S = 15.0
"""A link to a machine that does not acknowledge what was sent for this long is closed."""
MOST_WAITING_BYTES = 64 << 20
"""A link whose other side does not read is closed when this much waits to be sent."""


class LinkError(ConnectionError):
    """The other side is gone, or is not who it says."""


class Link:
    """`send` never waits; messages sent in one turn of the event loop leave together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[Any] = []
        self.host: str = (writer.get_extra_info("peername") or ("",))[0]
        """The other side's machine."""
        self.heard_at = time.monotonic()
        """When something last arrived."""

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    def send(self, message: Any) -> None:
        if self.closed:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self.closed:
            return
        data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        if self._writer.transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self._writer.transport.abort()

    async def messages(self) -> AsyncIterator[list[Any]]:
        """Lists of messages as they arrive; ends when the link does."""
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if size > MOST_BYTES:
                    return
                yield pickle.loads(await self._read(size))  # from a member of the cluster: see above
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self.close()

    async def _read(self, size: int) -> bytearray:
        """A long message that is on its way is a sign of life, too."""
        data = bytearray()
        while len(data) < size:
            piece = await self._reader.readexactly(min(size - len(data), _PIECE_BYTES))
            self.heard_at = time.monotonic()
            data += piece
        return data

    def close(self) -> None:
        with suppress(Exception):
            self._writer.transport.abort()


async def connect(host: str, port: int, secret: bytes) -> Link:
    """Raises `OSError`."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), HANDSHAKE_S)
    except asyncio.TimeoutError as error:  # not an OSError before Python 3.11
        raise LinkError("no answer") from error
    return await _shake_hands(reader, writer, secret, b"ingress", b"replica")


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Link:
    """Raises `OSError`."""
    return await _shake_hands(reader, writer, secret, b"replica", b"ingress")


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, own: bytes, other: bytes
) -> Link:
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        theirs = await asyncio.wait_for(reader.readexactly(_NONCE_BYTES), HANDSHAKE_S)
        writer.write(_proof(secret, own, theirs))
        proof = await asyncio.wait_for(reader.readexactly(_PROOF_BYTES), HANDSHAKE_S)
        if not hmac.compare_digest(proof, _proof(secret, other, nonce)):
            raise LinkError("the other side does not know this cluster's secret")
    except (asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
        writer.transport.abort()
        raise LinkError("the other side did not introduce itself") from error
    except BaseException:
        writer.transport.abort()
        raise
    _end_with_its_machine(writer.get_extra_info("socket"))
    return Link(reader, writer)


def _end_with_its_machine(connection: socket.socket) -> None:
    """A machine that is switched off closes no connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": UNACKNOWLEDGED_S * 1000}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(value))


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    """The role keeps a side from being sent its own proof."""
    return hmac.digest(secret, role + nonce, hashlib.sha256)
