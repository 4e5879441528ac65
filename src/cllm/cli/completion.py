"""What the shell offers for the values of options and arguments. Where nothing matches, it completes file names."""

from __future__ import annotations

from cllm.errors import CLLMError

_BACKENDS = ("auto", "native", "llama_cpp", "torch", "fake")
_DEVICES = ("auto", "cpu", "cuda")


def models(incomplete: str) -> list[str]:
    """The names of models that are known or were downloaded. Paths are left to the shell."""
    from cllm.models.registry import local_models

    try:
        names = [name for name, _ in local_models()]
    except (CLLMError, OSError):  # a message would land in the middle of the user's line
        return []
    return [name for name in names if name.startswith(incomplete) and not name.startswith("/")]


def backends(incomplete: str) -> list[str]:
    return [name for name in _BACKENDS if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    return [name for name in _DEVICES if name.startswith(incomplete)]


def settings(incomplete: str) -> list[tuple[str, str]]:
    """Every key of the configuration, with what it does."""
    from cllm.config.keys import KEYS

    return [(f"{key}=", field.description or "") for key, field in KEYS.items() if key.startswith(incomplete)]
