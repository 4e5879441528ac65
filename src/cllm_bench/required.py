"""What must be reached on the llama_cpp backend. The figures themselves name what the native one, the default, must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cllm_bench.figures import Figure, Limit, own, times_the_peer

_LLAMA_CPP: dict[tuple[str, str], Limit] = {
    ("batch", "tokens_per_s"): times_the_peer(1.0),
    ("prefix", "seconds"): times_the_peer(4.0),
    ("chat", "seconds"): times_the_peer(1.5),
    ("stall", "worst_gap_ms"): own(400.0),
    ("gap", "stream_p99_ms"): own(1000.0),
}


def for_backend(backend: str | None, workload: str, figures: Sequence[Figure]) -> list[Figure]:
    if backend != "llama_cpp":
        return list(figures)
    return [replace(figure, limit=_LLAMA_CPP.get((workload, figure.key), figure.limit)) for figure in figures]
