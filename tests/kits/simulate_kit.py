"""Small builders that the simulator's tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cllm_bench.simulate.cluster import Cluster
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.settings import ROUTINGS, Settings
from cllm_bench.simulate.traces import ListTrace, TokenSource, TracedRequest

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
    move_bytes_per_s=1e8,
    kv_bytes_per_token=1000,
)


def settings_for(policy: str) -> st.SearchStrategy[Settings]:
    """Small servers, so that memory runs out, queues fill up and requests are overdue."""
    return st.builds(
        Settings,
        policy=st.just(policy),
        blocks=st.sampled_from([16, 40, 120]),
        block_size=st.sampled_from([4, 16]),
        max_running=st.sampled_from([2, 5, 40]),
        step_tokens=st.sampled_from([16, 64]),
        eviction=st.sampled_from(["lru", "slru"]),
        threshold=st.sampled_from([0.5, 0.8, 1.0]),
        timeout_s=st.sampled_from([0.0, 0.0, 2.0]),
        queue=st.sampled_from([0, 0, 4]),
        replicas=st.sampled_from([1, 1, 2]),
        routing=st.sampled_from(ROUTINGS),
        reserve=st.sampled_from(["exact", "pow2", "5", "1"]),
        window=st.just(20),
    )


@st.composite
def traces(draw: st.DrawFn, most: int = 25) -> ListTrace:
    """Requests that share beginnings, some followed by others."""
    source = TokenSource()
    systems = [source.take(draw(st.sampled_from([5, 16, 40]))) for _ in range(2)]
    lengths = st.integers(1, 60)
    gaps = draw(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=most))
    now = 0.0
    items = []
    for gap in gaps:
        now += gap
        prompt = (draw(st.sampled_from(systems)), source.take(draw(lengths)))
        answer = (source.take(draw(lengths)),)
        followers = []
        for think in draw(st.lists(st.sampled_from([0.0, 0.3]), max_size=2)):
            text = (*prompt, *answer, source.take(draw(st.integers(1, 8))))
            followers.append(TracedRequest(think, text, (source.take(draw(st.integers(1, 20))),)))
        items.append(TracedRequest(now, prompt, answer, tuple(followers)))
    return ListTrace("random", tuple(items))


def run_cluster(trace: ListTrace, settings: Settings, *, fast_forward: bool) -> Cluster:
    cluster = Cluster(trace, settings, COST, fast_forward=fast_forward)
    cluster.run()
    return cluster


def everything(cluster: Cluster) -> dict[str, Any]:
    """All that a simulation can be asked about, for comparison."""
    tally = cluster.tally
    return {
        "steps": tally.steps,
        "computed": tally.computed_tokens,
        "splits": tally.batch_splits,
        "ends": dict(tally.ends),
        "refused": (tally.too_large, tally.turned_away),
        "ttft": list(tally.ttft),
        "total": list(tally.total),
        "gaps": tally.gaps.tolist(),
        "samples": tally.samples,
        "waste": tally.waste,
        "clocks": [server.now for server in cluster.servers],
        "usage": [server.kv.usage() for server in cluster.servers],
        "refusals": [server.kv.refusals for server in cluster.servers],
        "preemptions": [server.scheduler.preemptions for server in cluster.servers],
        "generated": [server.scheduler.generated_tokens for server in cluster.servers],
        "cached": [server.scheduler.cached_tokens for server in cluster.servers],
    }
