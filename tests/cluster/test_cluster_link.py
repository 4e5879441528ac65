"""Links: who may connect, what they carry, and how they end."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import cllm.cluster.link as links
from cllm.cluster.link import Link, LinkError, accept, connect
from cllm.cluster.messages import portable
from cllm.errors import BackendError, CLLMError, InvalidRequestError, OverloadedError

SECRET = b"s" * 32


@asynccontextmanager
async def pair(secret: bytes = SECRET) -> AsyncIterator[tuple[Link, Link]]:
    """The ingress' end and the replica's."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            accepted.set_result(await accept(reader, writer, SECRET))
        except OSError as error:
            accepted.set_exception(error)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        ours = await connect("127.0.0.1", server.sockets[0].getsockname()[1], secret)
        theirs = await accepted
        yield ours, theirs
        ours.close()
        theirs.close()
    finally:
        if accepted.done():
            accepted.exception()
        server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


async def first(link: Link) -> list[Any]:
    async for messages in link.messages():
        return messages
    raise AssertionError("the link has ended")


def test_messages_of_one_turn_arrive_together_and_in_order() -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            for number in range(100):
                ours.send(number)
            assert await first(theirs) == list(range(100))

    run(test)


def test_who_does_not_know_the_secret_is_refused_by_both_sides() -> None:
    async def test() -> None:
        with pytest.raises(LinkError):
            async with pair(secret=b"t" * 32):
                pass

    run(test)


def test_nothing_is_unpickled_before_the_secret_is_proved() -> None:
    async def test() -> None:
        done: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await accept(reader, writer, SECRET)
            except OSError as error:
                done.set_result(error)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(pickle.dumps([1]) * 20)
        assert isinstance(await done, LinkError)
        server.close()

    run(test)


def test_a_long_message_on_its_way_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PIECE_BYTES", 10)

    async def test() -> None:
        async with pair() as (ours, theirs):
            theirs.heard_at = 0.0
            before = time.monotonic()
            data = pickle.dumps(["x" * 1000])
            reading = asyncio.create_task(first(theirs))
            ours._writer.write(len(data).to_bytes(4, "little") + data[:500])
            while theirs.heard_at < before:
                await asyncio.sleep(0.01)
            assert not reading.done()
            ours._writer.write(data[500:])
            assert await reading == ["x" * 1000]

    run(test)


def test_a_link_ends_for_both_when_one_closes_it() -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            ours.close()
            assert [messages async for messages in theirs.messages()] == []
            assert theirs.closed
            theirs.send("nobody reads this")

    run(test)


def test_a_reader_that_does_not_read_costs_no_more_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_WAITING_BYTES", 1 << 20)

    async def test() -> None:
        async with pair() as (ours, _):
            while not ours.closed:
                ours.send(b"x" * (1 << 20))
                await asyncio.sleep(0)

    run(test)


class _CannotTravelError(CLLMError):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")


def test_errors_arrive_with_what_they_say() -> None:
    for error in (
        InvalidRequestError("no", "param", "code"),
        OverloadedError("full", 3.0),
        BackendError("broken", fatal=True),
    ):
        assert portable(error) is error
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert str(portable(_CannotTravelError(1, "text"))) == "text 1"
    assert str(portable(ValueError(lambda: None))).startswith("internal error: ValueError")
