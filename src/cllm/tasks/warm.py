"""Warming: computes prefixes before a request needs them, and pinned ones again after their memory was lost."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cllm.engine.submission import Submission
from cllm.engine.tenant import Tenant
from cllm.errors import CLLMError, InvalidRequestError, OverloadedError, ShuttingDownError
from cllm.kv.pins import LostPin, PinMark, PinSource
from cllm.llm import LOW_PRIORITY, ONE_TOKEN
from cllm.loading.text_tools import WHOLE_PROMPT

if TYPE_CHECKING:
    from cllm.config.kv import WarmPrefix
    from cllm.llm import AsyncLLM

log = logging.getLogger("cllm.warm")

MOST_FILE_BYTES = 16 << 20


async def warm_up(llm: AsyncLLM, prefixes: Sequence[WarmPrefix], tenant_of: Callable[[bool], Tenant | None]) -> None:
    """Warm the prefixes of `kv.warm`, one after the other. Failures are logged and do not stop the server.

    `tenant_of` gives the tenant of shared prefixes, or of others; None if there is none.
    """
    for number, prefix in enumerate(prefixes):
        tenant = tenant_of(prefix.shared)
        if tenant is None:
            log.warning(
                "skipping kv.warm[%d]: it is not shared, each key has its own cached prefixes, and there is no "
                "server.api_key to compute it for",
                number,
            )
            continue
        try:
            text = prefix.prompt if prefix.file is None else await _read_in_thread(prefix.file)
            prompt = await _encode(llm, prefix, text)
            name = f"warm-{number}"
            pins = [pin_mark(prompt, prefix.ttl_s)] if prefix.pin else []
            done = await llm.warm(Submission(prompt, ONE_TOKEN, name, LOW_PRIORITY, tenant=tenant, pins=pins))
        except (CLLMError, OSError, ValueError) as error:
            log.warning("kv.warm[%d] could not be computed: %s", number, error)
            continue
        outcome = f"not pinned: {done.refusal}" if done.refusal else "pinned" if done.pin_id else "not pinned"
        log.info(
            "kv.warm[%d]: %d tokens (%d already cached), %.2f s, %s",
            *(number, done.tokens, done.cached, done.seconds, outcome),
        )


async def restore_pins(llm: AsyncLLM) -> None:
    """Compute pinned prefixes whose memory was lost, one after the other, and pin them for the time they have left."""
    with suppress(ShuttingDownError):
        while lost := await llm.executor.lost_pins():
            await _restore_pin(llm, lost[0])


async def _restore_pin(llm: AsyncLLM, pin: LostPin) -> None:
    tokens, tenant = pin.of.tokens, Tenant(space=pin.of.space)
    mark = PinMark(len(tokens), pin.ttl_s, pin.source)
    try:
        done = await llm.warm(Submission(tokens, ONE_TOKEN, priority=LOW_PRIORITY, tenant=tenant, pins=[mark]))
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
        log.info("a lost pinned prefix of %d tokens was computed and pinned again", len(pin.of.tokens))
    else:
        log.warning("a lost pinned prefix of %d tokens could not be restored: %s", len(pin.of.tokens), reason)
        await llm.executor.unpin(pin.id)


def pin_mark(prompt: Sequence[int], ttl_s: float | None, source: PinSource = "warm") -> PinMark:
    """A pin of the whole prompt, for ever if no time is given."""
    return PinMark(len(prompt), math.inf if ttl_s is None else ttl_s, source)


async def _encode(llm: AsyncLLM, prefix: WarmPrefix, text: str | None) -> list[int]:
    messages = _messages(prefix, text)
    if messages is not None:
        return await llm.text.encode_beginning(messages)
    assert text is not None
    return await llm.text.work.encode(text, WHOLE_PROMPT, llm.text.prompt_limit(), "prompt")


def _messages(prefix: WarmPrefix, text: str | None) -> Sequence[Mapping[str, Any]] | None:
    """None if it is plain text, the beginning of a prompt."""
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
        raise InvalidRequestError(f"{path} must contain a list of messages, or an object with one")
    return messages


def _plain(message: Any) -> Any:
    """Chat templates know `system`, not `developer`."""
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


async def _read_in_thread(path: Path) -> str:
    """In a daemon thread, so that a network file that hangs does not keep the process from ending."""
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
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidRequestError(f"{path} is not a regular file")
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {MOST_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text") from error


def _open_nonblocking(path: str, flags: int) -> int:
    """Does not wait for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
