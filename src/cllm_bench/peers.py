"""The peers: llama.cpp's own server, with its best settings for each work, and any server by its address."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cllm.backends.llama_cpp.discovery import WHEEL
from cllm.machine import install_packages
from cllm_bench.errors import BenchError
from cllm_bench.servers import Server, start_runner

LLAMA_SERVER = "llama-server"

# Split buffers spare a slot the walk over its neighbours' cells. Its default batch of 2048 lets a long prompt hold
# everybody up for seconds; a small one costs little where streams run. Flash attention, continuous batching, prompt
# caching in the slots and the cache of idle prompts in memory (8 GiB) are always on: nothing here runs faster without.
_BATCH = {"stall": 64, "mixed": 256}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a workload asks of a server."""

    workload: str
    at_once: int
    """Most requests that run together."""
    tokens: int
    """Longest sequence, about."""

    @property
    def room(self) -> int:
        """Tokens to reserve for one sequence: a chat template and the tokenizer may add some."""
        return -(-int(self.tokens * 1.1 + 64) // 512) * 512


def check(names: Sequence[str], *, must_run: bool) -> tuple[str, ...]:
    """The peers to run beside us, known and installed; `none` is nobody."""
    wanted = tuple(dict.fromkeys(name for name in names if name != "none"))
    for name in wanted:
        if "://" not in name and name != LLAMA_SERVER:
            raise BenchError(
                f"--against is {name!r}; it must be {LLAMA_SERVER}, none or an address such as http://127.0.0.1:8000"
            )
        if name == LLAMA_SERVER and must_run and find_spec("xllamacpp") is None:
            raise BenchError(
                f"the peer {name} is not installed: {install_packages(WHEEL)}, or leave it out with --against none"
            )
    return wanted


def llama_settings(needs: Needs) -> Mapping[str, int]:
    """`slots` run at a time, each with `slot_tokens` of room; `batch` is the most prompt tokens in a step."""
    return {"slots": needs.at_once, "slot_tokens": needs.room, "batch": _BATCH.get(needs.workload, 2048)}


@asynccontextmanager
async def start_llama_server(
    model: Path, threads: int, needs: Needs, *, swa_full: bool = False
) -> AsyncIterator[Server]:
    """`swa_full`: layers with a window keep everything."""
    settings = {**llama_settings(needs), **({"swa_full": True} if swa_full else {})}
    wanted = {"model": str(model), "threads": threads, **settings}
    async with start_runner(LLAMA_SERVER, "llama_server", wanted) as runner:
        described = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
        yield Server(runner.ready["url"], runner.pid, {"settings": described, "threads": threads})
