"""llama.cpp's own server, with its best settings for each work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cllm.backends.llama_cpp.discovery import WHEEL
from cllm.machine import install_packages
from cllm_bench.peers.base import Needs, Peer, PeerSettings, describe
from cllm_bench.servers import Server, start_runner

# What is changed, best first. Split buffers spare a slot the walk over its neighbours' cells; unified ones let a prompt
# that was moved out to memory come back without a copy per slot. Flash attention, continuous batching, prompt caching
# in the slots and the cache of idle prompts in memory (8 GiB) are always on: nothing here runs faster without.
_CHANGES: dict[str, tuple[PeerSettings, ...]] = {
    "sequential": ({}, {"slots": 4}),
    "prefix": ({}, {"unified": True}, {"slots": 4}),
    "chat": ({}, {"slots": 12}, {"unified": True}, {"slots": 12, "unified": True}),
    # Its default batch of 2048 lets a long prompt hold everybody up for seconds; a small one costs little here.
    "stall": ({"batch": 64}, {"batch": 32}, {"batch": 64, "unified": True}, {"batch": 256}, {}),
    "mixed": ({"batch": 256}, {"batch": 64}, {}, {"batch": 256, "unified": True}),
    "soak": ({"batch": 256},),
}
_OTHERWISE: tuple[PeerSettings, ...] = ({}, {"unified": True}, {"batch": 512})


class LlamaServer(Peer):
    name = "llama-server"
    modules = ("xllamacpp",)
    install = install_packages(WHEEL)

    def candidates(self, needs: Needs) -> tuple[PeerSettings, ...]:
        """`slots` run at a time, each with `slot_tokens` of room; `batch` is the most prompt tokens in a step."""
        plain: PeerSettings = {"slots": needs.at_once, "slot_tokens": needs.room, "unified": False, "batch": 2048}
        return tuple({**plain, **changes} for changes in _CHANGES.get(needs.workload, _OTHERWISE))

    @asynccontextmanager
    async def start(self, model: Path, threads: int, settings: PeerSettings) -> AsyncIterator[Server]:
        wanted = {"model": str(model), "threads": threads, **settings}
        async with start_runner(self.name, "llama_server", wanted) as runner:
            facts = {"settings": describe(settings), "threads": threads, "built_for": runner.ready["built_for"]}
            yield Server(runner.ready["url"], runner.pid, facts)
