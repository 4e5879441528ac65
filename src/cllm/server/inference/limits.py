"""Limits on what one request may ask for, and what it may pin in the cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cllm.engine.sampling import check_token_ids
from cllm.errors import InvalidRequestError
from cllm.kv.pins import PinMark
from cllm.text.detokenizer import check_stop_strings

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.server.schema.messages import CacheControl, Mark
    from cllm.server.state import ModelState, ServerState
    from cllm.text.chat_template import PromptOptions

log = logging.getLogger("cllm.server")


async def pins_of_chat(
    model: ModelState,
    marks: Sequence[Mark],
    control: CacheControl | None,
    prompt: Sequence[int],
    params: SamplingParams,
    options: PromptOptions,
) -> list[PinMark]:
    """What a chat's cache_control marks pin of its prompt."""
    if not model.config.kv.pin_marks:
        return []
    pins: list[PinMark] = []
    for messages, marked in marks:
        try:
            beginning = await model.encoder.encode_beginning(messages, params, options)
        except InvalidRequestError as error:  # the template may need more messages than come before the mark
            log.debug("ignored a cache_control mark: %s", error)
            continue
        pins.append(PinMark(_in_common(beginning, prompt), marked.seconds))
    return pins + pins_of(model, control, prompt)


def pins_of(model: ModelState, control: CacheControl | None, prompt: Sequence[int]) -> list[PinMark]:
    """What cache_control on the request itself pins: the whole prompt."""
    return [PinMark(len(prompt), control.seconds)] if control is not None and model.config.kv.pin_marks else []


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    differ = np.asarray(one[:length]) != np.asarray(other[:length])
    return int(differ.argmax()) if differ.any() else length


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
