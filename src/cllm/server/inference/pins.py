"""What a request's `cache_control` pins in the cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cllm.errors import InvalidRequestError
from cllm.kv.pins import PinMark

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.server.schema.messages import CacheControl, Mark
    from cllm.server.state import ModelState
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
