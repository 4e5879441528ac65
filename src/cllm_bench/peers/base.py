"""What a peer is: another engine that does the same work in the same run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from cllm_bench.errors import BenchError
from cllm_bench.servers import Server

PeerSettings = Mapping[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a workload asks of a server."""

    workload: str
    at_once: int
    """Most requests that run together."""
    tokens: int
    """Longest sequence, about."""

    @property
    def room(self) -> int:
        """Tokens to reserve for one sequence: a chat template and the tokenizer may add some."""
        return -(-int(self.tokens * 1.1 + 64) // 512) * 512


class Peer(ABC):
    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    """What must be importable."""
    install: ClassVar[str]

    def require(self) -> None:
        if any(find_spec(module) is None for module in self.modules):
            raise BenchError(
                f"the peer {self.name} is not installed: {self.install}, or leave it out with --against none"
            )

    @abstractmethod
    def candidates(self, needs: Needs) -> tuple[PeerSettings, ...]:
        """Settings that might be its best for the work. The first is used; `--tune` measures them all."""

    @abstractmethod
    def start(self, model: Path, threads: int, settings: PeerSettings) -> AbstractAsyncContextManager[Server]: ...


def describe(settings: PeerSettings) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
