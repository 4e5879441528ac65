"""Layers with a window in the paged cache: room that is promised is there, and places that are marked are kept."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from cllm.backends.fake import FakeBackend
from cllm.errors import UnsupportedOperationError
from cllm.kv.manager import KVManager
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.pins import PinMark
from cllm.kv.sequence import KVSequence
from kv_kit import assert_states, compute, computed_alone, paged, state_of


def compute_all(backend: FakeBackend, kv: KVManager, sequence: KVSequence) -> bool:
    """As far as there is room for."""
    while (missing := len(sequence.tokens) - sequence.num_computed) > 0:
        if sequence.room <= sequence.num_computed and not kv.grow(sequence, 1):
            return False
        count = min(missing, sequence.room - sequence.num_computed)
        compute(backend, kv, sequence, sequence.until_stop(count, kv.unit_tokens))
        kv.check()
    return True


def answers_alike(backend: FakeBackend, kv: KVManager, sequence: KVSequence) -> bool:
    """Whether one more token gets the logits that it would get alone."""
    sequence.tokens.append(4)
    assert kv.grow(sequence, 1)
    return np.array_equal(compute(backend, kv, sequence, 1), computed_alone(sequence.tokens))


@pytest.mark.parametrize("known", range(8, 192, 12))
def test_the_longest_sequence_has_room_whatever_is_cached_of_it(known: int) -> None:
    """A snapshot to go on from takes the place of blocks that would be computed."""
    backend, kv = paged(blocks=60, window=9, ahead=8)
    first = KVSequence([1] * known)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    again = KVSequence([1] * known + [2] * (kv.max_tokens - known))
    assert kv.admit(again) == known
    assert compute_all(backend, kv, again)


@pytest.mark.parametrize("blocks", range(4, 16))
def test_blocks_ahead_are_not_taken_from_what_is_needed_now(blocks: int) -> None:
    """Tokens that a grammar forced come many at a time, and without memory."""
    backend, kv = paged(blocks, window=5)
    sequence = KVSequence([1] * 4)
    assert kv.admit(sequence) == 0 and compute_all(backend, kv, sequence)
    sequence.tokens.extend([2] * 20)
    whole = compute_all(backend, kv, sequence)
    assert whole or len(sequence.tokens) > kv.max_tokens


def test_a_place_at_the_end_of_a_prompt_is_kept_too() -> None:
    class Marked(KVSequence):
        places = (20,)

    backend, kv = paged(blocks=60, window=5)
    sequence = Marked([1] * 20)
    assert kv.admit(sequence) == 0
    for token in range(13):
        assert compute_all(backend, kv, sequence)
        sequence.tokens.append(token)
    mark = PinMark(20)
    kv.pin(sequence, mark)
    assert mark.refusal is None and mark.pinned_tokens == 20


def test_a_limit_of_sequences_costs_those_that_run_no_snapshot() -> None:
    backend, kv = paged(blocks=400, window=5, max_sequences=3)
    running = KVSequence([9] * 40)
    assert kv.admit(running) == 0 and compute_all(backend, kv, running)
    for letter in range(5):
        sequence = KVSequence([letter] * 40)
        assert kv.admit(sequence) == 0 and compute_all(backend, kv, sequence)
        kv.release(sequence)
    assert kv.peek(running.tokens.tobytes()) == 36
    assert kv.usage().sequences_held == 2


def test_of_too_many_places_those_to_pin_stay() -> None:
    class Marked(KVSequence):
        places = (20, 24, 40, 44, 60, 80, 84, 88, 100, 120, 140)
        to_pin = (24, 44, 84, 88)

    backend, kv = paged(blocks=400, window=33, pin_limit=1.0)
    sequence = Marked([1] * 150)
    assert kv.admit(sequence) == 0
    for token in range(40):
        assert compute_all(backend, kv, sequence)
        sequence.tokens.append(token)
    assert kv.usage().snapshots == 4 + 6
    for place in sequence.to_pin:
        mark = PinMark(place)
        kv.pin(sequence, mark)
        assert mark.refusal is None and mark.pinned_tokens == place
    kv.check()


def test_what_pins_share_is_counted_once() -> None:
    class Marked(KVSequence):
        to_pin = places = (80, 84, 88)

    backend, kv = paged(blocks=400, window=33, pin_limit=1.0)
    sequence = Marked([1] * 150)
    assert kv.admit(sequence) == 0 and compute_all(backend, kv, sequence)
    for place in sequence.to_pin:
        kv.pin(sequence, PinMark(place))
        kv.check()
    kv.release(sequence)
    usage = kv.usage()
    assert usage.pins == 3 and usage.pinned == usage.referenced == 22 + 2 * (8 + 2)
    for pin in list(kv.pins.all.by_id):
        assert kv.unpin(pin)
        kv.check()
    assert kv.usage().pinned == kv.usage().referenced == 0


def test_windows_are_computed_again_by_themselves_where_no_snapshot_is_near() -> None:
    backend, kv = paged(blocks=400, window=9, reach=8)
    first = KVSequence([1] * 120)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    second = KVSequence([1] * 80 + [2] * 20)
    # From the window before token 80 on, and for a window of the layer below before that.
    assert kv.peek(second.tokens.tobytes()) == kv.admit(second) == 80 - 8 - 8
    assert (second.known, second.rebuilt) == (80, 80)
    assert compute_all(backend, kv, second) and second.rebuilt == 0
    assert answers_alike(backend, kv, second)
    usage = kv.usage()
    assert (usage.windows_rebuilt, usage.snapshots_used) == (1, 0)
    kv.release(second)
    third = KVSequence([1] * 80 + [3] * 20)
    assert kv.admit(third) == 80, "a snapshot is kept where they parted"
    assert compute_all(backend, kv, third) and kv.usage().windows_rebuilt == 1
    assert answers_alike(backend, kv, third)


def test_where_every_token_must_be_exact_all_layers_begin_at_a_snapshot() -> None:
    class Scored(KVSequence):
        asks_along = True

    backend, kv = paged(blocks=400, window=9, reach=8)
    first = KVSequence([1] * 120)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    second = Scored([1] * 80 + [2] * 20)
    assert kv.admit(second) == second.rebuilt == 0 and second.known == 80


def test_a_shorter_reach_would_be_noticed() -> None:
    backend, kv = paged(blocks=400, window=9, reach=0)
    first = KVSequence([1] * 120)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    second = KVSequence([1] * 80 + [2] * 2)
    assert kv.admit(second) == 72
    while second.num_computed < 81:
        compute(backend, kv, second, 81 - second.num_computed)
    assert not np.array_equal(compute(backend, kv, second, 1), computed_alone(second.tokens))


@pytest.mark.parametrize("after", range(64, 90, 4))
def test_what_is_given_up_before_windows_are_exact_leaves_no_snapshot(after: int) -> None:
    backend, kv = paged(blocks=400, window=9, reach=8)
    first = KVSequence([1] * 120)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    taken = kv.usage().snapshots_taken
    second = KVSequence([1] * 80 + [2] * 20)
    assert kv.admit(second) == 64
    while second.num_computed < after:
        compute(backend, kv, second, min(3, after - second.num_computed))
        kv.check()
    assert not kv.fork(second, KVSequence(second.tokens)) or after >= 80
    kv.release(second)
    assert kv.usage().snapshots_taken - taken == (after >= 80) + (after > 83)


def test_truncation_goes_back_to_the_closest_state_that_is_known() -> None:
    class Marked(KVSequence):
        places = (20, 46)

    backend, kv = paged(blocks=100, states=3)
    sequence = Marked([1] * 50)
    assert kv.admit(sequence) == 0 and compute_all(backend, kv, sequence)
    for length, known in ((50, 50), (49, 48), (48, 48), (47, 20), (19, 0)):
        assert kv.truncate(sequence, length) == known == sequence.num_computed
        kv.check()
        assert_states(backend, kv)
    assert compute_all(backend, kv, sequence)
    assert_states(backend, kv)


def test_what_a_state_has_seen_cannot_be_removed() -> None:
    backend, kv = paged(blocks=100, states=3)
    sequence = KVSequence([1] * 50)
    assert kv.admit(sequence) == 0 and compute_all(backend, kv, sequence)
    with pytest.raises(UnsupportedOperationError, match=r"\[4, 8\).*carry a state, which has seen them"):
        kv.remove_range(sequence, 4, 8)
    kv.check()


@pytest.mark.parametrize("known", range(8, 168, 12))
@pytest.mark.parametrize("window", [0, 9])
def test_the_longest_sequence_has_room_for_its_states_whatever_is_cached_of_it(known: int, window: int) -> None:
    backend, kv = paged(blocks=64, window=window, ahead=8, states=5)
    first = KVSequence([1] * min(known, kv.max_tokens - 8))
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    kv.release(first)
    again = KVSequence([*first.tokens, *[2] * (kv.max_tokens - len(first.tokens))])
    assert kv.admit(again) is not None
    assert compute_all(backend, kv, again)
    assert_states(backend, kv)


def test_an_admission_that_finds_no_room_for_states_changes_nothing() -> None:
    backend, kv = paged(blocks=40, states=8)
    first, second = KVSequence([1] * 20), KVSequence([2] * 20)
    assert kv.admit(first) == 0 and compute_all(backend, kv, first)
    before = state_of(kv)
    assert kv.admit(second) is None and state_of(kv) == before
    kv.release(first)
    assert kv.admit(second) == 0 and compute_all(backend, kv, second)


# -- worth -------------------------------------------------------------------------------------------------------------


class Told(KVSequence):
    """A sequence with messages that end at some places."""

    def __init__(self, tokens: list[int], places: tuple[int, ...] = ()) -> None:
        super().__init__(tokens)
        self.places = places


def keep_prompt(backend: FakeBackend, kv: KVManager, tokens: list[int], *places: int) -> None:
    sequence = Told(tokens, places)
    assert kv.admit(sequence) is not None and compute_all(backend, kv, sequence)
    kv.release(sequence)


def cached(kv: KVManager, tokens: list[int]) -> int:
    return kv.peek(array("i", [*tokens, 0]).tobytes())


@pytest.mark.parametrize("policy", ["lru", "worth"])
def test_worth_keeps_what_is_expensive_to_compute(policy: str) -> None:
    """A long system prompt that somebody asked for at the beginning, against many short prompts after it."""
    backend, kv = paged(blocks=240, window=5, eviction_policy=policy)
    system = [9] * 200
    keep_prompt(backend, kv, [*system, *[1] * 40], 200)
    for letter in range(2, 9):
        keep_prompt(backend, kv, [letter] * 100, 40, 60, 80)
    assert cached(kv, system) == (200 if policy == "worth" else 0)
    kv.check()


def test_of_a_chat_the_last_turn_stays_and_earlier_ones_go() -> None:
    backend, kv = paged(blocks=400, window=17, eviction_policy="worth")
    chat = [7] * 40
    keep_prompt(backend, kv, chat, 20)
    for turn in range(5):
        chat = [*chat, *[turn] * 40]
        keep_prompt(backend, kv, chat)
    ends = {snapshot.end * 4 for snapshot in kv.arena.local.policy}  # type: ignore[union-attr]
    kept = kv.usage().snapshots
    order = [snapshot.end * 4 for snapshot in kv.arena.local.policy]  # type: ignore[union-attr]
    assert len(ends) == kept >= 3
    assert order[-1] == max(ends) or order[-2] == max(ends), "the last one goes before those behind which it is"
    assert order.index(20) > len(order) // 2, "where all begin"


def test_blocks_from_where_nobody_can_go_on_go_first() -> None:
    backend, kv = paged(blocks=60, window=5, eviction_policy="worth")
    lost = Told([1] * 60)
    assert kv.admit(lost) == 0
    compute(backend, kv, lost, 24)  # its client leaves before any place is reached
    kv.arena.commit(lost)
    kv.tables.end(lost)
    keep_prompt(backend, kv, [2] * 30)
    first = next(iter(kv.arena.prefixes.policy))
    keep_prompt(backend, kv, [3] * 30)
    assert first.key[:4] == b"\x01\0\0\0"
    assert next(iter(kv.arena.prefixes.policy)) is first
    kv.check()


def test_where_prompts_part_is_evicted_after_what_follows() -> None:
    """It has no place of its own to go on from, and is worth nothing by itself."""
    backend, kv = paged(blocks=400, window=5, eviction_policy="worth")
    for letter in range(2, 6):
        keep_prompt(backend, kv, [1] * 20 + [letter] * 60, 30, 60)
    assert_order(kv)
    keep_prompt(backend, kv, [1] * 20 + [2] * 4 + [6] * 4)
    assert_order(kv)
    while kv.usage().evictable:
        kv.room.evict(1)
        kv.check()
        assert_order(kv)


def assert_order(kv: PagedKVManager) -> None:
    gone: set[int] = set()
    for node in kv.arena.prefixes.policy:
        assert all(child.number in gone for child in node.children.values())
        gone.add(node.number)
    assert len(gone) == len(kv.arena.prefixes.policy)
