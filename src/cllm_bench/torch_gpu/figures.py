"""What must be reached, what it is compared with, and how that is read out of the measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .work import Measures

All = Mapping[str, Measures]


@dataclass(frozen=True)
class Figure:
    work: str
    comparison: str
    """Measured before on an H200: Hugging Face transformers (HF), or cuBLAS in a CUDA graph with contiguous attention
    and no scheduler (bare)."""
    wanted: str
    value: Callable[[All], float]
    """Raises `KeyError` where something was not measured."""
    shown: str = "{:,.0f} tok/s"
    least: float | None = None
    most: float | None = None
    peer: str | None = None
    """The measure of transformers on this machine, if it was asked for."""

    def reached(self, value: float) -> bool:
        enough = self.least is None or value >= self.least
        return enough and (self.most is None or value <= self.most)


def _at(name: str, key: str = "tokens_per_s") -> Callable[[All], float]:
    return lambda found: float(found[name][key])


def _ratio(above: Callable[[All], float], below: Callable[[All], float]) -> Callable[[All], float]:
    def value(found: All) -> float:
        return above(found) / below(found)

    return value


def _wrong_kernels(found: All) -> float:
    return float(len(found["kernels"]["wrong"]))


def _differing(found: All) -> float:
    return float(found["invariant alone"]["different"] + found["invariant in a small pool"]["different"])


_INVARIANT = "batch-invariant mode"
_HOST = "turns through the host"
FIGURES = (
    Figure("kernels against the plain twin in f64", "", "0 wrong", _wrong_kernels, "{:.0f} wrong", most=0),
    Figure(
        f"{_INVARIANT}: answers that differ alone, among others, in a small pool", "", "0 differ", _differing,
        "{:.0f} differ", most=0,
    ),
    Figure(
        "preemptions in that pool", "", ">= 1", _at("invariant in a small pool", "preemptions"), "{:.0f}", least=1,
    ),
    Figure(
        f"fast mode chooses as the {_INVARIANT}", "", ">= 99 %", _at("fast against invariant", "agreement_percent"),
        "{:.2f} %", least=99.0,
    ),
    Figure(
        f"{_INVARIANT}, 8B, 1 stream: speed", "the fast mode", "said",
        _ratio(_at("invariant one stream"), _at("8B one stream")), "{:.2f}x",
    ),
    Figure(
        f"{_INVARIANT}, 8B, 256 requests: speed", "the fast mode", "said",
        _ratio(_at("invariant many"), _at("8B many")), "{:.2f}x",
    ),
    Figure(
        "8B bf16, 1 stream, 128 in / 128 out", "HF 128, bare 222", ">= 205", _at("8B one stream"), least=205,
        peer="8B one stream with transformers",
    ),
    Figure(
        "8B bf16, 256 requests at once, 128 / 128, all in all", "HF 1,366 to 1,787, bare ~17,500 (reckoned)",
        ">= 12,000", _at("8B many"), least=12_000, peer="8B many with transformers",
    ),
    Figure(
        "8B, decode steps of 256 rows at context 192", "bare 28,700", ">= 23,000",
        _at("8B many", "decode_tokens_per_s"), least=23_000,
    ),
    Figure(
        "8B, 32 streams by a JSON schema, 128 / 128", "32 free streams", "said",
        _ratio(_at("8B 32 streams by a schema"), _at("8B 32 streams free")), "{:.2f}x",
    ),
    Figure(
        "8B, 32 streams of JSON with long fixed keys, 128 / 128", "32 free streams", "said",
        _ratio(_at("8B 32 streams long keys"), _at("8B 32 streams free")), "{:.2f}x",
    ),
    Figure(
        "8B fp8, 1 stream", "bf16", ">= 1.4x", _ratio(_at("8B fp8 one stream"), _at("8B one stream")), "{:.2f}x",
        least=1.4,
    ),
    Figure(
        "1B bf16, 1 stream", "HF 410, bare 955", ">= 800", _at("1B one stream"), least=800,
        peer="1B one stream with transformers",
    ),
    Figure(
        "1B bf16, 256 requests, decode", "HF 2,488, bare 90,000", ">= 45,000", _at("1B many", "decode_tokens_per_s"),
        least=45_000, peer="1B many with transformers",
    ),
    Figure(
        "decode attention alone, 64 x 4,096 tokens", "measured read bandwidth", ">= 0.8", _at("attention", "share"),
        "{:.2f}", least=0.8,
    ),
    Figure(
        "prefill 8B, 8 x 2,048 tokens", "bare 45,000 (linear layers)", ">= 30,000", _at("8B prefill"), least=30_000,
    ),
    Figure(
        "64 users on one 2,000-token prompt: how often it is computed", "HF 64", "1",
        _at("8B shared prompt", "times_computed"), "{:.2f}", most=1.02,
    ),
    Figure(
        "its time", "64 different prompts", "said",
        _ratio(_at("8B shared prompt", "seconds"), _at("8B shared prompt", "seconds_for_different_prompts")), "{:.2f}x",
    ),
    Figure(
        "GPU idle between two steps of 64 rows", "", "<= 3 %", _at("8B idle", "idle_percent"), "{:.2f} %", most=3.0,
    ),
    Figure(
        "8B, prompts of 4,096 tokens that left the GPU: first token, from the host's memory", "computed again", "said",
        _ratio(_at(_HOST, "first_token_s"), _at("turns computed again", "first_token_s")), "{:.2f}x",
    ),
    Figure(
        "16 streams beside them: P99 between tokens", "all K/V on the GPU", "<= 1.05x",
        _ratio(_at(_HOST, "gap_p99_s"), _at("turns on the GPU", "gap_p99_s")), "{:.2f}x", most=1.05,
    ),
    Figure(
        "copies to the host's memory", "pinned memory alone", ">= 0.7",
        _ratio(_at(_HOST, "out_bytes_per_s"), _at("pinned copies", "out_bytes_per_s")), "{:.2f}", least=0.7,
    ),
    Figure(
        "copies from it", "pinned memory alone", ">= 0.7",
        _ratio(_at(_HOST, "in_bytes_per_s"), _at("pinned copies", "in_bytes_per_s")), "{:.2f}", least=0.7,
    ),
    Figure(
        f"{_INVARIANT}: answers over K/V from the host's memory", "", "0 differ",
        _at("invariant turns through the host", "different"), "{:.0f} differ", most=0,
    ),
    Figure(
        "8B through HTTP, 256 streaming clients", "the engine's own", ">= 0.85",
        _ratio(_at("8B over HTTP"), _at("8B many")), "{:.2f}x", least=0.85,
    ),
)  # fmt: skip


def table(found: All, *, judged: bool) -> tuple[list[list[str]], bool]:
    """The rows of the table, and whether everything that was measured is as it must be. `judged`: the shapes are those
    that the figures are for."""
    rows = []
    fine = True
    for figure in FIGURES:
        comparison = figure.comparison
        if figure.peer is not None and figure.peer in found:
            here = f"HF here {found[figure.peer]['tokens_per_s']:,.0f}"
            comparison = f"{comparison}; {here}"
        try:
            value = figure.value(found)
        except KeyError:
            rows.append([figure.work, comparison, figure.wanted, "not measured", "-"])
            continue
        has_limit = figure.least is not None or figure.most is not None
        verdict = "-" if not (judged and has_limit) else "yes" if figure.reached(value) else "NO"
        fine = fine and verdict != "NO"
        rows.append([figure.work, comparison, figure.wanted, figure.shown.format(value), verdict])
    return rows, fine
