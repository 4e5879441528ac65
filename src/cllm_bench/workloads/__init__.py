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
from cllm_bench.workloads.hostile import Hostile
from cllm_bench.workloads.kv_bytes import KvBytes
from cllm_bench.workloads.memory_burst import MemoryBurst
from cllm_bench.workloads.micro import Micro
from cllm_bench.workloads.mixed import Mixed
from cllm_bench.workloads.overhead import Overhead
from cllm_bench.workloads.prefix import Prefix
from cllm_bench.workloads.router import Router
from cllm_bench.workloads.sequential import Sequential
from cllm_bench.workloads.stall import Stall
from cllm_bench.workloads.structured import Structured
from cllm_bench.workloads.torch import Torch
from cllm_bench.workloads.torch_host import TorchHost
from cllm_bench.workloads.torch_invariance import TorchInvariance
from cllm_bench.workloads.turns import Turns

WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "sequential": (Sequential(answer_tokens=1, requests=200), Sequential(answer_tokens=16, requests=60)),
    "batch": (Batch(clients=1), Batch(clients=8), Batch(clients=32)),
    "prefix": (Prefix(),),
    "chat": (Chat(),),
    "turns": (Turns(),),
    "stall": (Stall(),),
    "hostile": (Hostile(),),
    "mixed": (Mixed(),),
    "aged": (Aged(),),
    "drafts": (Drafts(),),
    "structured": (Structured(),),
    "overhead": (Overhead(),),
    "memory-burst": (MemoryBurst(),),
    "kv-bytes": (KvBytes(),),
    "micro": (Micro(),),
    "router": (Router(),),
    "cluster-latency": (ClusterLatency(),),
    "cluster-hits": (ClusterHits(),),
    "cluster-losses": (ClusterLosses(),),
    "torch": (Torch(),),
    "torch-invariance": (TorchInvariance(),),
    "torch-host": (TorchHost(),),
}

LONG = (
    "turns", "aged", "drafts", "structured", "hostile", "memory-burst", "kv-bytes",
    "cluster-latency", "cluster-hits", "cluster-losses", "torch", "torch-invariance", "torch-host",
)  # fmt: skip
"""Too long for the short set, or in need of the extra `cluster` or a GPU."""
ONCE = (
    "turns", "aged", "hostile", "memory-burst", "kv-bytes", "cluster-hits", "cluster-losses", "torch-invariance",
    "torch-host",
)  # fmt: skip
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
    Overhead(),
    Micro(),
    Router(),
)
"""Everything but what is in `LONG`, in less than ten minutes on two cores, with one peer."""
