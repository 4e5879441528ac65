"""Python's garbage collector, set for a process that streams."""

from __future__ import annotations

import gc

from cllm.machine.resident import give_heap_back

YOUNG_OBJECTS = 20_000
"""Threshold of the youngest generation. Streams create many objects and no cycles; with Python's default of 700,
collecting takes a sixth of a busy event loop's time."""


def keep_loaded_objects() -> None:
    """Once everything is loaded. What is loaded stays: a full collection that walks all of it would block every stream
    for 50 ms."""
    gc.collect()
    give_heap_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
