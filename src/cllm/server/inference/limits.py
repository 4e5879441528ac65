"""Limits on what one request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cllm.engine.sampling import check_token_ids
from cllm.errors import InvalidRequestError
from cllm.text.detokenizer import check_stop_strings

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


def check_params(model: ModelState, params: SamplingParams) -> None:
    """What `submit` would refuse, for requests that may never be submitted."""
    check_token_ids(params, model.llm.text.spec.n_vocab)
    check_stop_strings(params.stop)


def check_logprobs(
    model: ModelState,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    param: str,
    of_prompts: str = "prompt_logprobs",
) -> None:
    """`param` and `of_prompts`: the parameters that asked for those of answers, and of prompts."""
    most = model.config.server.max_logprobs
    if params.prompt_logprobs is not None:
        _check(most, params.n, sum(map(len, prompts)), "tokens of prompts", params.prompt_logprobs, of_prompts)
    if params.logprobs is not None:
        tokens = sum(model.llm.text.answer_limit(len(prompt), params) for prompt in prompts)
        _check(most, params.n, tokens, "tokens", params.logprobs, param)


def _check(most: int, n: int, tokens: int, what: str, alternatives: int, param: str) -> None:
    each = 1 + alternatives
    if n * tokens * each > most:
        raise InvalidRequestError(
            f"n = {n} x {tokens} {what} x {each} log probabilities are {n * tokens * each}; at most {most} are "
            f"allowed in one request (server.max_logprobs): ask for fewer answers, tokens or alternatives",
            param,
        )
