"""A line in the log when a long prompt begins: its first token may be minutes away, and the server is not stuck."""

from __future__ import annotations

import logging

from cllm.engine.costs import StepCosts
from cllm.engine.request import Sequence

log = logging.getLogger("cllm.engine")

LONG_TOKENS = 2048
"""To be computed, while the cost of a token is not known."""
LONG_S = 2.0


def log_long_prompt(sequence: Sequence, cached: int, costs: StepCosts) -> None:
    """To be called when the sequence has been admitted, with the tokens that were cached."""
    missing, request = sequence.uncomputed, sequence.request
    seconds = costs.tokens_s(missing, cached) if costs.token_s else None
    if request.preemptions or (missing < LONG_TOKENS if seconds is None else seconds < LONG_S):
        return
    expected = "" if seconds is None else f"; about {seconds:,.0f} s if it is computed alone"
    fields = {
        "request_id": request.id,
        "prompt_tokens": sequence.n_prompt,
        "cached_tokens": cached,
        "uncomputed_tokens": missing,
        "expected_s": None if seconds is None else round(seconds, 1),
    }
    log.info(
        "%s begins a long prompt: %d tokens, %d cached, %d to compute%s",
        *(request.id, sequence.n_prompt, cached, missing, expected),
        extra={"fields": fields},
    )
