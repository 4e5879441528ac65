"""The file of named API keys (`server.api_keys`): what it holds, how it is read, and how it changes.

    {"version": 1, "salt": "…", "keys": [{"name": "ann", "digest": "…", "max_concurrent": 4, "created": "2026-01-31"}]}

A key is kept as a digest alone, BLAKE2b with the file's salt. A slow hash is for what people think up: it makes trying
all likely passwords expensive. Our keys are 256 random bits, which nobody tries, so a fast hash is as safe, and every
request needs one. The salt is the file's, not the key's: so a key is found by its digest, one look-up however many
there are. How long a look-up takes says something of a digest at most, which cannot be chosen without the salt.
"""

from __future__ import annotations

import fcntl
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

MOST_KEYS = 10_000
"""Keeps metrics by name readable, and reloading the file fast: 5 ms for 1,000 keys."""
OPERATOR = "api_key"
"""The name of the key in the setting `server.api_key`."""
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
    """What is stored of a key. Every file has its own salt, so equal keys in two files look different."""
    return blake2b(key, digest_size=32, key=bytes.fromhex(salt)).digest()


def new_salt() -> str:
    return secrets.token_hex(32)


def read_keys(path: Path) -> KeyFile:
    """The keys in a file. Raises `ConfigError` if the file is not valid: then no key is accepted."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file; create it with `cllm keys add NAME --file {path}`") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the keys: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {_MOST_BYTES} bytes, so it is not a key file")
    try:
        found = KeyFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"{path}: is not a valid key file ({reason}); `cllm keys add` writes one") from None
    names = Counter(key.name for key in found.keys)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{path}: the name {twice[0]} occurs twice; remove one")
    if len({key.digest for key in found.keys}) < len(found.keys):
        raise ConfigError(f"{path}: the same key has two names; remove one")
    if OPERATOR in names:
        raise ConfigError(f"{path}: {OPERATOR} is the name of the key in server.api_key; rename the one in the file")
    return found


def add_key(path: Path, name: str, max_concurrent: int | None) -> str:
    """Create a key and store its digest; the key itself is returned and stored nowhere."""
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
            raise ConfigError(f"{path} already has the maximum of {MOST_KEYS} keys; remove unused ones")
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
            hint = f"did you mean {close[0]}?" if close else "`cllm keys list` lists them"
            raise ConfigError(f"{path} has no key named {name}: {hint}")
        _write(path, known.model_copy(update={"keys": left}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock against other writers. The lock is on the directory, since the file itself is replaced."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the directory {path.parent} does not exist; create it or choose another file")
    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _write(path: Path, content: KeyFile) -> None:
    """Replace the file atomically, readable by its owner only."""
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
    """If root changes the keys of a server that runs as another user, that user must still be able to read them."""
    with suppress(OSError):
        before = target.stat()
        if before.st_uid != os.geteuid():
            os.chown(draft, before.st_uid, before.st_gid)
