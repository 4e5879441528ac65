"""The errors that cLLM raises on purpose.

Each message is for the person who can act on it: what is wrong, with which value, and what to do. The HTTP layer maps
classes to status codes; the command line prints the message on one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MOST_NAMED = 32
"""Where many things are wrong, an error names this many."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class CLLMError(Exception):
    """The base class: errors meant for users."""


class ConfigError(CLLMError):
    """A configuration key is unknown, has a wrong value, or contradicts another one."""


class ModelError(CLLMError):
    """The model is missing, damaged or not supported. The message is one line, whatever values it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", message))


class InvalidRequestError(CLLMError):
    """A request that can never succeed. `param`: the invalid parameter; `code`: an error code for programs; `numbers`:
    what the message says in words, for programs."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.numbers = numbers or {}


class OverloadedError(CLLMError):
    """The queue is full. The client may try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(CLLMError):
    """The request passed its deadline, queued or running."""


class RequestCancelledError(CLLMError):
    """The request was cancelled by its owner."""


class ShuttingDownError(CLLMError):
    """The server is shutting down: it accepts no requests, or stopped before this one was done."""


class ModelUnavailableError(CLLMError):
    """A model cannot be used now. Clients see `public`, and may try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 5.0, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public
        self.retry_after_s = retry_after_s


class ModelBusyError(CLLMError):
    """A model cannot be unloaded: requests are running."""


class BackendError(CLLMError):
    """The backend failed on this request. `fatal`: its whole context is suspect and must be rebuilt."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class UnsupportedOperationError(BackendError):
    """The backend, or its memory layout, does not support this operation."""


class StructureError(BackendError):
    """The answer cannot continue within its structure (schema or grammar)."""


class StepAbortedError(BackendError):
    """The step was interrupted on request; nothing is wrong with the backend."""


def named(kind: str, names: Sequence[str]) -> str:
    """For messages: `key a`, or `keys a, b, c`."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names[:MOST_NAMED])}{more}"


def describe(error: BaseException) -> str:
    """An unexpected exception as a message, with its class, since its text alone often says little."""
    kind = type(error).__name__
    return f"internal error: {kind}: {error}" if str(error) else f"internal error: {kind}"
