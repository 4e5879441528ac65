"""Where snapshots of states are due: few, and never far from where others go on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.kv.paged.snapshot_places import LAST_PLACES, LEAST_DISTANCE, further, places_for_states

PLACES = st.lists(st.integers(0, 3000), max_size=40)


@given(wanted=st.lists(st.integers(0, 3000), max_size=3), likely=PLACES, computed=st.integers(0, 2000), data=st.data())
def test_places_are_few_and_near(wanted: list[int], likely: list[int], computed: int, data: st.DataObject) -> None:
    end, cells = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, 200))
    places = places_for_states(wanted, likely, computed, end, cells=cells, most=99)
    assert all(computed < place <= end for place in places)
    certain = {place for place in (*wanted, end) if computed < place <= end}
    messages = sorted({place for place in likely if computed < place < end - 1})
    assert certain | {*messages[:1], *messages[-LAST_PLACES:]} <= places
    least = max(LEAST_DISTANCE, cells)
    assert len(places) <= len(wanted) + 2 + LAST_PLACES + max(0, (end - computed) // least).bit_length()
    for parts in range(messages[0] if messages else computed + 1, end + 1):
        before = max((place for place in places if place <= parts), default=computed)
        assert parts - before <= max(2 * (end - parts), 2 * least)
    most = data.draw(st.integers(1, 20))
    fewer = places_for_states(wanted, likely, computed, end, cells=cells, most=most)
    assert certain <= fewer <= places and len(fewer) <= max(most, len(certain))
    assert len(fewer) >= min(most, len(places))


@given(blocks=st.integers(1, 100_000), cells=st.integers(1, 1000))
def test_an_answer_keeps_few_however_long_it_is(blocks: int, cells: int) -> None:
    place = taken = 0
    while (place := place + further(place, cells)) < blocks:
        taken += 1
    assert taken <= 40 and taken <= blocks // max(LEAST_DISTANCE, cells)
