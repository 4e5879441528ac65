"""Answers that go on from tokens that were generated elsewhere, for example by a server that is gone.

    tokens     p p p p p p a a a          p  the prompt      a  given: generated elsewhere
                                 b b …    b  new: the outputs

For everything that looks back, given tokens are generated ones: the number of the next draw, penalties, constraints,
limits. They are computed like those of a preempted sequence, so whatever the cache has of them is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenChooser
from cllm.errors import InvalidRequestError, StructureError

Generated = Sequence[Sequence[int] | None]
"""For each answer the tokens it has so far; None if it has ended, so that nothing is left to do for it."""


def validate_generated(
    generated: Generated, params: SamplingParams, *, most: int, end_ids: frozenset[int], vocab_size: int
) -> list[array[int] | None]:
    """The tokens as arrays. Raises `InvalidRequestError` if no answer could go on from them. `most`: the most tokens of
    an answer."""
    if params.seed is None:
        raise InvalidRequestError("generated needs a seed: that of the request that generated the tokens", "seed")
    if len(generated) != params.n:
        raise InvalidRequestError(
            f"generated is for {len(generated)} answers; the request has {params.n} (n)", "generated"
        )
    if all(tokens is None for tokens in generated):
        raise InvalidRequestError(
            "generated says that all answers have ended: there is nothing to generate", "generated"
        )
    return [
        None if tokens is None else _validated(tokens, f"generated[{index}]", most, end_ids, vocab_size)
        for index, tokens in enumerate(generated)
    ]


def _validated(tokens: Sequence[int], name: str, most: int, end_ids: frozenset[int], vocab_size: int) -> array[int]:
    try:
        ids = array("i", tokens)
        values = np.frombuffer(ids, np.int32)
        known = not len(ids) or bool(values.min() >= 0 and values.max() < vocab_size)
    except OverflowError:
        known = False
    except TypeError as error:
        raise InvalidRequestError(f"{name} must be a list of token ids, or None", "generated") from error
    if not known:
        raise InvalidRequestError(f"{name} has a token id outside of 0 to {vocab_size - 1}", "generated")
    if 0 < len(ids) >= most:
        raise InvalidRequestError(
            f"{name} has {len(ids)} tokens, and the answer ends after {most}; pass None for an answer that has ended",
            "generated",
        )
    if ended := end_ids.intersection(ids):
        raise InvalidRequestError(
            f"{name} has the token {min(ended)}, which ends the answer; pass None for an answer that has ended",
            "generated",
        )
    return ids


def observe_generated(chooser: TokenChooser, tokens: Sequence[int], index: int) -> None:
    """Have the chooser of answer `index` continue after these tokens."""
    try:
        chooser.observe_all(tokens)
    except StructureError as error:
        place = chooser.generated
        raise InvalidRequestError(
            f"generated[{index}] does not follow the answer's structure: token {place} is {tokens[place]}", "generated"
        ) from error
