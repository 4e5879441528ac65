"""What the machine can do at most, beside an engine whose weights are in memory."""

from __future__ import annotations

from cllm._native import Engine
from cllm.machine import mib, read_memory_limits, tightest
from cllm_bench._limits import measure_limits
from cllm_bench.errors import BenchError

MOST_READ_BYTES = 1 << 30
"""More than caches hold, so that larger weights are read no faster or slower."""


def read_bytes(weight_bytes: int) -> int:
    """The memory that is taken, beside the weights, to see how fast so many bytes can be read."""
    return min(weight_bytes, MOST_READ_BYTES)


def machine_limits(engine: Engine, seconds: float) -> dict[str, float]:
    taken = read_bytes(engine.weight_bytes)
    room = tightest(read_memory_limits())
    if taken > room.free:
        raise BenchError(f"measuring how fast memory is read takes {mib(taken)}, more than {room}; make room")
    return measure_limits(engine.instruction_set, engine.threads, seconds, taken)
