"""A cost model in round numbers."""

from __future__ import annotations

from cllm_bench.simulate.cost import CostModel

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
