"""OpenVINO GenAI's continuous batching behind as much of OpenAI's API as the benchmarks use.

    python -m cllm_bench.runners.openvino_server '{"model": "file.gguf", "threads": 2, "batched_tokens": 256,
                                                   "cache_gb": 2, "kv": "u8"}'

One thread steps the pipeline and hands out the new tokens of each request after every step; the event loop sends them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import openvino_genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cllm.models.gguf import GGUFModel
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.runners import end_with_stdin, listening_socket, say_ready

NAME = "openvino"
Tokens = asyncio.Queue[list[int] | None]


class Pipeline:
    """Requests go in from the event loop; `None` ends a queue of tokens."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = wanted["cache_gb"]
        scheduler.max_num_batched_tokens = wanted["batched_tokens"]
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": wanted["threads"], "KV_CACHE_PRECISION": wanted["kv"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(wanted["model"], scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._numbers = count()
        self._open: dict[int, tuple[Any, Tokens]] = {}
        self._work = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, input_ids: Any, max_tokens: int) -> tuple[Any, Tokens]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        number = next(self._numbers)
        handle, tokens = self._pipeline.add_request(number, input_ids, config), Tokens()
        self._open[number] = (handle, tokens)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, name="openvino", daemon=True).start()
        self._work.set()
        return handle, tokens

    def _run(self) -> None:
        while True:
            if not self._pipeline.has_non_finished_requests():
                self._work.wait()
                self._work.clear()
            self._pipeline.step()
            for number, (handle, tokens) in list(self._open.items()):
                while handle.can_read():
                    new = [token for output in handle.read().values() for token in output.generated_ids]
                    self._send(tokens, new)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
                    del self._open[number]
                    self._send(tokens, None)

    def _send(self, tokens: Tokens, new: list[int] | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(tokens.put_nowait, new)


def create_app(wanted: dict[str, Any]) -> FastAPI:
    pipeline = Pipeline(wanted)
    # Its own detokeniser is a model run of its own; the same vocabulary out of the same file costs nothing.
    pieces = load_tokenizer(GGUFModel.open(Path(wanted["model"])))
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": NAME, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        return answer(body["prompt"], body["max_tokens"], chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> StreamingResponse:
        body = await request.json()
        prompt = pipeline.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return answer(prompt, body["max_tokens"], chat=True)

    def answer(prompt: str, max_tokens: int, *, chat: bool) -> StreamingResponse:
        # A chat template writes its special tokens itself.
        input_ids = pipeline.tokenizer.encode(prompt, add_special_tokens=not chat).input_ids
        return StreamingResponse(stream(input_ids, max_tokens, chat), media_type="text/event-stream")

    async def stream(input_ids: Any, max_tokens: int, chat: bool) -> AsyncIterator[bytes]:
        handle, tokens = pipeline.submit(input_ids, max_tokens)
        made = 0
        try:
            while (new := await tokens.get()) is not None:
                made += len(new)
                text = b"".join(map(pieces.token_bytes, new)).decode(errors="replace")
                yield _event({"choices": [{"index": 0, "delta": {"content": text}} if chat else {"text": text}]})
            usage = {"prompt_tokens": input_ids.shape[1], "completion_tokens": made}
            yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        finally:
            handle.cancel()

    return app


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def main() -> None:
    app = create_app(json.loads(sys.argv[1]))
    listener, url = listening_socket()
    end_with_stdin()
    say_ready(url=url, version=openvino_genai.__version__)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
