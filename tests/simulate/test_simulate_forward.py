"""Steps taken together give what single steps give, to the last bit; and nothing outlives its request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm_bench.simulate import forward as forward_module
from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.settings import POLICIES, Settings
from cllm_bench.simulate.synthetic import Shape, SyntheticTrace
from cllm_bench.simulate.traces import ListTrace
from simulate_kit import everything, run_cluster, settings_for, traces
from thorough import sampled


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=sampled(60), deadline=None)
@given(data=st.data())
def test_steps_taken_together_equal_single_steps(policy: str, data: st.DataObject) -> None:
    trace, chosen = data.draw(traces()), data.draw(settings_for(policy))
    together = run_cluster(trace, chosen, fast_forward=True)
    singly = run_cluster(trace, chosen, fast_forward=False)
    assert everything(together) == everything(singly)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=sampled(40), deadline=None)
@given(data=st.data())
def test_every_request_ends_and_leaves_nothing_behind(policy: str, data: st.DataObject) -> None:
    trace, chosen = data.draw(traces()), data.draw(settings_for(policy))
    cluster = run_cluster(trace, chosen, fast_forward=True)
    tally = cluster.tally
    assert tally.ended + tally.too_large + tally.turned_away == cluster.arrived
    lost = tally.ended - tally.ends["length"] + tally.too_large + tally.turned_away
    # Who follows a request that did not end well never comes, and nobody else is missing.
    assert cluster.arrived == trace.requests if lost == 0 else cluster.arrived <= trace.requests
    for server in cluster.servers:
        usage = server.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert usage.referenced == 0 and not server.scheduler.has_work and not server.scheduler.requests
        server.kv.check()


def test_most_steps_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = 0
    step = SimulatedServer._step

    def counted(server: SimulatedServer) -> None:
        nonlocal alone
        alone += 1
        step(server)

    monkeypatch.setattr(SimulatedServer, "_step", counted)
    trace = SyntheticTrace("poisson", 200, 1.0, Shape(output="200"), seed=3)
    cluster = run_cluster(ListTrace("poisson", tuple(trace)), Settings(), fast_forward=True)
    assert alone < cluster.tally.steps / 10


@pytest.mark.parametrize("policy", ["contiguous", "compaction", "paged", "paged+prefix"])
def test_a_full_memory_does_not_hinder_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody always waits for room; runs still get long, and refusals are counted as if each had been asked for."""
    lengths: list[int] = []
    take = forward_module._Run.take

    def noted(run: forward_module._Run, *args: object) -> None:
        take(run, *args)  # type: ignore[arg-type]
        lengths.append(run.done)

    monkeypatch.setattr(forward_module._Run, "take", noted)
    shape = Shape(prompt="40", output="150", systems=0)
    trace = ListTrace("full", tuple(SyntheticTrace("poisson", 40, 100.0, shape, seed=1)))
    chosen = Settings(policy=policy, blocks=60)
    together = run_cluster(trace, chosen, fast_forward=True)
    assert max(lengths) > 20
    assert together.servers[0].kv.refusals.total > 500
    assert everything(together) == everything(run_cluster(trace, chosen, fast_forward=False))
