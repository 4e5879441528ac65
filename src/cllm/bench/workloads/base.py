"""What all workloads share: their setting, and how both sides take turns."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cllm.bench.client import Answer, Client
from cllm.bench.figures import Figure, Run, Side
from cllm.bench.machine import busy_percent
from cllm.bench.peers import LLAMA_SERVER, PeerSettings
from cllm.bench.prompts import Encode, Prompts
from cllm.bench.servers import Server, start_cllm, start_llama_server
from cllm.bench.stats import percentile
from cllm.models.registry import resolve

Metrics = dict[str, float]

SETTLE_S = 0.3
"""Thread pools may spin for a moment after work."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, once all options are known."""

    model: str
    encode: Encode
    threads: int
    repeats: int
    backend: str = "auto"
    url: str | None = None
    """Drive the server at this address instead of starting cLLM."""
    against: str | None = "llama-server"
    """The peer: "llama-server", an address, or None."""
    peer_settings: PeerSettings | None = None
    """Instead of the peer's best known ones."""
    salt: str = ""
    """Makes the prompts of this run its own."""
    progress: Callable[[str], None] = lambda line: None

    def sides(self, repeat: int) -> Sequence[Side]:
        """Who runs in this repeat, in order. It alternates, so that a drift of the machine hits both alike."""
        if self.against is None:
            return ("ours",)
        return ("ours", "peer") if repeat % 2 == 0 else ("peer", "ours")

    @property
    def model_file(self) -> Path:
        """The model on disk, fetched at first use."""
        return resolve(self.model)

    def prompts(self, seed: str) -> Prompts:
        return Prompts(self.encode, f"{seed} {self.salt}")


class Workload(ABC):
    """One kind of work. Subclasses are frozen dataclasses whose fields are the sizes."""

    name: ClassVar[str]
    figures: ClassVar[tuple[Figure, ...]]
    over_http: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True

    @property
    @abstractmethod
    def title(self) -> str:
        """What is done, with the sizes."""

    @abstractmethod
    def quick(self) -> Workload:
        """The same work, small: to see that all runs, not to quote figures."""

    def peer_name(self, setup: Setup) -> str | None:
        return setup.against

    @abstractmethod
    async def measure(self, setup: Setup) -> list[Run]: ...


class HttpWorkload(Workload):
    """Work for any OpenAI-compatible server.

    Every pass starts a fresh server and has prompts of its own, so none profits from the pass before.
    """

    over_http = True

    @property
    def peer_key(self) -> str:
        """Under which the peer's settings for this work stand in `peers.LLAMA_SERVER`."""
        return self.name

    @abstractmethod
    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        """Do the work once, against a warm server that has seen none of these prompts."""

    async def measure(self, setup: Setup) -> list[Run]:
        runs = []
        for repeat in range(setup.repeats):
            for side in setup.sides(repeat):
                setup.progress(f"{self.title}: {side}, {repeat + 1} of {setup.repeats}")
                runs.append(await self.one_pass(setup, side, repeat))
        return runs

    async def one_pass(self, setup: Setup, side: Side, repeat: int) -> Run:
        async with self._server(setup, side) as server, Client(server.url) as client:
            await warm_up(client, setup.prompts("warm-up"))
            facts = {**server.facts, "busy_percent_before": await busy_at_rest()}
            metrics = await self.drive(client, setup.prompts(f"{self.name} {repeat}"))
            return Run(side, repeat, metrics, facts)

    def _server(self, setup: Setup, side: Side) -> AbstractAsyncContextManager[Server]:
        if side == "ours":
            if setup.url is not None:
                return _already_running(setup.url)
            return start_cllm(setup.model, setup.threads, setup.backend)
        assert setup.against is not None
        if setup.against != "llama-server":
            return _already_running(setup.against)
        settings = setup.peer_settings or LLAMA_SERVER[self.peer_key][0]
        return start_llama_server(setup.model_file, setup.threads, settings)


async def busy_at_rest() -> float:
    """How busy the machine is when it should have nothing to do: another program, or a server that spins."""
    await asyncio.sleep(SETTLE_S)
    return busy_percent()


async def warm_up(client: Client, prompts: Prompts) -> None:
    """Touch every path once: a short prompt, a longer one, the chat template."""
    await client.complete(prompts.text(8), 4)
    await client.complete(prompts.text(96), 4)
    await client.chat([{"role": "user", "content": prompts.text(8)}], 4)


def latencies(answers: Sequence[Answer]) -> Metrics:
    """TTFT and inter-token percentiles over all answers, in milliseconds."""
    first = [answer.ttft * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps]
    metrics = {"ttft_p50_ms": percentile(first, 50), "ttft_p95_ms": percentile(first, 95)}
    if gaps:
        metrics |= {f"inter_token_p{percent}_ms": percentile(gaps, percent) for percent in (50, 95, 99)}
    return metrics


def totals(answers: Sequence[Answer]) -> Metrics:
    """What all answers took together, and how much of the prompts the server had in its cache."""
    seconds = max(answer.finished for answer in answers) - min(answer.started for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return {
        "seconds": seconds,
        "tokens_per_s": sum(answer.completion_tokens for answer in answers) / seconds,
        "prompt_tokens": prompt_tokens,
        "cached_percent": 100 * sum(answer.cached_tokens for answer in answers) / prompt_tokens,
    }


@asynccontextmanager
async def _already_running(url: str) -> AsyncIterator[Server]:
    yield Server(url, facts={"url": url})
