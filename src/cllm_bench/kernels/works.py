"""The pieces of work, the engines that do them, and what must be reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cllm_bench.errors import BenchError

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

# By number of threads; see workloads/scaling.py.
SOME = Work("decode-8x512", "decode, 8 streams, context 512", streams=8, context=512, steps=32)
SCALING_WORKS = (PREFILL, ONE_SHORT, ONE_MIDDLE, ONE_LONG, SOME, MANY)

HELD = Work("held", "1 stream at 512 while others hold 20,000 tokens", streams=1, context=512, steps=48, rounds=3)
HELD_TOKENS = 20_000

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


def _llama(label: str, *, requantised: bool, unified: bool) -> Peer:
    variants = tuple({"unified": unified, "flash": flash} for flash in (True, False))
    return Peer(f"llama.cpp {label}", "llama", requantised, variants)


SAME = _llama("same file", requantised=False, unified=False)
SAME_USUAL = replace(SAME, variants=({"unified": False, "flash": True},))
"""As llama.cpp runs by itself. In short contexts its other settings are as fast."""
SAME_UNIFIED = _llama("same file, unified", requantised=False, unified=True)
BEST = _llama("Q4_0", requantised=True, unified=False)
BEST_UNIFIED = _llama("Q4_0, unified", requantised=True, unified=True)
GENAI = Peer("OpenVINO GenAI same file", "genai")


@dataclass(frozen=True, slots=True)
class Comparison:
    work: Work
    peer: Peer
    times: float | None = None
    """How many times as fast we must be; None where it is for information."""


_ELSEWHERE = {PREFILL.key: 658.0, ONE_SHORT.key: 164.0, MANY.key: 46.0}
"""ik_llama.cpp's best tokens a second with smollm2, measured once on two cores of another machine, which has AVX2 only.
Its 32 streams stood in one unified cache."""
ELSEWHERE_LABEL = "ik_llama.cpp, elsewhere"


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
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    repeats: int = 5
    borrowed: frozenset[str] = frozenset()
    """Sections of another plan, for information: nothing must be reached."""

    @property
    def sections(self) -> tuple[str, ...]:
        return (*(work.key for work in self.works), *self.apart)

    def peers_of(self, work: Work) -> list[Peer]:
        return [comparison.peer for comparison in self.comparisons if comparison.work is work]

    def compared(self, section: str) -> list[str]:
        """What a section stands beside, by label."""
        peers = [comparison.peer.label for comparison in self.comparisons if comparison.work.key == section]
        return [*peers, *([ELSEWHERE_LABEL] if section in self.elsewhere else [])]

    def bound(self, section: str, value: float) -> float | None:
        return None if section in self.borrowed else value

    def borrow(self, wanted: Collection[str], other: Plan) -> Plan:
        """This plan with those wanted sections that only the other has. No file is made for them."""
        lacking = (set(wanted) & set(other.sections)) - set(self.sections)
        return replace(
            self,
            works=(*self.works, *(work for work in other.works if work.key in lacking)),
            comparisons=(
                *self.comparisons,
                *(
                    replace(comparison, times=None)
                    for comparison in other.comparisons
                    if comparison.work.key in lacking and not comparison.peer.requantised
                ),
            ),
            apart=(*self.apart, *(section for section in other.apart if section in lacking)),
            borrowed=frozenset(lacking),
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
        Comparison(MANY, SAME_UNIFIED),
        Comparison(MANY, SAME, 3.5),
        Comparison(MANY, BEST_UNIFIED, 2.5),
        Comparison(MANY, BEST, 2.5),
        Comparison(MANY_SHORT, GENAI, 1.3),
        Comparison(HELD, SAME_UNIFIED),
    ),
    stream_share=0.7,
    prefill_share=0.65,
    apart=(HELD.key, FIRST_TOKEN, MEMORY),
    elsewhere=_ELSEWHERE,
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

SECTIONS = tuple(dict.fromkeys((*SMOLLM2.sections, *ANY_MODEL.sections)))

FIRST_TOKEN_S = 1.5
SLOW_DOWN_PERCENT = 2.0
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
