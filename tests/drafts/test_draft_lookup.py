"""What drafts are looked up in: a sequence's own tokens, and what its tenant had generated lately."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cllm.drafts.drafter import Drafter
from cllm.drafts.follower import NEAR_TOKENS, Follower
from cllm.drafts.recent_answers import (
    END,
    LEAST,
    LONGEST,
    MOST_SPACES,
    NGRAM,
    SPACE_SHARE,
    Match,
    NgramIndex,
    RecentAnswers,
    Space,
)
from cllm.engine.request import Sequence
from draft_kit import B, new_sequence


def tokens_of(values: list[int]) -> array[int]:
    return array("i", values)


def propose(drafter: Drafter, sequence: Sequence, most: int = 16) -> list[int]:
    drafter.observe_step(1, 0, 0.01, 0)
    allowed = drafter.begin_step(1, False)
    return list(drafter.propose(sequence, min(most, allowed)))


texts = st.lists(st.integers(0, 4), min_size=NGRAM, max_size=200)


@given(texts, st.lists(st.integers(1, 40), max_size=30))
def test_an_index_that_grows_is_the_one_that_is_made_at_once(values: list[int], slices: list[int]) -> None:
    text = tokens_of(values)
    grown, made = NgramIndex(), NgramIndex()
    made.extend(text, len(text))
    for count in [*slices, len(text)]:
        grown.extend(text, count)
    assert grown.missing(text) == made.missing(text) == 0
    for end in range(NGRAM, len(text) + 1):
        assert grown.find(text, text[:end]) == made.find(text, text[:end])


@given(texts)
def test_a_match_is_the_longest_and_of_those_the_last(values: list[int]) -> None:
    text = tokens_of(values)
    grams = NgramIndex()
    grams.extend(text, len(text))

    def length(place: int) -> int:
        count = 0
        while count < min(place, LONGEST) and text[place - 1 - count] == text[len(text) - 1 - count]:
            count += 1
        return count

    places = [place for place in range(NGRAM, len(text)) if length(place) >= NGRAM]
    found = grams.find(text, text)
    if not places:
        assert found is None
    elif len(places) <= 8:  # so that all are looked at, whatever has the same hash
        longest = max(map(length, places))
        assert found == Match(max(place for place in places if length(place) == longest), longest)
    else:
        assert found is not None and length(found.place) == found.length >= NGRAM


def test_an_index_outgrows_its_table() -> None:
    values = [(7 * number * number + number) % 5000 for number in range(6000)]
    text = array("i")
    grams = NgramIndex()
    for value in values:
        text.append(value)
        grams.extend(text, 1)
    made = NgramIndex(len(text))
    made.extend(text, len(text))
    for end in range(NGRAM, len(text), 97):
        found = grams.find(text, text[:end])
        assert found == made.find(text, text[:end])
        assert found is not None and text[found.place - NGRAM : found.place] == text[end - NGRAM : end]


@given(texts, st.lists(st.integers(0, 4), max_size=60))
def test_a_proposal_is_what_followed_the_same_tokens_before(prompt: list[int], generated: list[int]) -> None:
    drafter, sequence = Drafter(recent_tokens=0), new_sequence(prompt)
    for token in generated:
        sequence.append(token)
        draft = propose(drafter, sequence)
        known = list(sequence.tokens)
        both, places = known + draft, range(1, len(known))
        assert not draft or any(
            both[place : place + len(draft)] == draft and known[place - 1] == known[-1] for place in places
        )
        drafter.observe_step(1, len(draft), 0.01, 0)


def test_what_repeats_itself_goes_on_round_and_round() -> None:
    drafter, sequence = Drafter(recent_tokens=0), new_sequence([9, 1, 2, 3, 1, 2, 3, 1, 2])
    for token in (3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2):
        sequence.append(token)
        draft = propose(drafter, sequence)
        drafter.observe_step(1, len(draft), 0.01, 0)
    assert len(draft) > 3 and draft == [3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3][: len(draft)]


def test_a_copy_with_a_change_goes_on_behind_the_change() -> None:
    text = list(range(100, 160))
    follower = Follower(tokens_of(text), Space())
    tokens = tokens_of(text)
    for token in [*text[:20], 7]:  # a copy of the text, in which 120 has become 7
        tokens.append(token)
        follower.grams.extend(tokens, len(tokens))
        follower.follow(tokens)
    assert follower.length == 0
    tokens.append(121)
    follower.follow(tokens)
    assert follower.ahead(tokens, 3).tolist() == [122, 123, 124]
    for _ in range(NEAR_TOKENS + 1):
        tokens.append(8)
    follower.follow(tokens)
    assert follower.length == 0


def test_long_prompts_are_indexed_a_slice_in_each_step() -> None:
    prompt = list(range(5000))
    drafter, sequence = Drafter(recent_tokens=0), new_sequence([*prompt, 4900, 4901, 4902])
    sequence.append(4903)
    assert propose(drafter, sequence) == []
    for _ in range(3):
        draft = propose(drafter, sequence)
    assert draft[:2] == [4904, 4905]


def test_what_was_generated_is_found_by_its_tenant_and_nobody_else() -> None:
    drafter = Drafter()
    prompt, written = list(range(50)), list(range(200, 300))
    first = new_sequence(prompt)
    for token in written:
        first.append(token)
    drafter.end(first)
    again, stranger = new_sequence(prompt), new_sequence(prompt, B)
    for sequence in (again, stranger):
        sequence.append(written[0])
    assert propose(drafter, stranger) == []
    draft = propose(drafter, again)
    assert draft and draft == written[1 : 1 + len(draft)]


def test_nothing_is_proposed_across_the_end_of_an_answer() -> None:
    drafter = Drafter()
    for start in (200, 300):
        sequence = new_sequence([1, 2, 3])
        for token in range(start, start + 20):
            sequence.append(token)
        drafter.end(sequence)
    again = new_sequence([1, 2, 3])
    for token in range(200, 218):
        again.append(token)
        draft = propose(drafter, again)
    assert draft in ([218], [218, 219])
    for token in (218, 219, 5):
        again.append(token)
        assert END not in propose(drafter, again)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 90)), max_size=60), st.integers(0, 400))
def test_what_is_remembered_is_bounded(answers: list[tuple[int, int]], most: int) -> None:
    recent = RecentAnswers(most)
    for number, length in answers:
        recent.add(bytes([number]), tokens_of([1] * 5 + [2] * length), 5)
        sizes = [recent.space(bytes([other])).size for other in range(7)]
        assert recent.tokens == sum(sizes) <= most
        assert max(sizes) <= most // SPACE_SHARE


def test_the_number_of_tenants_is_bounded_and_short_answers_are_not_kept() -> None:
    recent = RecentAnswers(1 << 20)
    for number in range(2 * MOST_SPACES):
        recent.add(str(number).encode(), tokens_of([1] * (LEAST - 1)), 0)
    assert len(recent) == MOST_SPACES and recent.tokens == 0


def test_the_eldest_answers_are_forgotten_first() -> None:
    space = Space()
    for start in (0, 100, 200, 300):
        space.add(tokens_of(list(range(start, start + 40))), 100)
    assert space.find(tokens_of([10, 11, 12])) is None
    for start in (200, 300):
        found = space.find(tokens_of([start + 10, start + 11, start + 12]))
        assert found is not None and found.text[found.match.place] == start + 13
