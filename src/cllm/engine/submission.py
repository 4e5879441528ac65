"""One request as one record: what the server, the executor, the engine and a cluster's link hand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cllm.engine.draw import Grammar
from cllm.engine.params import SamplingParams
from cllm.engine.resuming import Generated
from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.kv.pins import PinMark


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt and everything that was asked for with it; made once, where a request has become tokens."""

    prompt: Sequence[int]
    params: SamplingParams
    request_id: str = ""
    """Empty: one is made up."""
    priority: int = 0
    timeout_s: float | None = None
    """It may shorten scheduler.request_timeout_s, never lengthen it."""
    tenant: Tenant = ANONYMOUS
    """Prefixes are shared with requests whose tenant has the same space."""
    session: str | None = None
    """Requests of one session have much in common; in a cluster they go to the same replica if that costs nothing."""
    pins: Sequence[PinMark] = ()
    """Parts of the prompt to pin in the cache when the first answer ends. They hold the outcome after that."""
    grammar: Grammar | None = None
    """`params.structured`, compiled."""
    shown: Mapping[int, bytes] | None = None
    """Special tokens that are part of the answer's text."""
    embeds: bool = False
    """Whether the prompt is a text to embed or to rank, instead of one to answer."""
    generated: Generated | None = None
    """Resumes answers of a request with the same prompt, parameters and seed that was cut off: for each the tokens that
    it has, or None if it has ended. What is generated is what follows them."""
    replica: str | None = None
    """The replica of a cluster that must work on it, if it is one in particular."""
