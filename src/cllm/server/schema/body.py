"""Parses and validates request bodies without blocking the event loop.

Parsing and validating hold the interpreter however many threads there are: a thread helps others only between two such
calls. So what would take long is refused before it is parsed, by counting what the JSON holds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import numpy as np
from fastapi import Depends, Request
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from cllm.errors import InvalidRequestError
from cllm.server.errors import ClientGoneError
from cllm.server.schema.invalid import describe_invalid
from cllm.server.schema.validation import shorten
from cllm.work.executor import SizedExecutor

if TYPE_CHECKING:
    from cllm.config import ServerConfig

M = TypeVar("M", bound=BaseModel)

INLINE_BYTES = 16_384
"""Bodies up to this size are parsed on the event loop, in about 3 ms at most."""
_SHORT_BYTES = 262_144
MAX_DEPTH = 128
"""Nested brackets. A schema has two or three for each level of the values that it describes."""
MAX_PARAMETERS = 256
"""Top-level keys; no request has half as many."""
_SLICE = 1 << 18
_NOT_JSON = "The body must be a JSON object, sent with content-type: application/json."

_MARKS = np.zeros(256, np.bool_)
_MARKS[list(b"[]{},:")] = True
_STEPS = np.zeros(256, np.int32)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def body_executor() -> SizedExecutor:
    return SizedExecutor("body", inline=INLINE_BYTES, short=_SHORT_BYTES)


class BodyReader(Generic[M]):
    """A FastAPI dependency: the request's body as a `model`."""

    def __init__(self, model: type[M], *, of_any_type: bool = False) -> None:
        """`of_any_type`: whatever its content-type, but for requests of web pages: a browser sends JSON to another
        server only if that allows it, and other types always."""
        self.model = model
        self._of_any_type = of_any_type

    async def __call__(self, request: Request) -> M:
        trusted = self._of_any_type and "origin" not in request.headers
        if not trusted and not _is_json(request.headers.get("content-type", "")):
            raise InvalidRequestError(_NOT_JSON)
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise InvalidRequestError(
                f"The body is compressed ({shorten(encoding)}); send it without Content-Encoding."
            )
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ClientGoneError from None
        state = request.app.state.cllm
        limits: ServerConfig = state.config.server
        executor: SizedExecutor = state.bodies
        return await executor.run(len(raw), lambda: read_body(self.model, raw, limits))


if TYPE_CHECKING:
    JsonBody = Annotated[M, "read by a BodyReader"]
    OllamaBody = Annotated[M, "read by a BodyReader"]
else:

    class JsonBody:
        """`JsonBody[Model]` as the type of a route's parameter: the request's body as a `Model`."""

        def __class_getitem__(cls, model: type[M]) -> Any:
            return Annotated[model, Depends(BodyReader(model))]

    class OllamaBody:
        """The same for Ollama's API, whose documentation and clients send no content-type of JSON."""

        def __class_getitem__(cls, model: type[M]) -> Any:
            return Annotated[model, Depends(BodyReader(model, of_any_type=True))]


def read_body(model: type[M], raw: bytes, limits: ServerConfig) -> M:
    if len(raw) > INLINE_BYTES or raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _JsonCount(raw, limits, frozenset(model.model_fields)).check()
    try:
        return model.model_validate(_parse(raw), context=limits)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8: see byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} (at character {error.pos}).") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python parses integers of up to 4,300 digits
        raise InvalidRequestError("The body contains a number with too many digits.") from None


def _refusal(errors: list[Any]) -> InvalidRequestError:
    param, message = describe_invalid(errors)
    return InvalidRequestError(message, param)


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The body's JSON is nested more than {MAX_DEPTH} deep.")


class _JsonCount:
    """Counts values, keys and depth in one pass over the bytes. It assumes valid JSON: anything else is refused when
    parsed, if not here."""

    def __init__(self, raw: bytes, limits: ServerConfig, names: frozenset[str]) -> None:
        self._limits = limits
        self._names = names
        # After this, every quote begins or ends a string.
        self._bytes = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        self._inside = 0
        self._depth = 0
        self._values = 1
        self._keys = 0
        self._parameters: list[int] = []
        """Positions of the colons after the first top-level keys."""
        self._last = 0
        """Position of the last such colon."""
        self._since = 0
        """Marks since then."""
        self._largest = (0, 0)
        """The most marks after one such colon, and its position."""

    def check(self) -> None:
        for start in range(0, len(self._bytes), _SLICE):
            self._check_slice(start)

    def _check_slice(self, start: int) -> None:
        count = min(_SLICE, len(self._bytes) - start)
        found = np.frombuffer(self._bytes, np.uint8, count, start)
        # A byte is in a string if the number of quotes before it is odd. Overflow does not change the parity.
        strings = (np.cumsum(found == ord('"'), dtype=np.uint8) + np.uint8(self._inside)) & 1
        places = np.flatnonzero(_MARKS[found] & (strings == 0))
        marks = found[places]
        depths = self._depth + np.cumsum(_STEPS[marks], dtype=np.int32)
        colons = marks == ord(":")
        at = np.flatnonzero(colons & (depths == 1))
        tops = places[at] + start
        self._parameters += tops[: MAX_PARAMETERS + 1 - len(self._parameters)].tolist()
        self._values += int(np.count_nonzero(marks == ord(",")) + np.count_nonzero(_STEPS[marks] > 0))
        self._keys += int(np.count_nonzero(colons))
        self._inside = int(strings[-1])
        if len(marks):
            self._depth = int(depths[-1])
        self._compare(np.diff(np.concatenate(([0], at, [len(marks)]))), tops)
        self._judge(int(depths.max(initial=0)))

    def _compare(self, sizes: NDArray[np.intp], tops: NDArray[np.intp]) -> None:
        """`sizes`: the marks before the first of the colons `tops`, and after each of them."""
        self._since += int(sizes[0])
        self._largest = max(self._largest, (self._since, self._last))
        if len(tops):
            best = int(sizes[1:].argmax())
            self._largest = max(self._largest, (int(sizes[1 + best]), int(tops[best])))
            self._since, self._last = int(sizes[-1]), int(tops[-1])

    def _judge(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _too_deep()
        if len(self._parameters) > MAX_PARAMETERS:
            unknown = next((name for name in map(self._key, self._parameters) if name not in self._names), None)
            if unknown is not None:
                raise InvalidRequestError(f"{unknown} is not a parameter of this request.", unknown)
            raise InvalidRequestError(f"The body has more than {MAX_PARAMETERS} keys.")
        for count, setting, things in (
            (self._values, "max_json_values", "values"),
            (self._keys, "max_json_keys", "keys"),
        ):
            most: int = getattr(self._limits, setting)
            if count > most:
                name = self._key(self._largest[1])
                raise InvalidRequestError(
                    f"{name} is too large: the body's JSON has more than {most} {things} (server.{setting}).", name
                )

    def _key(self, colon: int) -> str:
        """The key before a colon."""
        stop = self._bytes.rfind(b'"', 0, colon)
        start = self._bytes.rfind(b'"', 0, stop)
        return shorten(self._bytes[start + 1 : stop].decode(errors="replace"))
