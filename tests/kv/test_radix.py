"""The radix tree against a list of everything that was put in."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.kv.radix import TOKEN_BYTES, RadixTree
from thorough import sampled

Words = st.lists(st.integers(0, 2), max_size=12)


def key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def make(unit: int) -> RadixTree[list[int]]:
    return RadixTree(unit, [], lambda value, at: (value[: at * unit], value[at * unit :]))


def insert(tree: RadixTree[list[int]], tokens: list[int]) -> None:
    data = key(tokens)
    found = tree.find(data)
    node = tree.cut(found)
    if rest := data[found.matched :]:
        tree.add(node, rest, tokens[found.matched // TOKEN_BYTES :])


def common(a: list[int], b: list[int], unit: int) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length - length % unit


@settings(max_examples=sampled(300), deadline=None)
@given(unit=st.sampled_from([1, 2, 3]), stored=st.lists(Words, max_size=8), asked=Words)
def test_finds_the_longest_prefix_of_all(unit: int, stored: list[list[int]], asked: list[int]) -> None:
    tree = make(unit)
    whole = [tokens[: len(tokens) - len(tokens) % unit] for tokens in stored]
    for tokens in whole:
        insert(tree, tokens)
        list(tree.examine())
    found = tree.find(key(asked))
    assert found.matched // TOKEN_BYTES == max((common(asked, tokens, unit) for tokens in whole), default=0)


@settings(max_examples=sampled(200), deadline=None)
@given(unit=st.sampled_from([1, 2]), stored=st.lists(Words, min_size=1, max_size=8))
def test_values_follow_their_tokens(unit: int, stored: list[list[int]]) -> None:
    tree = make(unit)
    whole = [tokens[: len(tokens) - len(tokens) % unit] for tokens in stored]
    for tokens in whole:
        insert(tree, tokens)
    for tokens in whole:
        node = tree.cut(tree.find(key(tokens)))
        assert [t for part in reversed(list(node.path())) for t in part.value] == tokens
    list(tree.examine())


@settings(max_examples=sampled(200), deadline=None)
@given(stored=st.lists(Words, min_size=1, max_size=8))
def test_leaves_can_be_taken_until_nothing_is_left(stored: list[list[int]]) -> None:
    tree = make(1)
    for tokens in stored:
        insert(tree, tokens)
    while leaves := [node for node in tree.nodes() if not node.children]:
        tree.remove(leaves[0])
        list(tree.examine())
    assert not list(tree.nodes())
    assert tree.find(key([1])).matched == 0


def test_inner_nodes_cannot_be_removed() -> None:
    tree = make(1)
    insert(tree, [1, 2])
    insert(tree, [1, 3])
    inner = next(node for node in tree.nodes() if node.children)
    with pytest.raises(ValueError, match="leaf"):
        tree.remove(inner)
