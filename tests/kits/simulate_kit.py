"""A cost model in round numbers, and traces that are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.traces import TracedRequest

COST = CostModel(
    name="test",
    description="round numbers",
    step_s=0.004,
    row_s=0.002,
    context_s=1e-6,
    chunk_s=0.003,
    prompt_token_s=0.0007,
    attended_s=1e-7,
    overhead_s=0.0005,
    overhead_row_s=1e-5,
    kv_bytes_per_token=1000,
)


@dataclass(frozen=True)
class ListTrace:
    name: str
    items: tuple[TracedRequest, ...]

    @property
    def requests(self) -> int:
        return sum(1 + _count_followers(item) for item in self.items)

    def __iter__(self) -> Iterator[TracedRequest]:
        return iter(self.items)


def _count_followers(request: TracedRequest) -> int:
    return sum(1 + _count_followers(follower) for follower in request.followers)
