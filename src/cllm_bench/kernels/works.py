"""The pieces of work, the engines that do them, and what must be reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cllm_bench.errors import BenchError

if TYPE_CHECKING:
    from cllm.models.gguf import GGUFModel

MOST_THREADS = 1024
QUICK_CONTEXT = 64
QUICK_STEPS = 4


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt, if `steps` is 0; else decode steps of streams that hold `context` tokens each already."""

    key: str
    label: str
    streams: int
    context: int
    steps: int = 0
    rounds: int = 1
    """How often in one pass."""
    rows: int = 1
    """Tokens of each stream in a step, all to their logits: more than one, and there is but one stream."""

    @property
    def tokens(self) -> int:
        """The tokens that count in one pass."""
        return self.rounds * (self.streams * self.steps * self.rows if self.steps else self.context)

    @property
    def room(self) -> int:
        """Positions that each stream needs."""
        return self.context + self.steps * self.rows + 1

    def quick(self) -> Work:
        steps = min(self.steps, QUICK_STEPS)
        return replace(self, context=min(self.context, QUICK_CONTEXT), steps=steps, rounds=1)


PREFILL = Work("prefill", "prefill, 512 tokens", streams=1, context=512, rounds=2)
ONE_SHORT = Work("decode-16", "decode, 1 stream, context 16", streams=1, context=16, steps=64)
ONE_MIDDLE = Work("decode-512", "decode, 1 stream, context 512", streams=1, context=512, steps=64)
ONE_LONG = Work("decode-2048", "decode, 1 stream, context 2,048", streams=1, context=2048, steps=48)
MANY = Work("decode-32x512", "decode, 32 streams, context 512", streams=32, context=512, steps=16)
MANY_SHORT = Work("decode-32x330", "decode, 32 streams, context 330", streams=32, context=330, steps=16)

# For any model; see ANY_MODEL.
ONE_BRIEF = replace(ONE_SHORT, steps=32)
FEW_SHORT = Work("decode-8x16", "decode, 8 streams, context 16", streams=8, context=16, steps=16)
ROWS = Work("rows-8", "decode, 8 tokens of 1 stream a step, context 16", streams=1, context=16, steps=16, rows=8)
PREFILL_ONCE = replace(PREFILL, rounds=1)

# For models whose layers differ.
ONE_FAR = Work("decode-8000", "decode, 1 stream, context 8,000", streams=1, context=8000, steps=24)

# By number of threads; see workloads/scaling.py.
SOME = Work("decode-8x512", "decode, 8 streams, context 512", streams=8, context=512, steps=32)
SCALING_WORKS = (PREFILL, ONE_SHORT, ONE_MIDDLE, ONE_LONG, SOME, MANY)

# Names of what is measured beside the works.
FIRST_TOKEN = "first-token"
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine, or another way to run one."""

    label: str
    engine: str
    """`llama` or `genai`."""
    requantised: bool = False
    """Runs the Q4_0 file that is made of the model, not the model itself."""
    variants: tuple[Mapping[str, Any], ...] = ({},)
    """Settings that may be its best; all are tried before a piece of work, and the fastest is used."""

    @property
    def process(self) -> tuple[str, bool]:
        """Peers with the same one share a process."""
        return (self.engine, self.requantised)


_FLASH = tuple({"flash": flash} for flash in (True, False))
SAME = Peer("llama.cpp same file", "llama", variants=_FLASH)
SAME_USUAL = replace(SAME, variants=_FLASH[:1])
"""As llama.cpp runs by itself. In short contexts its other settings are as fast."""
BEST = Peer("llama.cpp Q4_0", "llama", requantised=True, variants=_FLASH)
GENAI = Peer("OpenVINO GenAI same file", "genai")


@dataclass(frozen=True, slots=True)
class Comparison:
    work: Work
    peer: Peer
    times: float | None = None
    """How many times as fast we must be; None where it is for information."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, beside whom, and what must be reached."""

    works: tuple[Work, ...]
    comparisons: tuple[Comparison, ...]
    stream_share: float
    """The share of the memory's speed that one stream must reach."""
    prefill_share: float | None = None
    """The share of the cores' multiply-adds that prefill must reach."""
    apart: tuple[str, ...] = ()
    """Names of what is measured beside the works."""
    repeats: int = 5

    @property
    def sections(self) -> tuple[str, ...]:
        return (*(work.key for work in self.works), *self.apart)

    def peers_of(self, work: Work) -> list[Peer]:
        return [comparison.peer for comparison in self.comparisons if comparison.work is work]

    def including(self, wanted: Collection[str]) -> Plan:
        """This plan with works that only the other one has, for information, beside llama.cpp on the same file."""
        more = [work for key, work in _WORKS.items() if key in wanted and key not in self.sections]
        return replace(
            self,
            works=(*self.works, *more),
            comparisons=(*self.comparisons, *(Comparison(work, SAME) for work in more)),
        )


SMOLLM2 = Plan(
    works=(PREFILL, ONE_SHORT, ONE_MIDDLE, ONE_LONG, MANY, MANY_SHORT),
    comparisons=(
        Comparison(PREFILL, SAME, 3.5),
        Comparison(PREFILL, BEST, 1.7),
        Comparison(ONE_SHORT, SAME, 2.0),
        Comparison(ONE_SHORT, BEST, 1.3),
        Comparison(ONE_MIDDLE, SAME),
        Comparison(ONE_MIDDLE, BEST),
        Comparison(ONE_LONG, SAME, 3.0),
        Comparison(ONE_LONG, BEST),
        Comparison(MANY, SAME, 3.5),
        Comparison(MANY, BEST, 2.5),
        Comparison(MANY_SHORT, GENAI, 1.3),
    ),
    stream_share=0.7,
    prefill_share=0.65,
    apart=(FIRST_TOKEN, MEMORY),
)
"""The default model, in full."""

ANY_MODEL = Plan(
    works=(ONE_BRIEF, FEW_SHORT, ROWS, PREFILL_ONCE),
    comparisons=(
        Comparison(ONE_BRIEF, SAME_USUAL, 1.0),
        Comparison(FEW_SHORT, SAME_USUAL, 3.0),
        Comparison(ROWS, SAME_USUAL),
        Comparison(PREFILL_ONCE, SAME, 3.0),
    ),
    stream_share=0.9,
    repeats=3,
)
"""Other models, which may be large: little work, on the same file. 1B takes about two minutes on two cores."""

WINDOWS = Plan(
    works=(ONE_BRIEF, FEW_SHORT, ROWS, PREFILL_ONCE, ONE_FAR),
    comparisons=(
        Comparison(ONE_BRIEF, SAME_USUAL, 1.1),
        Comparison(FEW_SHORT, SAME_USUAL, 3.0),
        Comparison(ROWS, SAME_USUAL),
        Comparison(PREFILL_ONCE, SAME, 2.5),
        Comparison(ONE_FAR, SAME, 2.0),
    ),
    stream_share=0.9,
    repeats=3,
)
"""Models with layers that look back over a window alone."""

STATES = replace(
    WINDOWS,
    comparisons=(
        Comparison(ONE_BRIEF, SAME_USUAL, 1.1),
        Comparison(FEW_SHORT, SAME_USUAL, 2.5),
        Comparison(ROWS, SAME_USUAL),
        Comparison(PREFILL_ONCE, SAME, 2.5),
        Comparison(ONE_FAR, SAME),
    ),
)
"""Models with layers that carry a state."""


def plan_for(model: GGUFModel) -> Plan:
    """What is measured of any model but the default one."""
    if any(model.keys.any(suffix) for suffix in ("ssm.state_size", "shortconv.l_cache")):
        return STATES
    return WINDOWS if model.keys.any("attention.sliding_window") else ANY_MODEL


_WORKS = {work.key: work for work in (*WINDOWS.works, *SMOLLM2.works)}
SECTIONS = (*_WORKS, FIRST_TOKEN, MEMORY)

FIRST_TOKEN_S = 1.5
MEMORY_OVER_MB = 150.0
PACKED_OVER_FILE = 1.03
ROWS_OVER_ONE = 1.5


def parse_threads(text: str) -> list[int]:
    """Numbers with commas between them, in ascending order."""
    counts = set()
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= MOST_THREADS:
            raise BenchError(f"--threads is {text!r}: numbers from 1 to {MOST_THREADS}, with commas between them")
        counts.add(int(word))
    return sorted(counts)
