"""What streams: pieces of an answer in the order in which they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob

Logprobs = Sequence["TokenLogprob"] | None
"""The tokens since the last delta of the same answer; None if the request did not ask for them."""


@dataclass(slots=True)
class Delta:
    """More text of an answer. The last delta has a `finish_reason`."""

    index: int
    """Which of the request's answers."""
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Logprobs = None
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer."""
    generated: Sequence[int] = ()
    """All tokens that were generated since the last delta, with one that ended the answer: their text is in this delta,
    or held back."""


@dataclass(slots=True)
class ReasoningDelta:
    index: int
    text: str
    logprobs: Logprobs = None
    generated: Sequence[int] = ()
    """As in `Delta`."""


@dataclass(slots=True)
class ToolCallStart:
    """A tool call whose name is certain."""

    index: int
    number: int
    """Which of the answer's calls, from 0."""
    id: str
    name: str
    logprobs: Logprobs = None
    generated: Sequence[int] = ()
    """As in `Delta`."""


@dataclass(slots=True)
class ToolCallDelta:
    """More of a call's arguments, which are the text of a JSON object."""

    index: int
    number: int
    text: str
    logprobs: Logprobs = None
    generated: Sequence[int] = ()
    """As in `Delta`."""


ChatDelta = Delta | ReasoningDelta | ToolCallStart | ToolCallDelta
