"""How the peer is run: llama.cpp's own server, with its best settings for each work."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from cllm.bench.client import BenchError


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Settings of llama-server that matter here.

    Flash attention, continuous batching, prompt caching in the slots and the cache of idle prompts in memory
    (8 GiB) are on in all of them: none of these workloads runs faster without.
    """

    parallel: int
    """Slots: how many requests it computes at a time."""
    slot_tokens: int
    """Room for one request. The whole context is `parallel` times as large."""
    unified: bool = False
    """One K/V buffer for all slots; otherwise one for each."""
    batch: int = 2048
    """Most prompt tokens it takes into one step; nobody gets a token while a step runs."""

    def __str__(self) -> str:
        layout = "unified" if self.unified else "split"
        return f"slots {self.parallel} x {self.slot_tokens} tokens, {layout} KV, batch {self.batch}"


# The first of each is the one that is used; `--tune` measures them all. Split buffers spare a slot the walk over its
# neighbours' cells; unified ones let a prompt that was moved out to memory come back without a copy per slot.
LLAMA_SERVER: dict[str, tuple[PeerSettings, ...]] = {
    "sequential": (
        PeerSettings(parallel=1, slot_tokens=512),
        PeerSettings(parallel=4, slot_tokens=512),
    ),
    "batch-1": (
        PeerSettings(parallel=1, slot_tokens=512),
        PeerSettings(parallel=1, slot_tokens=512, unified=True),
    ),
    "batch-8": (
        PeerSettings(parallel=8, slot_tokens=512),
        PeerSettings(parallel=8, slot_tokens=512, unified=True),
        PeerSettings(parallel=8, slot_tokens=512, batch=512),
    ),
    "prefix": (
        PeerSettings(parallel=8, slot_tokens=1024),
        PeerSettings(parallel=8, slot_tokens=1024, unified=True),
        PeerSettings(parallel=4, slot_tokens=1024),
    ),
    "chat": (
        PeerSettings(parallel=4, slot_tokens=1024),
        PeerSettings(parallel=12, slot_tokens=1024),
        PeerSettings(parallel=4, slot_tokens=1024, unified=True),
        PeerSettings(parallel=12, slot_tokens=1024, unified=True),
    ),
    "stall": (
        # Its default batch of 2048 lets a long prompt hold everybody up for seconds; a small one costs little here.
        PeerSettings(parallel=4, slot_tokens=3072, batch=64),
        PeerSettings(parallel=4, slot_tokens=3072, batch=32),
        PeerSettings(parallel=4, slot_tokens=3072, unified=True, batch=64),
        PeerSettings(parallel=4, slot_tokens=3072, batch=256),
        PeerSettings(parallel=4, slot_tokens=3072),
    ),
}


def require_llama_server() -> None:
    if find_spec("xllamacpp") is None:
        raise BenchError(
            "the peer llama-server is not installed: pip install 'cllm[bench]', or leave it out with --against none"
        )
