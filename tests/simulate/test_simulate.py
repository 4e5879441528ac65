"""`cllm simulate`: policies beside each other, sweeps, several servers, and what it says and writes."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cllm.cli import app, main
from cllm.engine.observer import RequestRecord
from cllm.errors import ConfigError
from cllm_bench.simulate import cluster as cluster_module
from cllm_bench.simulate.cluster import Cluster, simulate
from cllm_bench.simulate.commands import TraceSource, parse_sweeps, run_grid
from cllm_bench.simulate.cost import load_cost
from cllm_bench.simulate.report import count, short
from cllm_bench.simulate.results import Result
from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.settings import (
    KEYS,
    ROUTINGS,
    Settings,
    changed,
    grid,
    parse_assignment,
    parse_sweep,
)
from cllm_bench.simulate.synthetic import SHAPES, Shape, SyntheticTrace
from cllm_bench.simulate.tally import Tally, percentile
from cllm_bench.simulate.traces import TokenSource, TracedRequest
from simulate_kit import COST, ListTrace
from thorough import sampled, slow


def chats(requests: int = 150, rate: float = 8.0, **shape: Any) -> ListTrace:
    trace = SyntheticTrace("chats", requests, rate, Shape(**{"longest": 1500, "think_s": 1.0, **shape}), seed=1)
    return ListTrace("chats", tuple(trace))


def run(trace: ListTrace, **values: Any) -> Result:
    return simulate(trace, replace(Settings(blocks=300), **values), COST)


# -- one server ----------------------------------------------------------------------------------------------------


def small_servers() -> st.SearchStrategy[Settings]:
    """Memory runs out, queues fill up and requests are overdue."""
    return st.builds(
        Settings,
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


@settings(max_examples=sampled(40), deadline=None)
@given(traces(), small_servers())
def test_every_request_ends_and_leaves_nothing_behind(trace: ListTrace, chosen: Settings) -> None:
    cluster = Cluster(trace, chosen, COST)
    cluster.run()
    tally = cluster.tally
    assert tally.ended + tally.too_large + tally.turned_away == cluster.arrived
    lost = tally.ended - tally.ends["length"] + tally.too_large + tally.turned_away
    # Who follows a request that did not end well never comes, and nobody else is missing.
    assert cluster.arrived == trace.requests if lost == 0 else cluster.arrived <= trace.requests
    for server in cluster.servers:
        usage = server.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert usage.referenced == 0 and not server.busy and not server.scheduler.requests.by_id
        server.kv.check()


def test_what_can_never_fit_is_counted_and_the_rest_goes_on() -> None:
    small = TracedRequest(0.0, ((0, 40),), ((40, 10),))
    large = TracedRequest(0.0, ((1000, 4000),), ((5000, 900),))
    figures = run(ListTrace("two", (small, large))).figures
    assert (figures["completed"], figures["too_large"], figures["requests"]) == (1, 1, 2)


def test_queues_and_time_limits_turn_requests_away() -> None:
    crowd = ListTrace("crowd", tuple(TracedRequest(0.0, ((n * 100, 50),), ((n * 100 + 50, 20),)) for n in range(30)))
    figures = run(crowd, queue=4, max_running=2).figures
    assert figures["turned_away"] > 10
    assert figures["completed"] + figures["turned_away"] == 30
    follower = TracedRequest(0.0, ((9000, 50),), ((9050, 20),))
    followed = ListTrace("followed", tuple(replace(request, followers=(follower,)) for request in crowd))
    figures = run(followed, queue=4, max_running=2).figures
    assert figures["requests"] == 60 and figures["never_sent"] == figures["turned_away"] > 10
    figures = run(crowd, timeout_s=0.5, max_running=2).figures
    assert figures["timed_out"] > 10 and figures["completed"] + figures["timed_out"] == 30


@pytest.mark.parametrize("kind", ["chats", "agents"])
def test_worth_is_lru_where_all_layers_attend_to_everything(kind: str) -> None:
    shape = replace(SHAPES[kind], prompt="40", output="20", system="200", message="30", think_s=1.0, tool_s=0.2)
    trace = SyntheticTrace(kind, 120, 8.0, shape, seed=1)
    worth, lru = (simulate(trace, Settings(blocks=200, eviction=name), COST).figures for name in ("worth", "lru"))
    assert worth["evicted_tokens"] > 0
    assert worth["saved_s"] >= 0.99 * lru["saved_s"]


@pytest.mark.parametrize("layers", [{"window": 64, "window_bytes_per_token": 6000}, {"state_bytes": 400_000}])
def test_worth_saves_more_of_agents_prompts_than_lru(layers: dict[str, int]) -> None:
    shape = replace(SHAPES["agents"], prompt="100", output="30", system="uniform:1000:1500", message="80", think_s=60.0)
    cost = replace(COST, prompt_token_s=1e-5, **layers)
    saved = Counter[str]()
    for seed in range(2):
        trace = SyntheticTrace("agents", 200, 0.5, shape, seed)
        for name in ("worth", "lru"):
            figures = simulate(trace, Settings(blocks=1500, eviction=name), cost).figures
            assert figures["completed"] == 200 and figures["evicted_tokens"] > 0
            saved[name] += figures["saved_s"]
    assert saved["worth"] > saved["lru"]


def test_a_page_draws_what_was_varied(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--requests", "20", "--what-if", "blocks=200,400", "--what-if", "eviction=lru,worth"]
    done = CliRunner().invoke(app, ["simulate", *options, "--report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure>") == 4 and "Computing saved / by lru" in page and "<td" in page


# -- several servers -----------------------------------------------------------------------------------------------


def test_more_servers_answer_sooner_and_prefixes_stay_together() -> None:
    trace = chats(rate=30.0)
    alone = run(trace, replicas=1).figures
    turns = run(trace, replicas=3).figures
    by_prefix = run(trace, replicas=3, routing="prefix").figures
    assert {f["completed"] for f in (alone, turns, by_prefix)} == {150}
    assert turns["ttft_p95_s"] < alone["ttft_p95_s"]
    assert by_prefix["hit_rate"] > turns["hit_rate"] + 0.1


def test_round_robin_takes_turns() -> None:
    cluster = Cluster(chats(30), Settings(replicas=3), COST)
    cluster.run()
    assert [server.submitted for server in cluster.servers] == [10, 10, 10]


def test_a_shared_prefix_does_not_drown_one_server() -> None:
    requests = [TracedRequest(n / 50, ((0, 640), (1000 + n * 100, 90)), ((9, 10),)) for n in range(200)]
    cluster = Cluster(ListTrace("shared", tuple(requests)), Settings(replicas=4, routing="prefix"), COST)
    cluster.run()
    assert min(server.submitted for server in cluster.servers) > 20


def test_routing_policies_side_by_side() -> None:
    trace = chats(rate=30.0)
    figures = {routing: run(trace, replicas=4, routing=routing).figures for routing in ROUTINGS}
    assert {f["completed"] for f in figures.values()} == {150}
    by_prefix, by_chance = figures["prefix"], figures["random"]
    assert by_prefix["hit_rate"] > by_chance["hit_rate"] + 0.1
    assert by_prefix["ttft_p95_s"] < by_chance["ttft_p95_s"]
    assert figures["consistent-hash"]["hit_rate"] > by_chance["hit_rate"]
    assert all(1.0 <= f["balance"] < 4.0 for f in figures.values())
    assert run(trace, replicas=4, routing="prefix").figures["ttft_p95_s"] == by_prefix["ttft_p95_s"]


def test_a_router_that_learns_late_finds_less() -> None:
    soon, late = (
        run(chats(rate=30.0, think_s=0.1), replicas=4, routing="prefix", report_s=report_s).figures["hit_rate"]
        for report_s in (0.1, 60.0)
    )
    assert soon > late


def test_many_servers() -> None:
    for trace in (
        chats(60),
        ListTrace("open", tuple(TracedRequest(n * 9.0, ((n * 99, 50),), ((7, 3),)) for n in range(60))),
    ):
        figures = run(trace, replicas=200, routing="prefix", blocks=200).figures
        assert figures["completed"] == 60


@settings(max_examples=sampled(20), deadline=None)
@given(st.integers(1, 3), st.sampled_from(ROUTINGS))
def test_no_request_is_answered_before_it_came(replicas: int, routing: str) -> None:
    figures = run(chats(60, rate=20.0), replicas=replicas, routing=routing).figures
    assert figures["completed"] == 60
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p95_s"] <= figures["total_p99_s"]


@settings(max_examples=sampled(20), deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from(ROUTINGS),
    st.integers(1, 4),
    st.sampled_from(["chats", "conversation", "toolagent", "poisson"]),
    st.integers(0, 3),
)
def test_every_request_ends_exactly_once(replicas: int, routing: str, routers: int, kind: str, seed: int) -> None:
    shape = replace(SHAPES[kind], prompt="exponential:200", system="exponential:200", message="40", longest=900)
    trace = SyntheticTrace(kind, 60, 4.0 * replicas, replace(shape, think_s=1.0), seed)
    chosen = Settings(blocks=300, replicas=replicas, routing=routing, routers=routers, queue=3, timeout_s=20.0)
    with ended_requests() as ended:
        figures = simulate(trace, chosen, COST).figures
    assert max(ended.values(), default=0) <= 1, "a server ended a request twice"
    taken = figures["completed"] + figures["timed_out"] + figures["failed"]
    assert len(ended) == taken
    assert taken + figures["turned_away"] + figures["too_large"] + figures["never_sent"] == 60 == figures["requests"]


@contextmanager
def ended_requests() -> Iterator[Counter[tuple[int, str]]]:
    """How often each request of each server ended."""
    ended: Counter[tuple[int, str]] = Counter()
    on_finished = SimulatedServer.on_finished

    def noted(server: SimulatedServer, record: RequestRecord) -> None:
        ended[id(server), record.request_id] += 1
        on_finished(server, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedServer, "on_finished", noted)
        yield ended


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_same_seed_gives_the_same_result(routing: str) -> None:
    def figures(seed: int) -> dict[str, float]:
        trace = SyntheticTrace("chats", 150, 30.0, Shape(longest=1500, think_s=1.0), seed)
        found = simulate(trace, Settings(blocks=300, replicas=4, routing=routing, routers=2), COST).figures
        return {name: value for name, value in found.items() if "wall" not in name}

    assert figures(1) == figures(1) != figures(2)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_replica_is_the_plain_simulation(routing: str) -> None:
    """Behind any router, with nobody else to choose: the server by itself, without a cluster around it."""
    trace = SyntheticTrace("poisson", 120, 6.0, Shape(longest=1500), seed=1)
    chosen = Settings(blocks=300, routing=routing)
    tally = Tally()
    server = SimulatedServer(chosen, COST, tally, lambda traced, moment: None)
    for traced in trace:
        while server.busy and server.now < traced.arrival:
            server.step()
        server.submit(traced, traced.arrival)
    while server.busy:
        server.step()
    figures = simulate(trace, chosen, COST).figures
    assert figures["completed"] == tally.ends["length"] == 120
    assert figures["steps"] == tally.steps and figures["computed_tokens"] == tally.computed_tokens
    assert figures["ttft_p99_s"] == percentile(tally.ttft, 0.99)
    assert figures["total_p99_s"] == percentile(tally.total, 0.99)
    assert figures["balance"] == 1.0


@slow
def test_a_small_cluster_finds_as_much_as_one_large_server() -> None:
    """200 users of 20 system prompts: within 5 % of one server with all the memory; random routing far below."""
    shape = Shape(systems=20, system="400", popularity=1.0, longest=4096)
    trace = SyntheticTrace("chats", 600, 5.0, shape, seed=0)
    cost = load_cost("smollm2")

    def hits(**values: Any) -> float:
        return simulate(trace, Settings(**values), cost).figures["hit_rate"]

    large = hits(blocks=4000)
    assert hits(blocks=1000, replicas=4, routing="prefix") > 0.95 * large
    assert hits(blocks=1000, replicas=4, routing="random") < 0.75 * large


def test_several_routers_find_almost_as_much_as_one() -> None:
    trace = chats(rate=30.0)
    one, four = (run(trace, replicas=4, routing="prefix", routers=routers).figures for routers in (1, 4))
    by_chance = run(trace, replicas=4, routing="random").figures
    assert one["completed"] == four["completed"] == 150
    assert four["hit_rate"] > (one["hit_rate"] + by_chance["hit_rate"]) / 2
    assert four != one, "none knows what the others have sent"


def test_a_router_that_remembers_little_finds_less() -> None:
    trace = chats(rate=30.0)
    little, much = (run(trace, replicas=4, routing="prefix", index_blocks=n).figures["hit_rate"] for n in (8, 10**6))
    assert little < much


# -- settings and sweeps -------------------------------------------------------------------------------------------


def test_another_block_size_keeps_the_memory() -> None:
    base = Settings(blocks=1000, block_size=16)
    assert changed(base, {"block-size": 64}).blocks == 250
    assert changed(base, {"block-size": 64, "blocks": 1000}).kv_tokens == 64_000


def test_every_setting_can_be_written() -> None:
    texts = {
        "eviction": "slru",
        "routing": "prefix",
        "blocks": "1e3",
        "watermark": "0",
    }
    for key in KEYS:
        name, value = parse_assignment(f"{key}={texts.get(key, '1')}")
        assert changed(Settings(), {name: value}) is not None
    assert parse_assignment("blocks=1e3") == ("blocks", 1000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("blocks", "write key=value"),
        ("size=4", "there is no setting 'size'"),
        ("blocks=many", "blocks=many: it must be a whole number from 2 to 100,000,000"),
        ("blocks=1e9", "blocks=1e9: it must be a whole number from 2 to 100,000,000"),
        ("replicas=1e99", "replicas=1e99: it must be a whole number from 1 to 10,000"),
        ("blocks=2.5", "whole number"),
        ("threshold=2", "threshold=2: it must be a number from 0.01 to 1"),
        ("timeout=nan", "timeout=nan"),
        ("eviction=random", "it must be one of worth, lru, slru"),
    ],
)
def test_wrong_settings_are_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_assignment(text)


def test_sweeps_are_grids() -> None:
    sweeps = parse_sweeps(["blocks=10,20", "eviction=lru,slru", "rate=0.5"])
    assert len(grid(sweeps)) == 4
    assert grid(sweeps)[0] == {"blocks": 10, "eviction": "lru", "rate": 0.5}
    assert grid({}) == [{}]
    with pytest.raises(ConfigError, match="varies blocks twice"):
        parse_sweeps(["blocks=10", "blocks=20"])
    with pytest.raises(ConfigError, match="write key=value,value"):
        parse_sweep("blocks=")
    with pytest.raises(ConfigError, match="rate=fast"):
        parse_sweeps(["rate=fast"])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.12"), (12.34, "12.3"), (1234.5, "1,234"), (math.nan, "-")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (99_999, "99,999"), (123_456, "123k"), (3.2e6, "3.20M")])
def test_large_counts_are_short(value: float, text: str) -> None:
    assert count(value) == text


def test_gaps_are_counted_closely() -> None:
    tally = Tally()
    tally._count_gaps(array("f", [0.010] * 90 + [0.5] * 10))
    assert tally.gap_percentile(0.5) == pytest.approx(0.010, rel=0.02)
    assert tally.gap_percentile(0.99) == pytest.approx(0.5, rel=0.02)
    assert math.isnan(Tally().gap_percentile(0.5))


# -- the command ---------------------------------------------------------------------------------------------------

SMALL = ["simulate", "--requests", "40", "--rate", "1", "--seed", "3"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_one_simulation(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    output = invoke(*SMALL, "--set", "max-running=8", "--json", str(file))
    assert "chats, 40 requests at 1/s, seed 3" in output and "hits %" in output
    written = json.loads(file.read_text())
    (result,) = written["results"]
    assert result["figures"]["completed"] == 40 and result["memory"] and not result["interrupted"]
    assert written["cost"]["name"] == "smollm2"


def test_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    output = invoke(*SMALL, "--what-if", "blocks=200,400", "--what-if", "eviction=lru,slru", "--json", str(file))
    assert "slru" in output
    assert len(json.loads(file.read_text())["results"]) == 4


@slow
def test_a_sweep_of_replicas_and_routings(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    options = ["--replicas", "1,3", "--routing", "all", "--per-replica", "--json", str(file)]
    output = invoke(*SMALL, *options)
    assert all(routing in output for routing in ROUTINGS) and "busiest" in output
    assert "chats, 40 requests at 1/s, seed 3 to chats, 120 requests at 3/s, seed 3" in output
    results = json.loads(file.read_text())["results"]
    assert [(each["settings"]["replicas"], each["settings"]["routing"]) for each in results] == [
        (replicas, routing) for replicas in (1, 3) for routing in ROUTINGS
    ]
    assert [each["figures"]["completed"] for each in results] == [40] * 5 + [120] * 5, "40 for each replica"


def test_a_sweep_of_rates(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    invoke(*SMALL, "--what-if", "rate=0.1,10", "--json", str(file))
    slow, fast = (result["figures"] for result in json.loads(file.read_text())["results"])
    assert slow["ttft_p95_s"] < fast["ttft_p95_s"]


def test_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps({**line, "timestamp": n * 9000}) + "\n" for n in range(20)))
    file = tmp_path / "results.json"
    assert "trace.jsonl" in invoke("simulate", "--trace", str(trace), "--json", str(file), "--set", "threshold=1")
    figures = json.loads(file.read_text())["results"][0]["figures"]
    assert figures["completed"] == 20
    assert figures["hit_rate"] == pytest.approx(19 / 20 * 688 / 700), "all but the first find their whole blocks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic", "random"], "--synthetic random: it must be one of poisson, chats"),
        (["--rate", "0"], "--rate 0: it must be a number above 0"),
        (["--rate", "nan"], "--rate nan: it must be a number above 0"),
        (["--shape", "prompt=-3"], "lengths are written as a number of tokens above 0"),
        (["--cost", "gpt5"], "give a file, or one of"),
        (["--what-if", "colour=red"], "there is no setting 'colour'"),
        (["--set", "blocks=1"], "blocks=1: it must be a whole number from 2 to 100,000,000"),
        (["--blocks", "99999999999999"], "blocks=99999999999999: it must be a whole number"),
        (["--what-if", "blocks=1e99"], "blocks=1e99: it must be a whole number"),
        (["--replicas", "4,x"], "replicas=x: it must be a whole number from 1 to 10,000"),
        (["--replicas", "0"], "replicas=0: it must be a whole number from 1 to 10,000"),
        (["--routing", "prefix,best"], "routing=best: it must be one of round-robin, prefix"),
        (["--set", "routers=0"], "routers=0: it must be a whole number from 1 to 100"),
        (["--set", "index-blocks=0"], "index-blocks=0: it must be a whole number"),
        (["--trace", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--trace", "x.jsonl", "--shape", "turns=3"], "omit --synthetic and --shape"),
        (["--json", "/proc/no/file"], "--json: cannot write /proc/no/file"),
        (["--json", "/"], "--json: cannot write /"),
        (["fit", "/proc/no/file"], "FILE: cannot write /proc/no/file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_broken_line_of_a_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 7, "output_length": 5}\n{"timestamp": 1}\n')
    assert exit_code(["simulate", "--trace", str(trace)]) == 2
    assert "trace.jsonl line 2: input_length is None" in capsys.readouterr().err


class Interrupting(ListTrace):
    """Ctrl-C in the middle of it."""

    def __iter__(self) -> Iterator[TracedRequest]:
        for number, item in enumerate(self.items):
            if number == 30:
                raise KeyboardInterrupt
            yield item


def test_an_interrupted_simulation_keeps_what_it_has() -> None:
    trace = Interrupting("broken off", tuple(SyntheticTrace("poisson", 60, 2.0, Shape(), seed=1)))
    result = run(trace)
    assert result.interrupted and result.figures["requests"] == 30
    assert 0 < result.figures["completed"] <= 30


def test_ctrl_c_shows_and_writes_what_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    runs = 0
    run_cluster = cluster_module.Cluster.run

    def second_is_interrupted(cluster: cluster_module.Cluster, *args: Any) -> None:
        nonlocal runs
        runs += 1
        run_cluster(cluster, *args)
        if runs == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cluster_module.Cluster, "run", second_is_interrupted)
    assert exit_code([*SMALL, "--what-if", "blocks=100,200,400", "--json", str(file)]) == 130
    first, second = json.loads(file.read_text())["results"]
    assert not first["interrupted"] and second["interrupted"]
    output = capsys.readouterr().out
    assert "interrupted: the last line" in output and "400" not in output


def test_ctrl_c_between_two_keeps_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = TraceSource.open

    def interrupted(source: TraceSource, rate: float | None = None, replicas: int = 1) -> Any:
        if rate == 2.0:
            raise KeyboardInterrupt
        return opened(source, rate, replicas)

    monkeypatch.setattr(TraceSource, "open", interrupted)
    source = TraceSource(None, "poisson", 20, None, "", 512, 0)
    file = tmp_path / "results.json"
    assert not run_grid(source, Settings(), ["rate=1,2"], "smollm2", file)
    assert len(json.loads(file.read_text())["results"]) == 1


def test_a_cost_model_is_fitted_to_the_real_engine(tmp_path: Path) -> None:
    """On the fake backend, whose speed means nothing: real steps are measured, and the file can be used."""
    cost = tmp_path / "deep" / "cost.json"
    output = invoke("simulate", "fit", str(cost), "--backend", "fake", "--repeats", "1")
    assert str(cost) in output.replace("\n", "") and "half of them predicted within" in output
    assert json.loads(cost.read_text())["kv_bytes_per_token"] == 8
    assert "cost model" in invoke(*SMALL, "--cost", str(cost))
