"""Prefixes that are computed before anybody asks for them: at the start of a server, and whenever it is told to."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.engine.params import SamplingParams
from cllm.engine.tenant import NOBODY, Tenant
from cllm.errors import CLLMError, InvalidRequestError, OverloadedError, ShuttingDownError
from cllm.kv.pins import LostPin, PinMark, PinSource

if TYPE_CHECKING:
    from cllm.config.warm import WarmPrefix
    from cllm.llm import AsyncLLM

log = logging.getLogger("cllm.warm")

LATER = 1
"""The priority of what nobody waits for yet: behind everybody who came in the last seconds."""
MOST_FILE_BYTES = 16 << 20


class Warmed(NamedTuple):
    tokens: int
    cached: int
    """Tokens that were there already."""
    seconds: float
    pin_id: str | None
    pinned_tokens: int
    left_s: float | None
    """How long the pin lasts; None: for ever, or there is none."""
    refusal: str | None
    """Why it was not pinned, though it should be."""


async def warm(
    llm: AsyncLLM,
    prompt: Sequence[int],
    *,
    pin: bool = False,
    ttl_s: float | None = None,
    tenant: Tenant = NOBODY,
    request_id: str | None = None,
    priority: int = LATER,
    source: PinSource = "warm",
) -> Warmed:
    """Have the K/V of a prompt computed, or loaded, as any request has; the token that comes of it is thrown away."""
    mark = PinMark(len(prompt), math.inf if ttl_s is None else ttl_s, source)
    started = time.perf_counter()
    generation = llm.submit(
        prompt,
        SamplingParams(max_tokens=1, temperature=0.0, context_window=None),
        request_id=request_id,
        priority=priority,
        tenant=tenant,
        pins=[mark] if pin else [],
    )
    async with generation:
        async for _ in generation:
            pass
    took = time.perf_counter() - started
    left_s = mark.left_s if mark.pin_id is not None and math.isfinite(mark.left_s) else None
    return Warmed(len(prompt), generation.cached_tokens, took, mark.pin_id, mark.pinned_tokens, left_s, mark.refusal)


async def warm_up(llm: AsyncLLM, prefixes: Sequence[WarmPrefix], tenant_of: Callable[[bool], Tenant | None]) -> None:
    """All of `kv.warm`, one after the other. What cannot be done is said in the log; the server goes on without.

    `tenant_of` says for whom one is computed that is shared, or is not; None: there is nobody.
    """
    for number, prefix in enumerate(prefixes):
        tenant = tenant_of(prefix.shared)
        if tenant is None:
            log.warning(
                "kv.warm[%d] is left out: it is not shared, every key has cached prefixes of its own, and there is no "
                "server.api_key that it could be for",
                number,
            )
            continue
        try:
            text = prefix.prompt if prefix.file is None else await _read_aside(prefix.file)
            prompt = await asyncio.to_thread(_encode, llm, prefix, text)
            name = f"warm-{number}"
            done = await warm(llm, prompt, pin=prefix.pin, ttl_s=prefix.ttl_s, tenant=tenant, request_id=name)
        except (CLLMError, OSError, ValueError) as error:
            log.warning("kv.warm[%d] could not be computed: %s", number, error)
            continue
        fate = f"not pinned: {done.refusal}" if done.refusal else "pinned" if done.pin_id else "not pinned"
        log.info(
            "kv.warm[%d]: %d tokens, %d of them cached before, %.2f s, %s",
            *(number, done.tokens, done.cached, done.seconds, fate),
        )


async def pin_again(llm: AsyncLLM) -> None:
    """Compute what was pinned and got lost with its memory, one after the other; pin it for the time that is left."""
    with suppress(ShuttingDownError):
        while lost := await llm.lost_pins():
            await _pin_one_again(llm, lost[0])


async def _pin_one_again(llm: AsyncLLM, pin: LostPin) -> None:
    ttl_s = None if math.isinf(pin.ttl_s) else pin.ttl_s
    tenant = Tenant(space=pin.of.space)
    try:
        done = await warm(llm, pin.of.tokens, pin=True, ttl_s=ttl_s, tenant=tenant, source=pin.source)
    except OverloadedError as error:
        await asyncio.sleep(error.retry_after_s)
        return
    except ShuttingDownError:
        raise
    except CLLMError as error:
        pinned, reason = False, str(error)
    else:
        pinned, reason = done.pin_id == pin.id, done.refusal or "it has another name now"
    if pinned:
        log.info("a pinned prefix of %d tokens that was lost is computed and pinned again", len(pin.of.tokens))
    else:
        log.warning("a pinned prefix of %d tokens stays lost: %s", len(pin.of.tokens), reason)
        await llm.unpin(pin.id)


def _encode(llm: AsyncLLM, prefix: WarmPrefix, text: str | None) -> list[int]:
    messages = _messages(prefix, text)
    if messages is not None:
        return llm.encode_beginning(messages)
    assert text is not None
    llm.prompt_limit().check_text(llm.tokenizer, text, "prompt")
    return llm.tokenizer.encode(text)


def _messages(prefix: WarmPrefix, text: str | None) -> Sequence[Mapping[str, Any]] | None:
    """None: it is the beginning of a prompt."""
    if prefix.messages is not None:
        return [_plain(message.model_dump()) for message in prefix.messages]
    assert text is not None
    if prefix.file is not None and prefix.file.suffix == ".json":
        return [_plain(message) for message in _list_in(prefix.file, text)]
    return None if prefix.role is None else [_plain({"role": prefix.role, "content": text})]


def _list_in(path: Path, text: str) -> list[Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}") from error
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{path} must hold a list of messages, or an object with one")
    return messages


def _plain(message: Any) -> Any:
    """As chat templates know it."""
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


async def _read_aside(path: Path) -> str:
    """In a thread that nobody waits for when the process ends: a network's file may take for ever."""
    done: Future[str] = Future()

    def read() -> None:
        try:
            done.set_result(_read(path))
        except Exception as error:
            done.set_exception(error)

    done.set_running_or_notify_cancel()
    threading.Thread(target=read, name="cllm-read", daemon=True).start()
    return await asyncio.wrap_future(done)


def _read(path: Path) -> str:
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidRequestError(f"{path} is not a regular file")
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {MOST_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text") from error


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody who writes, if it is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
