"""Compiled grammars, within a limit on their memory."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable

from cllm.structured.building import Built
from cllm.structured.matcher import Grammar

GROWTH_PER_TOKEN, MOST_GROWTH = 1024, 20 << 20
"""While answers follow a grammar, its lexer remembers what it has found out: about so much a token, up to a limit."""
WORTH_TRIMMING = 16 << 20
TRIM_EVERY_S = 1.0


class GrammarCache:
    """For one thread. A grammar's memory counts as long as it is cached, or an answer follows it."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._cached: OrderedDict[Hashable, Built] = OrderedDict()
        self._in_use: weakref.WeakKeyDictionary[Grammar, int] = weakref.WeakKeyDictionary()
        """Grammars that are not cached any more: the last answer takes them with it."""
        self._freed = 0
        self._trimmed = 0.0

    def get(self, key: Hashable) -> Grammar | None:
        built = self._cached.get(key)
        if built is None:
            return None
        self._cached.move_to_end(key)
        return built.grammar

    def put(self, key: Hashable, built: Built) -> None:
        self._cached[key] = built
        self.make_room(0)

    def make_room(self, size: int) -> bool:
        """Forget the least recently used until there is room for so many bytes. False: those that answers follow leave
        none."""
        while self.size + size > self._most and self._cached:
            _, built = self._cached.popitem(last=False)
            self._freed += _size(built)
            self._in_use[built.grammar] = _size(built)
            del built  # now it is gone, unless an answer follows it
        return self.size + size <= self._most

    def clear(self) -> None:
        self._cached.clear()

    @property
    def size(self) -> int:
        return sum(map(_size, self._cached.values())) + sum(self._in_use.values())

    @property
    def trim_is_due(self) -> bool:
        """Whether giving the heap back is worth its time. True once in a while."""
        now = time.monotonic()
        if self._freed < WORTH_TRIMMING or now - self._trimmed < TRIM_EVERY_S:
            return False
        self._freed, self._trimmed = 0, now
        return True


def _size(built: Built) -> int:
    return built.memory + min(built.grammar.tokens * GROWTH_PER_TOKEN, MOST_GROWTH)
