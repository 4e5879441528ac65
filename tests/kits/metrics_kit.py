"""What an engine says of itself: a record of a request, and a snapshot."""

from __future__ import annotations

from array import array

from cllm.engine.observer import RequestRecord
from cllm.engine.stats import EngineSnapshot
from cllm.kv.usage import GroupUsage, KVUsage

KV = KVUsage(
    layout="paged",
    unit_tokens=16,
    bytes_per_unit=1024,
    total=100,
    free=60,
    evictable=30,
    referenced=10,
    peak=55,
    sequences_running=2,
    sequences_held=3,
    free_segments=4,
    largest_free_span=40,
    evictions=7,
    allocation_failures=1,
    compactions=2,
    moved_bytes=4096,
    query_tokens=200,
    hit_tokens=150,
    groups=(GroupUsage("full", 1024, used=8, evictable=28), GroupUsage("window", 2048, used=1, evictable=1)),
    snapshots=2,
    snapshots_taken=9,
    snapshots_used=4,
    snapshots_dropped=7,
)
SNAPSHOT = EngineSnapshot(
    kv=KV,
    running=2,
    waiting=5,
    steps=11,
    preemptions=3,
    rebuilds=1,
    position_mismatches=1,
    batch_splits=6,
    prompt_tokens=200,
    cached_tokens=150,
    generated_tokens=99,
    dropped_tokens=512,
    drafted_tokens=96,
    accepted_drafts=72,
    finished={"stop": 4, "length": 3, "cancelled": 2},
    uptime_s=12.5,
    last_step_s=0.01,
    step_token_budget=128,
)


def record(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": "r",
        "reason": "stop",
        "error": None,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "known_tokens": 4,
        "generated_tokens": 3,
        "queued_s": 0.02,
        "ttft_s": 0.3,
        "prefill_s": 0.28,
        "decode_s": 0.09,
        "total_s": 0.39,
        "inter_token_s": array("f", [0.04, 0.045]),
        "preemptions": 0,
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]
