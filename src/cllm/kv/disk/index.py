"""The index of one model's segments: where each block is, and which saved sequences share a prefix with a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cllm.kv.block_names import TOKEN_BYTES, tail_name
from cllm.kv.disk.segment import Segment


class Use(NamedTuple):
    segment: Segment
    blocks: int
    """How many of its blocks, from the first."""


class FoundSequence(NamedTuple):
    segment: Segment
    matched: int
    """Tokens it shares with the prompt; the rest has to be cut off."""
    tokens: int
    nbytes: int


class SegmentIndex:
    """Guarded by the catalog's lock."""

    def __init__(self, block_tokens: int) -> None:
        self.segments: dict[str, Segment] = {}
        """By path."""
        self._block_tokens = block_tokens
        self._places: dict[bytes, tuple[Segment, int]] = {}
        self._sequences: dict[bytes, list[Segment]] = {}
        """By the name of each of their whole blocks, oldest first."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    # -- changing ----------------------------------------------------------------------------------------------

    def add(self, segment: Segment, first: int = 0) -> None:
        """Add a new segment, or the blocks from `first` on of one that has grown."""
        self.segments[segment.path] = segment
        if segment.is_sequence:
            for name in segment.records[0].names[:-1]:
                self._sequences.setdefault(name, []).append(segment)
            return
        for number, name in segment.names(first):
            self._places.setdefault(name, (segment, number))

    def cut(self, segment: Segment, block: int, size: int) -> None:
        """The segment has lost its blocks from this one on; without any left it is removed."""
        if segment.is_sequence:
            self._drop_sequence(segment)
        else:
            for number, name in segment.names(block):
                if self._places.get(name) == (segment, number):
                    del self._places[name]
        segment.cut(block, size)
        if segment.count == 0:
            self.segments.pop(segment.path, None)

    def remove(self, segment: Segment) -> None:
        self.cut(segment, 0, 0)

    def _drop_sequence(self, segment: Segment) -> None:
        for record in segment.records:
            for name in record.names[:-1]:
                others = self._sequences.get(name, [])
                if segment in others:
                    others.remove(segment)
                    if not others:
                        del self._sequences[name]

    # -- blocks ------------------------------------------------------------------------------------------------

    def held(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are on disk."""
        places = self._places
        for count, name in enumerate(names):
            if name not in places:
                return count
        return len(names)

    def find(self, name: bytes) -> tuple[Segment, int] | None:
        return self._places.get(name)

    def tip(self, name: bytes) -> Segment | None:
        """The segment that ends with this block, if a record can be appended to it."""
        found = self._places.get(name)
        if found is None or found[1] != found[0].count - 1 or not found[0].whole:
            return None
        return found[0]

    def path(self, name: bytes) -> Iterator[Use]:
        """The segments of the chain up to this block, last to first."""
        seen: set[int] = set()
        while (found := self._places.get(name)) is not None and id(found[0]) not in seen:
            segment, number = found
            seen.add(id(segment))
            yield Use(segment, number + 1)
            name = segment.header.parent

    # -- sequences ---------------------------------------------------------------------------------------------

    def find_sequence(self, names: Sequence[bytes], tokens: bytes) -> FoundSequence | None:
        """The saved sequence with the longest common prefix with `tokens`, whose whole blocks have these names."""
        for blocks in range(len(names), 0, -1):
            held = self._sequences.get(names[blocks - 1])
            if held:
                return max((self._match(segment, names, tokens, blocks) for segment in held), key=lambda f: f.matched)
        return None

    def covered(self, names: Sequence[bytes], tokens: bytes) -> list[Segment]:
        """The saved sequences that are a prefix of this one, or equal to it."""
        found: list[Segment] = []
        for blocks, name in enumerate(names, 1):
            for segment in self._sequences.get(name, ()):
                record = segment.records[0]
                if (
                    len(record.names) == blocks + 1
                    and self._match(segment, names, tokens, blocks).matched == record.tokens
                ):
                    found.append(segment)
        return found

    def _match(self, segment: Segment, names: Sequence[bytes], tokens: bytes, blocks: int) -> FoundSequence:
        record = segment.records[0]
        matched = blocks * self._block_tokens
        if len(record.names) == blocks + 1:
            tail = tokens[matched * TOKEN_BYTES : record.tokens * TOKEN_BYTES]
            if tail_name(names[blocks - 1], tail) == record.names[-1]:
                matched = record.tokens
        return FoundSequence(segment, matched, record.tokens, record.payload_bytes)
