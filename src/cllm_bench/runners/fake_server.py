"""A server without a model that sends tokens at a known pace, to measure the load generator itself.

    python -m cllm_bench.runners.fake_server '{"interval_ms": 10}'

Like a real engine it makes one token for every stream in each step and sends them in a burst. The text of a token is
the moment it was sent (`time.perf_counter`, which all processes of a machine share), so that what a client reports can
be held against what was sent. With an interval of 0 it sends as fast as the clients read.
"""

from __future__ import annotations

import asyncio
import json
import sys
from time import perf_counter

from cllm_bench.runners import end_with_stdin, listening_socket, say_ready

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
_MODELS = b'{"data": [{"id": "fake"}]}'
_EVENT = '{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"fake","choices":['
_CHOICE = ',"logprobs":null,"finish_reason":null}'


class Stream:
    """One answer: what is left of it, and where it goes."""

    def __init__(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        self.writer = writer
        self.left = self.tokens = tokens
        self.done = asyncio.Event()

    def send_token(self) -> None:
        self._send(f'{_EVENT}{{"index":0,"text":"{perf_counter():.7f} "{_CHOICE}]}}')
        self.left -= 1
        if self.left == 0:
            self._send(f'{_EVENT}],"usage":{{"prompt_tokens":1,"completion_tokens":{self.tokens}}}}}')
            self.writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            self.done.set()

    def _send(self, event: str) -> None:
        data = f"data: {event}\n\n"
        self.writer.write(f"{len(data):x}\r\n{data}\r\n".encode())


class FakeServer:
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._streams: dict[Stream, None] = {}
        self._work = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, length = head.partition(b"content-length:")
            body = await reader.readexactly(int(length.split()[0])) if length else b""
            if head.startswith(b"get"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(_MODELS) + _MODELS)
            else:
                writer.write(_HEAD)
                stream = Stream(writer, json.loads(body)["max_tokens"])
                self._streams[stream] = None
                self._work.set()
                await stream.done.wait()
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            if not self._streams:
                self._work.clear()
                await self._work.wait()
                at = loop.time()
            for stream in list(self._streams):
                stream.send_token()
                if stream.left == 0 or stream.writer.is_closing():
                    stream.done.set()
                    del self._streams[stream]
            if self._interval_s:
                # Times are fixed from the start, so that a late step does not shift the ones after it.
                at += self._interval_s
                await asyncio.sleep(max(0.0, at - loop.time()))
            else:
                await asyncio.gather(*(stream.writer.drain() for stream in self._streams), asyncio.sleep(0))


async def serve(interval_s: float) -> None:
    listener, url = listening_socket()
    server = FakeServer(interval_s)
    await asyncio.start_server(server.handle, sock=listener)
    end_with_stdin()
    say_ready(url=url)
    await server.step_for_ever()


def main() -> None:
    asyncio.run(serve(json.loads(sys.argv[1])["interval_ms"] / 1e3))


if __name__ == "__main__":
    main()
