"""All workloads by name. One name may stand for several sizes of the same work."""

from __future__ import annotations

from cllm_bench.workloads.aged import Aged
from cllm_bench.workloads.base import Workload
from cllm_bench.workloads.batch import Batch
from cllm_bench.workloads.chat import Chat
from cllm_bench.workloads.cluster_hits import ClusterHits
from cllm_bench.workloads.cluster_latency import ClusterLatency
from cllm_bench.workloads.cluster_losses import ClusterLosses
from cllm_bench.workloads.drafts import Drafts
from cllm_bench.workloads.embed import Embed
from cllm_bench.workloads.gap import Gap
from cllm_bench.workloads.hostile import Hostile
from cllm_bench.workloads.memory_burst import MemoryBurst
from cllm_bench.workloads.micro import Micro
from cllm_bench.workloads.mixed import Mixed
from cllm_bench.workloads.overhead import Overhead
from cllm_bench.workloads.prefix import Prefix
from cllm_bench.workloads.router import Router
from cllm_bench.workloads.sequential import Sequential
from cllm_bench.workloads.snapshots import Snapshots
from cllm_bench.workloads.soak import Soak
from cllm_bench.workloads.stall import Stall
from cllm_bench.workloads.structured import Structured
from cllm_bench.workloads.window import Window

WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "sequential": (Sequential(answer_tokens=1, requests=200), Sequential(answer_tokens=16, requests=60)),
    "batch": (Batch(clients=1), Batch(clients=8), Batch(clients=32)),
    "prefix": (Prefix(),),
    "chat": (Chat(),),
    "stall": (Stall(),),
    "gap": (Gap(),),
    "hostile": (Hostile(),),
    "mixed": (Mixed(),),
    "soak": (Soak(),),
    "aged": (Aged(),),
    "window": (Window(),),
    "drafts": (Drafts(),),
    "embed": (Embed(),),
    "structured": (Structured(),),
    "overhead": (Overhead(),),
    "memory-burst": (MemoryBurst(),),
    "micro": (Micro(),),
    "snapshots": (Snapshots(),),
    "router": (Router(),),
    "cluster-latency": (ClusterLatency(),),
    "cluster-hits": (ClusterHits(),),
    "cluster-losses": (ClusterLosses(),),
}

LONG = (
    "soak", "aged", "window", "drafts", "embed", "structured", "hostile", "gap", "memory-burst",
    "cluster-latency", "cluster-hits", "cluster-losses",
)  # fmt: skip
"""Too long for the short set, or in need of the extra `cluster`."""
SLOW = ("overhead",)
"""Not in the short set if it is quick: llama.cpp is started several times."""
ONCE = ("soak", "aged", "window", "hostile", "gap", "memory-burst", "cluster-hits", "cluster-losses")
"""One pass is enough: it is long, or the sides take turns within it."""

SHORT: tuple[Workload, ...] = (
    *WORKLOADS["sequential"],
    Batch(clients=1),
    Batch(clients=8, requests_each=1),
    Batch(clients=32),
    Prefix(),
    Chat(),
    Stall(),
    Mixed(duration=12.0),
    Overhead(rounds=10),
    Micro(),
    Snapshots(),
    Router(),
)
"""Everything but what is in `LONG`, in less than ten minutes on two cores, with one peer."""
