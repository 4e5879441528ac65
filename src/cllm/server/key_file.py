"""The file of named API keys (`server.api_keys`): what it holds, how it is read, and how it changes.

    {"version": 1, "salt": "…", "keys": [{"name": "ann", "digest": "…", "max_concurrent": 4, "created": "2026-01-31"}]}

A key is kept as a digest alone, BLAKE2b with the file's salt. A slow hash is for what people think up: it makes trying
all likely passwords expensive. Our keys are 256 random bits, which nobody tries, so a fast hash is as safe, and every
request needs one. The salt is the file's, not the key's: so a key is found by its digest, one look-up however many
there are. How long a look-up takes says something of a digest at most, which cannot be chosen without the salt.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cllm.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: there whoever adds keys twice at a time may lose one of them
    fcntl = None  # type: ignore[assignment]

MOST_KEYS = 10_000
"""So that metrics by name stay readable, and reading the file again holds nobody up for long: 5 ms for 1,000."""
OPERATOR = "api_key"
"""The name of the one key that is a setting, `server.api_key`."""
PREFIX = "sk-cllm-"
_MOST_BYTES = 8 << 20
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$"
_HEX = r"^[0-9a-f]{64}$"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NamedKey(_Strict):
    name: Annotated[str, Field(pattern=_NAME)]
    digest: Annotated[str, Field(pattern=_HEX)]
    max_concurrent: Annotated[int | None, Field(ge=1)] = None
    created: str = ""


class KeyFile(_Strict):
    version: Literal[1] = 1
    salt: Annotated[str, Field(pattern=_HEX)]
    keys: tuple[NamedKey, ...] = Field(default=(), max_length=MOST_KEYS, strict=False)


def digest(key: bytes, salt: str) -> bytes:
    """What is kept of a key. Its own salt makes equal keys of two files look different."""
    return blake2b(key, digest_size=32, key=bytes.fromhex(salt)).digest()


def new_salt() -> str:
    return secrets.token_hex(32)


def read_keys(path: Path) -> KeyFile:
    """The keys in a file. Raises `ConfigError`: nobody is let in by a file that is not understood."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file of keys; `cllm keys add NAME --file {path}` makes one"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the keys: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {_MOST_BYTES} bytes, and so no file of keys")
    try:
        found = KeyFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"{path}: is not a file of keys as `cllm keys add` makes it ({reason})") from None
    names = Counter(key.name for key in found.keys)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{path}: the name {twice[0]} is there twice; remove one of them")
    if len({key.digest for key in found.keys}) < len(found.keys):
        raise ConfigError(f"{path}: one key is there under two names; remove one of them")
    if OPERATOR in names:
        raise ConfigError(f"{path}: {OPERATOR} is the name of the key in server.api_key; rename the one in the file")
    return found


def add_key(path: Path, name: str, max_concurrent: int | None) -> str:
    """Make a key and keep its digest; the key itself is returned and never seen again."""
    if not re.fullmatch(_NAME, name):
        raise ConfigError(
            f"{name!r} cannot be a key's name: use up to 64 letters, digits and _ . @ -, with a letter or digit first"
        )
    if name == OPERATOR:
        raise ConfigError(f"{name} is the name of the key in server.api_key; choose another")
    if max_concurrent is not None and max_concurrent < 1:
        raise ConfigError(f"max-concurrent is {max_concurrent}: it must be at least 1")
    with _locked(path):
        known = read_keys(path) if path.exists() else KeyFile(salt=new_salt())
        if any(key.name == name for key in known.keys):
            raise ConfigError(f"{path} has a key named {name} already: choose another name, or remove it first")
        if len(known.keys) >= MOST_KEYS:
            raise ConfigError(f"{path} has {MOST_KEYS} keys, which is the most; remove some that are not used")
        key = PREFIX + secrets.token_urlsafe(32)
        today = datetime.now(timezone.utc).date().isoformat()
        entry = NamedKey(
            name=name, digest=digest(key.encode(), known.salt).hex(), max_concurrent=max_concurrent, created=today
        )
        _write(path, known.model_copy(update={"keys": (*known.keys, entry)}))
    return key


def remove_key(path: Path, name: str) -> None:
    with _locked(path):
        known = read_keys(path)
        left = tuple(key for key in known.keys if key.name != name)
        if len(left) == len(known.keys):
            close = get_close_matches(name, [key.name for key in known.keys], n=1)
            hint = f"did you mean {close[0]}?" if close else "`cllm keys list` shows those there are"
            raise ConfigError(f"{path} has no key named {name}: {hint}")
        _write(path, known.model_copy(update={"keys": left}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile. The directory is what is locked: the file itself is replaced."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}; make it, or name another file")
    try:
        directory = None if fcntl is None else os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot keep keys there: {error.strerror}") from error
    if directory is None:
        yield
        return
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _write(path: Path, content: KeyFile) -> None:
    """Replace the file in one step: whoever reads it sees the old one or the new one. Only its owner may."""
    target = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # made with 0600
        draft = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content.model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _keep_owner(target, draft)
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the keys: {error.strerror}; nothing has changed") from error


def _keep_owner(target: Path, draft: Path) -> None:
    """Root may change the keys of a server that runs as somebody else, who has to be able to read them still."""
    with suppress(OSError, AttributeError):
        before = target.stat()
        if before.st_uid != os.geteuid():
            os.chown(draft, before.st_uid, before.st_gid)
