"""What may be done to a sequence's memory, whoever manages it: one hole at a time, closed before the next step."""

from __future__ import annotations

from cllm.errors import UnsupportedOperationError
from cllm.kv.sequence import KVSequence


def check_removal(sequence: KVSequence, start: int, end: int, unit: int = 1) -> None:
    """Refuse a range that cannot be removed in memory that is given back in units of so many tokens."""
    if not 0 <= start < end <= sequence.held:
        raise ValueError(f"positions [{start}, {end}) are not among the {sequence.held} that the sequence holds")
    if end == sequence.held:
        raise UnsupportedOperationError(f"positions from {start} to the end are not a hole: truncate the sequence")
    if sequence.hole:
        raise UnsupportedOperationError(
            f"a second hole at {start}: the one at {sequence.kept} has to be closed by a shift first"
        )
    if sequence.dropped and start != sequence.kept:
        raise UnsupportedOperationError(
            f"a hole at {start}: tokens were dropped at {sequence.kept} before, and a sequence has one such place"
        )
    if start % unit or end % unit:
        raise UnsupportedOperationError(
            f"positions [{start}, {end}) cannot be removed: memory is given back in whole blocks of {unit} tokens"
        )


def check_shift(sequence: KVSequence, start: int, delta: int) -> None:
    """Refuse a shift that does anything but close the hole."""
    if not sequence.hole:
        raise UnsupportedOperationError(f"positions from {start} on cannot be shifted by {delta}: there is no hole")
    if start != sequence.kept + sequence.hole or delta != -sequence.hole:
        raise UnsupportedOperationError(
            f"positions from {start} on cannot be shifted by {delta}: the hole is closed by shifting those from "
            f"{sequence.kept + sequence.hole} on by {-sequence.hole}"
        )


def check_truncation(sequence: KVSequence, length: int) -> None:
    if not 0 <= length <= sequence.num_computed:
        raise ValueError(f"a sequence of {sequence.num_computed} computed tokens cannot be cut back to {length}")
    gone = sequence.dropped + sequence.hole
    if gone and length < sequence.kept + gone:
        raise UnsupportedOperationError(
            f"a sequence cannot be cut back to {length} tokens: {gone} tokens from {sequence.kept} on are dropped"
        )


def open_hole(sequence: KVSequence, start: int, end: int) -> None:
    sequence.kept = start
    sequence.hole = end - start


def close_hole(sequence: KVSequence) -> None:
    sequence.dropped += sequence.hole
    sequence.hole = 0
