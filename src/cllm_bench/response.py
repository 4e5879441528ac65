"""A streamed response as its client saw it: when text arrived, how much, and how it ended."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter


class TimedResponse:
    """Times are `perf_counter` seconds. The server's own `POST /benchmark` keeps these too."""

    __slots__ = (
        "arrivals",
        "cached_tokens",
        "completion_tokens",
        "error",
        "finished",
        "left",
        "prompt_tokens",
        "started",
        "texts",
    )

    def __init__(self) -> None:
        self.started = perf_counter()
        self.finished: float | None = None
        """None while it runs, and if it never ended because the work was broken off."""
        self.arrivals: list[float] = []
        """When text came in: one entry per event that held some, whatever its number of tokens."""
        self.texts: list[str] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.error: str | None = None
        self.left = False
        """The client went away before the end, as it meant to."""

    @property
    def complete(self) -> bool:
        """It ran to its end; only such answers count in latencies."""
        return self.finished is not None and self.error is None and not self.left

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def seconds(self) -> float:
        return (self.finished or perf_counter()) - self.started

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end, if there never was any."""
        return self.arrivals[0] - self.started if self.arrivals else self.seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between two arrivals, as the reader of the stream feels them."""
        return [later - sooner for sooner, later in pairwise(self.arrivals)]

    @property
    def longest_silence(self) -> float:
        """The worst gap; one between the last text and the end counts, too."""
        if not self.arrivals:
            return self.seconds
        return max([*self.gaps, self.started + self.seconds - self.arrivals[-1]])

    @property
    def seconds_per_token(self) -> float:
        """Mean over all tokens after the first, however they were packed into events; 0 for a single token."""
        return (self.seconds - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0
