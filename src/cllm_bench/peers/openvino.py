"""OpenVINO GenAI's continuous batching, behind a small server of ours: it has none of its own in Python."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cllm.machine import install_packages
from cllm_bench.peers.base import Needs, Peer, PeerSettings, describe
from cllm_bench.servers import Server, start_runner

_CACHE_GB = 2


class OpenVino(Peer):
    name = "openvino"
    modules = ("openvino_genai",)
    install = install_packages("openvino-genai")

    def candidates(self, needs: Needs) -> tuple[PeerSettings, ...]:
        """`batched_tokens` is the most in a step; keys and values in 8 bits are its own default on a CPU."""
        plain: PeerSettings = {"batched_tokens": 256, "cache_gb": _CACHE_GB, "kv": "u8"}
        return (plain, {**plain, "batched_tokens": 1024}, {**plain, "batched_tokens": 64}, {**plain, "kv": "f16"})

    @asynccontextmanager
    async def start(self, model: Path, threads: int, settings: PeerSettings) -> AsyncIterator[Server]:
        wanted = {"model": str(model), "threads": threads, **settings}
        async with start_runner(self.name, "openvino_server", wanted) as runner:
            facts = {"settings": describe(settings), "threads": threads, "version": runner.ready["version"]}
            yield Server(runner.ready["url"], runner.pid, facts)
