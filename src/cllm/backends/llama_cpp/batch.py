"""One `llama_batch` over numpy arrays, and how llama.cpp will cut it up."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.library import Library


class TokenBatch:
    """The arrays of a `llama_batch`, made once and written in place, never token by token."""

    def __init__(self, library: Library, capacity: int, positions: int) -> None:
        api = library.api
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        self._all_positions = np.arange(positions, dtype=np.int32)
        # llama.cpp takes a list of sequence ids per token. Ours have one each, and the pointers to them never change.
        self._sequence_counts = np.ones(capacity, np.int32)
        first = self._sequences.ctypes.data
        self._sequence_pointers = first + self._sequences.itemsize * np.arange(capacity, dtype=np.uintp)
        self.struct = api.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(api.llama_token)),
            pos=self._positions.ctypes.data_as(ctypes.POINTER(api.llama_pos)),
            n_seq_id=self._sequence_counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._sequence_pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(api.llama_seq_id))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Sequence[Chunk]) -> int:
        """Write the chunks one after another; returns how many rows of logits they ask for."""
        end = rows = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            begin, end = end, end + count
            self._tokens[begin:end] = chunk.tokens
            self._positions[begin:end] = self._all_positions[chunk.start : chunk.start + count]
            self._sequences[begin:end] = chunk.slot
            self._wanted[begin:end] = 0
            self._wanted[end - chunk.wanted_logits : end] = 1
            rows += chunk.wanted_logits
        self.struct.n_tokens = end
        return rows


def cut(chunks: Sequence[Chunk], limit: int) -> list[list[Chunk]]:
    """Cut the chunks, order kept, into batches of at most `limit` tokens."""
    batches: list[list[Chunk]] = [[]]
    room = limit
    for chunk in chunks:
        done = 0
        unwanted = len(chunk.tokens) - chunk.wanted_logits
        while len(chunk.tokens) - done > room:
            if room:
                part = chunk.tokens[done : done + room]
                wanted = min(room, max(0, done + room - unwanted))
                batches[-1].append(Chunk(part, chunk.start + done, wanted, chunk.slot))
                done += room
            batches.append([])
            room = limit
        rest = chunk
        if done:
            tokens = chunk.tokens[done:]
            rest = Chunk(tokens, chunk.start + done, min(len(tokens), chunk.wanted_logits), chunk.slot)
        batches[-1].append(rest)
        room -= len(rest.tokens)
    return batches


def count_passes(chunks: Sequence[Chunk], limit: int) -> int:
    """How many passes over the weights llama.cpp makes for a batch of chunks in the order of their slots.

    With one stream per sequence a pass takes the first run of consecutive sequence ids that have tokens left, and the
    same number of tokens of each, `limit` tokens at most.
    """
    left = {chunk.slot: len(chunk.tokens) for chunk in chunks}
    passes = 0
    while left:
        first = next(iter(left))
        run = [slot for _, slot in takewhile(lambda pair: pair[0] == pair[1], enumerate(left, first))]
        share = min(max(1, limit // len(run)), *(left[slot] for slot in run))
        for slot in run:
            left[slot] -= share
            if not left[slot]:
                del left[slot]
        passes += 1
    return passes
