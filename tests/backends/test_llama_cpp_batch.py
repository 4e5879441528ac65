"""How a step is laid out for llama.cpp; needs no llama.cpp."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.batch import count_passes, cut


def chunks_of(lengths: dict[int, int]) -> list[Chunk]:
    return [Chunk(array("i", range(n)), 10 * slot, 1, slot) for slot, n in lengths.items()]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 20))
def test_cut_keeps_every_token_in_its_place(lengths: list[int], limit: int, wanted: int) -> None:
    chunks = chunks_of(dict(enumerate(lengths)))
    for chunk in chunks:
        chunk.wanted_logits = min(wanted, len(chunk.tokens))
    batches = cut(chunks, limit)

    assert all(0 < sum(len(part.tokens) for part in batch) <= limit for batch in batches)
    parts = [part for batch in batches for part in batch]
    for chunk in chunks:
        own = [part for part in parts if part.slot == chunk.slot]
        joined = [(part.start + i, token) for part in own for i, token in enumerate(part.tokens)]
        assert joined == [(chunk.start + i, token) for i, token in enumerate(chunk.tokens)]
        rows = [index >= len(part.tokens) - part.wanted_logits for part in own for index in range(len(part.tokens))]
        last = len(chunk.tokens) - chunk.wanted_logits
        assert rows == [index >= last for index in range(len(chunk.tokens))]


def test_what_fits_is_not_touched() -> None:
    chunks = chunks_of({0: 3, 1: 4})
    assert cut(chunks, 7) == [chunks]


def test_consecutive_slots_share_a_pass() -> None:
    assert count_passes(chunks_of(dict.fromkeys(range(8), 1)), 512) == 1
    assert count_passes(chunks_of(dict.fromkeys(range(0, 16, 2), 1)), 512) == 8
    assert count_passes(chunks_of({0: 1, 1: 1, 4: 1, 5: 1}), 512) == 2


def test_unequal_lengths_and_the_limit_cost_passes() -> None:
    assert count_passes(chunks_of({0: 1, 1: 100}), 512) == 2
    assert count_passes(chunks_of({3: 100}), 32) == 4
    assert count_passes(chunks_of({0: 16, 1: 16}), 32) == 1
    assert count_passes(chunks_of({0: 1, 1: 3, 2: 40, 5: 2}), 32) == 5
