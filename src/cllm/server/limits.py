"""How much one request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.server.state import ModelState, ServerState


def check_count(state: ServerState, prompts: int, n: int) -> None:
    most = state.config.server.max_prompts
    if prompts * n > most:
        raise InvalidRequestError(
            f"{prompts} prompts x n = {n} are {prompts * n} answers; "
            f"at most {most} are allowed in one request (server.max_prompts)",
            "prompt" if prompts > 1 else "n",
        )


def check_logprobs(model: ModelState, prompts: Sequence[Sequence[int]], params: SamplingParams, param: str) -> None:
    if params.logprobs is None:
        return
    tokens = sum(model.llm.answer_limit(len(prompt), params) for prompt in prompts)
    each, most = 1 + params.logprobs, model.config.server.max_logprobs
    if params.n * tokens * each > most:
        raise InvalidRequestError(
            f"n = {params.n} x {tokens} tokens x {each} log probabilities are {params.n * tokens * each}; "
            f"at most {most} are allowed in one request (server.max_logprobs): ask for fewer answers, tokens or "
            f"alternatives",
            param,
        )
