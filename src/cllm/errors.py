"""Every error cLLM raises on purpose.

Each one carries a message for the person who can act on it: what was wrong, with which value, and what to do.
The HTTP layer maps classes to status codes, the command line prints the message on one line.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class CLLMError(Exception):
    """Base of all errors that are meant to be read by a user."""


class ConfigError(CLLMError):
    """A configuration key is unknown, has a wrong value, or contradicts another one."""


class ModelError(CLLMError):
    """The model file is missing, damaged or of a kind that cannot be run. One line, whatever values it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", message))


class InvalidRequestError(CLLMError):
    """A request that can never succeed as it is. `param` names the offending field, `code` the kind of error where
    programs look for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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
    """The server no longer takes requests, or stopped before this one was done."""


class ModelUnavailableError(CLLMError):
    """One of several models cannot be used now. Clients are told `public`, and may try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 5.0, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public
        self.retry_after_s = retry_after_s


class ModelBusyError(CLLMError):
    """A model cannot be unloaded: requests are running."""


class BackendError(CLLMError):
    """The backend failed on this request.

    `fatal` says that the backend's whole context is suspect and has to be rebuilt.
    """

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class UnsupportedOperationError(BackendError):
    """The backend, or the way its memory is laid out, cannot do this at all."""


class StructureError(BackendError):
    """An answer cannot go on within the limits of its structure."""


class StepAbortedError(BackendError):
    """The step was interrupted on request; nothing is wrong with the backend."""


def describe(error: BaseException) -> str:
    """An unexpected exception in a message: its kind too, since its own text often says nothing without."""
    kind = type(error).__name__
    return f"internal error: {kind}: {error}" if str(error) else f"internal error: {kind}"
