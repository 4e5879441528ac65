"""llama-cpp-python's own server: one request at a time, the others wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cllm.machine import install_packages
from cllm_bench.peers.base import Needs, Peer, PeerSettings, describe
from cllm_bench.servers import Server, start_runner

_ENDLESS = 1 << 20


class LlamaCppPython(Peer):
    name = "llama-cpp-python"
    modules = ("llama_cpp", "sse_starlette", "starlette_context")
    install = install_packages("llama-cpp-python[server]")

    def candidates(self, needs: Needs) -> tuple[PeerSettings, ...]:
        return ({"context_tokens": needs.room},)

    @asynccontextmanager
    async def start(self, model: Path, threads: int, settings: PeerSettings) -> AsyncIterator[Server]:
        wanted = {"model": str(model), "threads": threads, **settings}
        async with start_runner(self.name, "llama_cpp_python", wanted) as runner:
            facts = {"settings": describe(settings), "threads": threads, "built_for": runner.ready["built_for"]}
            # It knows no ignore_eos, but does not end an answer below this length.
            yield Server(runner.ready["url"], runner.pid, facts, extra={"min_tokens": _ENDLESS})
