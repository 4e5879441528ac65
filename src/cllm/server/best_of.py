"""`best_of`: more answers than are given, of which the likeliest are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cllm.server.answers import Answer


def mean_logprob(answer: Answer) -> float:
    """Of an answer's tokens; one without any is no better than the worst."""
    known = [entry.logprob for entry in answer.logprobs]
    return sum(known) / len(known) if known else -math.inf


def keep_best(whole: Sequence[Answer], generated: int, n: int, *, with_logprobs: bool) -> list[Answer]:
    """Of each prompt's `generated` answers the `n` best, the best first. Their log probabilities stay if asked for."""
    kept: list[Answer] = []
    for start in range(0, len(whole), generated):
        kept += sorted(whole[start : start + generated], key=mean_logprob, reverse=True)[:n]
    if not with_logprobs:
        for answer in kept:
            answer.logprobs = []
    return kept
