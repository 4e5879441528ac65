"""Which replica gets a request: with and without caches, events, reports and sessions, and never a dead one."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.config.cluster import ClusterConfig
from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvent
from cllm.routing.index import EXPECTED_S, QUIET_S, PrefixIndex
from cllm.routing.policy import (
    CACHE_WEIGHT,
    IMBALANCE,
    POLICIES,
    ROW_TOKENS,
    SENT_S,
    SPARE_TOKENS,
    NoReplicaError,
    PrefixPolicy,
    ReplicaStats,
    RoutingPolicy,
)
from thorough import sampled

BLOCK = 16
NAMES = sorted(POLICIES)
REPLICAS = ("a", "b", "c", "d")


def prompt(seed: int, blocks: int = 64, shared: int = 0) -> list[bytes]:
    """Block names; prompts of different seeds share `shared` leading blocks."""
    tokens = [n if n < shared else n + 1000 * (seed + 1) for n in range(blocks)]
    return chain(root_name(), b"".join(token.to_bytes(4, "little") for token in tokens), 1)


def make(name: str, *replicas: str, seed: int = 0) -> RoutingPolicy:
    policy = POLICIES[name](seed=seed, block_tokens=BLOCK)
    for replica in replicas or REPLICAS:
        policy.add(replica, 0.0)
        if policy.index is not None:
            policy.index.snapshot(replica, 0, (), 0.0)
    return policy


def by_prefix(*replicas: str, seed: int = 0) -> PrefixPolicy:
    policy = make("prefix", *replicas, seed=seed)
    assert isinstance(policy, PrefixPolicy)
    return policy


def ask(policy: RoutingPolicy, names: list[bytes], session: str | None = None, now: float = 0.0) -> str:
    return policy.choose(names, len(names) * BLOCK, session, now=now)


def store(policy: PrefixPolicy, replica: str, names: list[bytes], number: int = 1, now: float = 0.0) -> None:
    policy.index.apply(replica, [KVEvent(number, "stored", tuple(names))], now)


# -- every policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=sampled(60), deadline=None)
@given(st.data())
def test_a_dead_replica_is_never_chosen_and_the_same_seed_chooses_the_same(name: str, data: st.DataObject) -> None:
    twins = [make(name, seed=3), make(name, seed=3)]
    living = set(REPLICAS)
    now = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.1, QUIET_S]))
        replica = data.draw(st.sampled_from(REPLICAS))
        match data.draw(st.sampled_from(["ask", "ask", "ask", "die", "join", "report"])):
            case "die":
                living.discard(replica)
                for policy in twins:
                    policy.remove(replica)
            case "join":
                living.add(replica)
                for policy in twins:
                    policy.add(replica, now)
            case "report":
                stats = ReplicaStats(data.draw(st.integers(0, 9000)), data.draw(st.integers(0, 40)))
                for policy in twins:
                    policy.report(replica, stats, now)
                    if policy.index is not None:
                        policy.index.snapshot(replica, 0, prompt(0, shared=8), now)
            case _:
                names = prompt(data.draw(st.integers(0, 3)), shared=8)
                session = data.draw(st.sampled_from([None, "one", "two"]))
                exclude = data.draw(st.sets(st.sampled_from(REPLICAS)))
                if living - exclude:
                    first, second = (
                        policy.choose(names, len(names) * BLOCK, session, now=now, exclude=exclude) for policy in twins
                    )
                    assert first == second and first in living - exclude
                else:  # only one is asked: a request that nobody can take changes nothing
                    with pytest.raises(NoReplicaError, match="no replica is available"):
                        twins[0].choose(names, 9, session, now=now, exclude=exclude)
        assert set(twins[0].replicas) == living


@pytest.mark.parametrize("name", NAMES)
def test_different_prompts_are_spread(name: str) -> None:
    policy = make(name)
    chosen = Counter(ask(policy, prompt(seed)) for seed in range(400))
    assert set(chosen) == set(REPLICAS) and max(chosen.values()) < 180


@pytest.mark.parametrize("name", ["least-loaded", "prefix", "consistent-hash"])
def test_a_hot_spot_gets_nothing_more(name: str) -> None:
    policy = make(name)
    for replica in REPLICAS:
        policy.report(replica, ReplicaStats(90_000 if replica == "b" else 0, 0), 0.0)
    assert all(ask(policy, prompt(seed % 3), now=1.0) != "b" for seed in range(40))


def test_consistent_hashing_moves_little_when_a_replica_leaves() -> None:
    policy = make("consistent-hash")

    def homes() -> list[str]:
        found = []
        for seed in range(100):
            found.append(ask(policy, prompt(seed)))
            for replica in policy.replicas:
                policy.report(replica, ReplicaStats(0, 0), 1.0)
        return found

    before = homes()
    assert homes() == before
    policy.remove("c")
    assert [home for home, old in zip(homes(), before, strict=True) if old != "c"] == [o for o in before if o != "c"]


@pytest.mark.parametrize("name", ["least-loaded", "consistent-hash"])
def test_a_request_that_nobody_can_take_changes_nothing(name: str) -> None:
    asked, other = twins = [make(name, seed=3), make(name, seed=3)]
    for policy in twins:
        for _ in range(6):
            ask(policy, prompt(0), now=0.1)
    with pytest.raises(NoReplicaError):
        asked.choose(prompt(0), 9, now=SENT_S, exclude=REPLICAS)
    late = SENT_S + 0.1  # what was sent first counts no longer
    assert ask(asked, prompt(0), now=late) == ask(other, prompt(0), now=late)
    assert [asked.load(replica) for replica in REPLICAS] == [other.load(replica) for replica in REPLICAS]


def test_what_was_sent_counts_until_a_report_includes_it() -> None:
    policy = make("least-loaded", "a")
    ask(policy, prompt(0), now=1.0)
    ask(policy, prompt(1), now=2.0)
    work = 64 * BLOCK + ROW_TOKENS
    assert policy.load("a") == 2 * work
    policy.report("a", ReplicaStats(100, 2), measured_at=1.5)
    assert policy.load("a") == 100 + 2 * ROW_TOKENS + work
    policy.choose((), 10, now=2.1 + SENT_S)
    assert policy.load("a") == 100 + 2 * ROW_TOKENS + 10 + ROW_TOKENS, "without reports it counts no longer"


def test_reports_of_the_dead_are_ignored() -> None:
    policy = by_prefix()
    policy.remove("a")
    policy.remove("a")
    policy.report("a", ReplicaStats(1, 1), 0.0)
    policy.index.apply("a", [KVEvent(1, "stored", tuple(prompt(0)))], 0.0)
    policy.index.snapshot("a", 1, prompt(0), 0.0)
    assert ask(policy, prompt(0)) != "a"


# -- by prefix -----------------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_among_equally_busy_ones() -> None:
    policy = by_prefix()
    names = prompt(0)
    store(policy, "b", names[:10])
    store(policy, "c", names[:40])
    assert ask(policy, names) == "c"
    assert policy.load("c") == 24 * BLOCK + ROW_TOKENS


@pytest.mark.parametrize(("load", "home"), [(-1, "a"), (1, "b")])
def test_a_small_advantage_gives_way_to_load(load: int, home: str) -> None:
    policy = by_prefix("a", "b")
    names = prompt(0)
    store(policy, "a", names[:10])
    policy.report("a", ReplicaStats(int(CACHE_WEIGHT * 10 * BLOCK) + load, 0), 0.0)
    assert ask(policy, names) == home


def test_with_nothing_to_do_a_shared_prefix_still_spreads() -> None:
    policy = by_prefix()
    chosen: Counter[str] = Counter()
    for seed in range(60):
        now = seed * 5.0
        for replica in REPLICAS:
            policy.report(replica, ReplicaStats(0, 0), now)
            policy.index.apply(replica, (), now)
        names = prompt(seed, 90, 40)
        home = ask(policy, names, now=now)
        chosen[home] += 1
        store(policy, home, names, chosen[home], now)
    assert len(chosen) == 4 and max(chosen.values()) < 30


def test_a_hot_prefix_gets_a_second_home() -> None:
    policy = by_prefix()
    shared = 600
    store(policy, "a", prompt(0, shared, shared))
    chosen = [ask(policy, prompt(seed, shared + 10, shared)) for seed in range(200)]
    assert len(set(chosen[:20])) > 1, "a saves almost the whole prompt and still does not drown"
    assert set(chosen) == set(REPLICAS) and chosen.count("a") < 100
    loads = [policy.load(replica) for replica in REPLICAS]
    heaviest = 620 * BLOCK
    assert max(loads) <= IMBALANCE * sum(loads) / 4 + SPARE_TOKENS + heaviest


def test_requests_that_come_together_stay_together_before_any_event() -> None:
    policy = by_prefix()
    first = ask(policy, prompt(0, 64, 60))
    policy.report(first, ReplicaStats(0, 0), 0.0)
    assert ask(policy, prompt(1, 64, 60), now=0.1) == first


def test_without_events_the_load_alone_counts() -> None:
    policy = by_prefix("a", "b")
    names = prompt(0)
    store(policy, "a", names)
    late = QUIET_S + 1.0
    policy.index.apply("b", (), late)
    policy.report("a", ReplicaStats(10, 0), late)
    policy.report("b", ReplicaStats(0, 0), late)
    assert ask(policy, names, now=late) == "b"
    policy = by_prefix("a", "b")
    store(policy, "a", names)
    policy.report("a", ReplicaStats(10, 0), 0.0)
    assert ask(policy, names) == "a"
    policy.index.apply("a", [KVEvent(9, "gap")], 0.0)
    policy.report("a", ReplicaStats(10, 0), 1.0)
    policy.report("b", ReplicaStats(0, 0), 1.0)
    assert ask(policy, prompt(0), now=2.0) == "b"


def test_a_session_finds_its_replica_without_events() -> None:
    policy = PrefixPolicy(block_tokens=BLOCK)
    for replica in REPLICAS:
        policy.add(replica, 0.0)
    homes = {session: ask(policy, prompt(n), session) for n, session in enumerate("stuvw")}
    for replica in REPLICAS:
        policy.report(replica, ReplicaStats(0, 0), 0.0)
    for n, session in enumerate("stuvw"):
        assert ask(policy, prompt(n), session, now=1.0) == homes[session]
        policy.report(homes[session], ReplicaStats(0, 0), 1.0)
    policy.remove(homes["s"])
    assert ask(policy, prompt(0), "s", now=2.0) != homes["s"]


def test_an_exact_index_is_believed_rather_than_a_session() -> None:
    policy = by_prefix("a", "b")
    names = prompt(0)
    home = ask(policy, names, "s")
    other = "b" if home == "a" else "a"
    store(policy, other, names)
    late = 3 * EXPECTED_S
    for replica in "ab":
        policy.index.apply(replica, (), late)
        policy.report(replica, ReplicaStats(0, 0), late)
    assert ask(policy, names, "s", now=late) == other


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.routing.policy.MOST_SESSIONS", 10)
    policy = by_prefix()
    for number in range(50):
        ask(policy, prompt(number), str(number))
    assert list(policy._sessions) == [str(number) for number in range(40, 50)]


def test_several_routers_do_not_all_run_to_the_same_replica() -> None:
    chosen = set()
    for seed in range(20):
        policy = PrefixPolicy(seed=seed, block_tokens=BLOCK, index=PrefixIndex(), sample=2)
        for number, replica in enumerate(REPLICAS):
            policy.add(replica, 0.0)
            policy.report(replica, ReplicaStats(number, 0), 0.0)
        chosen.add(ask(policy, prompt(0)))
    assert chosen == {"a", "b", "c"}, "the most loaded of all is never the less loaded of two"


def test_the_configuration_offers_every_policy() -> None:
    assert set(get_args(ClusterConfig.model_fields["routing"].annotation)) == set(POLICIES)
