"""Rules for operations on a sequence's memory, for both managers: one hole at a time, closed before the next step."""

from __future__ import annotations

from cllm.errors import UnsupportedOperationError
from cllm.kv.sequence import KVSequence


def check_range(sequence: KVSequence, start: int, end: int) -> None:
    if not 0 <= start < end <= sequence.held:
        raise ValueError(f"positions [{start}, {end}) are outside the sequence, which has {sequence.held}")


def check_removal(sequence: KVSequence, start: int, end: int, unit: int = 1) -> None:
    """Refuse a range that cannot be removed; `unit`: memory is freed in multiples of this many tokens."""
    check_range(sequence, start, end)
    if end == sequence.held:
        raise UnsupportedOperationError(f"positions from {start} to the end are not a hole: truncate the sequence")
    if sequence.hole:
        raise UnsupportedOperationError(
            f"cannot make a second hole at {start}: close the one at {sequence.kept} with a shift first"
        )
    if sequence.dropped and start != sequence.kept:
        raise UnsupportedOperationError(
            f"cannot make a hole at {start}: tokens were dropped at {sequence.kept}, and a sequence can have only one "
            "such place"
        )
    if start % unit or end % unit:
        raise UnsupportedOperationError(
            f"cannot remove positions [{start}, {end}): memory is freed in whole blocks of {unit} tokens"
        )


def check_shift(sequence: KVSequence, start: int, delta: int) -> None:
    """Refuse a shift that does anything but close the hole."""
    if not sequence.hole:
        raise UnsupportedOperationError(f"cannot shift positions from {start} on by {delta}: there is no hole")
    if start != sequence.kept + sequence.hole or delta != -sequence.hole:
        raise UnsupportedOperationError(
            f"cannot shift positions from {start} on by {delta}: closing the hole takes a shift by {-sequence.hole} "
            f"from {sequence.kept + sequence.hole} on"
        )


def check_truncation(sequence: KVSequence, length: int) -> None:
    if not 0 <= length <= sequence.num_computed:
        raise ValueError(f"cannot truncate a sequence of {sequence.num_computed} computed tokens to {length}")
    gone = sequence.dropped + sequence.hole
    if gone and length < sequence.kept + gone:
        raise UnsupportedOperationError(
            f"cannot truncate a sequence to {length} tokens: {gone} tokens from {sequence.kept} on were dropped"
        )


def open_hole(sequence: KVSequence, start: int, end: int) -> None:
    sequence.kept = start
    sequence.hole = end - start


def close_hole(sequence: KVSequence) -> None:
    sequence.dropped += sequence.hole
    sequence.hole = 0
