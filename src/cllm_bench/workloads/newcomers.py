"""Streams run, and once each has produced some text, more requests arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from cllm_bench.client import Client
from cllm_bench.load import Job, at_most
from cllm_bench.response import TimedResponse


async def streams_and_newcomers(
    client: Client,
    stream_texts: Sequence[str],
    stream_tokens: int,
    head_start: int,
    texts: Sequence[str],
    answer_tokens: int,
) -> tuple[list[TimedResponse], list[TimedResponse]]:
    """The answers of the streams, and of those who come when every stream has had `head_start` pieces of text."""
    started = [asyncio.Event() for _ in stream_texts]

    async def stream(index: int) -> TimedResponse:
        def on_text(arrivals: int) -> None:
            if arrivals >= head_start:
                started[index].set()

        try:
            return await client.complete(stream_texts[index], stream_tokens, on_text)
        finally:
            started[index].set()

    async def newcomer(text: str) -> TimedResponse:
        for event in started:
            await event.wait()
        return await client.complete(text, answer_tokens)

    jobs: list[Job[TimedResponse]] = [partial(stream, index) for index in range(len(stream_texts))]
    jobs += [partial(newcomer, text) for text in texts]
    answers = await at_most(len(jobs), jobs)
    return answers[: len(stream_texts)], answers[len(stream_texts) :]
