"""Marks in requests that ask for their beginning to stay cached for a while, as some APIs have them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from cllm.errors import InvalidRequestError
from cllm.kv.pins import PinMark
from cllm.server.validation import RequestModel, shorten, wrong

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.server.openai_schema import ChatRequest
    from cllm.server.state import ModelState
    from cllm.text.chat import PromptOptions

log = logging.getLogger("cllm.server")

MOST_MARKS = 4
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TTL = (
    r"^(([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2}|86400)s"
    r"|([1-9][0-9]{0,2}|1[0-3][0-9]{2}|14[0-3][0-9]|1440)m|([1-9]|1[0-9]|2[0-4])h)$"
)
"""24 hours at most, in each unit."""


def _is_time(text: str) -> str:
    if re.fullmatch(_TTL, text) is None:
        raise wrong(f"must be such as 30s, 5m or 1h, 24h at most, not {shorten(repr(text))}")
    return text


class CacheControl(RequestModel):
    """A hint: what is marked stays cached for that time, if the server's limit of such prefixes has room for it."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, AfterValidator(_is_time), Field(json_schema_extra={"pattern": _TTL})] | None = Field(
        None, description="How long from the end of the answer on, such as 30s, 5m or 1h, 24h at most. Default 5m."
    )

    @property
    def seconds(self) -> float:
        ttl = self.ttl or "5m"
        return float(int(ttl[:-1]) * _SECONDS[ttl[-1]])


Mark = tuple[list[dict[str, Any]], CacheControl]
"""The messages up to a mark, the last one as far as it goes."""


def count_marks(body: ChatRequest) -> int:
    """Those on messages and on their parts."""
    count = 0
    for message in body.messages:
        count += message.cache_control is not None
        if isinstance(message.content, list):
            count += sum(part.cache_control is not None for part in message.content)
    return count


def marks_in(body: ChatRequest) -> list[Mark]:
    """The marks on messages and on their parts, in their order."""
    marks: list[Mark] = []
    plain: list[dict[str, Any]] = []
    for message in body.messages:
        whole = message.plain()
        for number, part in enumerate(message.content if isinstance(message.content, list) else (), 1):
            if part.cache_control is not None:
                assert isinstance(message.content, list)
                beginning = message.model_copy(update={"content": message.content[:number]})
                marks.append(([*plain, beginning.plain()], part.cache_control))
        plain.append(whole)
        if message.cache_control is not None:
            marks.append(([*plain], message.cache_control))
    return marks


async def pins_of_chat(
    model: ModelState,
    marks: Sequence[Mark],
    control: CacheControl | None,
    prompt: Sequence[int],
    params: SamplingParams,
    options: PromptOptions,
) -> list[PinMark]:
    """What of a chat's prompt its marks, and the one on the request itself, ask to keep."""
    if not model.config.kv.pin_marks:
        return []
    pins: list[PinMark] = []
    for messages, marked in marks:
        try:
            beginning = await model.texts.encode_beginning(messages, params, options)
        except InvalidRequestError as error:  # a template may want more messages than a mark has before it
            log.debug("a cache_control mark is left out: %s", error)
            continue
        pins.append(PinMark(_in_common(beginning, prompt), marked.seconds))
    return pins + pins_of(model, control, prompt)


def pins_of(model: ModelState, control: CacheControl | None, prompt: Sequence[int]) -> list[PinMark]:
    """What a mark on the request itself asks to keep: all of its prompt."""
    return [PinMark(len(prompt), control.seconds)] if control is not None and model.config.kv.pin_marks else []


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    differ = np.asarray(one[:length]) != np.asarray(other[:length])
    return int(differ.argmax()) if differ.any() else length
