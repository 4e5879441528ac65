"""What all workloads share: their setup, their interface, and the base of those that drive no server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cllm.models.registry import resolve
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Run
from cllm_bench.live import View
from cllm_bench.machine import busy_percent
from cllm_bench.prompts import Encode, Prompts

Keep = Callable[[Run], None]
"""Takes a pass as soon as it has ended, so that it is not lost if the next one breaks off."""

SETTLE_S = 0.3
"""Thread pools may spin for a moment after work."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, once all options are known."""

    model: str
    encode: Encode
    threads: int
    repeats: int
    backend: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of cLLM, by their dotted keys."""
    url: str | None = None
    """Drive the server at this address instead of starting cLLM."""
    api_key: str | None = None
    against: tuple[str, ...] = ()
    """The peers: `LLAMA_SERVER`, or addresses."""
    salt: str = ""
    """Makes the prompts of this run its own."""
    view: View = field(default_factory=View)
    ours: str = "cLLM"
    """What the side under test is called, unless it is at `url`."""

    def sides(self, repeat: int) -> Sequence[str]:
        """The sides that run in this repeat, in order. It alternates, so that a drift of the machine hits all alike."""
        order = (OURS, *self.against)
        return order if repeat % 2 == 0 else order[::-1]

    def shown(self, side: str) -> str:
        return (self.url or self.ours) if side == OURS else side

    @property
    def model_file(self) -> Path:
        """The model on disk, fetched at first use."""
        return resolve(self.model)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of an engine in this process, with nothing kept on disk."""
        return {
            "model.name": self.model if self.backend == "fake" else str(self.model_file),
            "backend.type": self.backend,
            "backend.threads": self.threads,
            "kv.disk.enabled": False,
            **self.settings,
        }

    def prompts(self, seed: str) -> Prompts:
        return Prompts(self.encode, f"{seed} {self.salt}")


class PartsFailedError(BenchError):
    """Parts of a work failed, by name; the others were measured."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{part}: {reason}" for part, reason in reasons.items()))
        self.reasons = reasons


class Workload(ABC):
    """One kind of work. Subclasses are frozen dataclasses whose fields are the sizes; `--size` changes any of them."""

    name: ClassVar[str]
    figures: ClassVar[tuple[Figure, ...]]
    over_http: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True

    @property
    @abstractmethod
    def title(self) -> str:
        """What is done, with the sizes. It begins with the name."""

    @property
    def by_side(self) -> str | None:
        """The table has a row for each side, which is compared with this one; otherwise a row for each figure."""
        return None

    @abstractmethod
    def quick(self) -> Workload:
        """The same work, small: to see that all runs, not to quote figures."""

    @abstractmethod
    async def measure(self, setup: Setup, keep: Keep) -> None:
        """Do the work `setup.repeats` times on every side."""

    @property
    def all_figures(self) -> Sequence[Figure]:
        """The figures in the table: its own, and what it shares with others."""
        return self.figures


class LocalWorkload(Workload):
    """Work in this process, or in processes it starts itself: `--url` and `--against` do not concern it.

    If it compares with something, that is a side of its own, by any name.
    """

    async def measure(self, setup: Setup, keep: Keep) -> None:
        for repeat in range(setup.repeats):
            setup.view.say(f"{self.title}: {repeat + 1} of {setup.repeats}")
            for run in await self.one_repeat(setup, repeat):
                keep(run)

    @abstractmethod
    async def one_repeat(self, setup: Setup, repeat: int) -> Sequence[Run]:
        """A run of each side, the one under test as `OURS`."""


async def busy_at_rest() -> float:
    """How busy the machine is when it should have nothing to do: another program, or a server that spins."""
    await asyncio.sleep(SETTLE_S)
    return busy_percent()
