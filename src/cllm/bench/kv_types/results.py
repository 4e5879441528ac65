"""What was measured of the pairs: the table, the verdicts, the notes and the JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cllm.bench.figures import OURS, Figure, Row, Run, own, summarise, times_the_peer
from cllm.bench.json_file import write_json
from cllm.bench.kv_types.measure import REFERENCE, Measured, OfPair, Pair
from cllm.bench.report import number, with_unit

JUDGED = Pair("q8_0", "q8_0")
"""The pair that must cost no speed."""
LEAST_SPEED = 1.0
MOST_BYTES = 0.54
MOST_BUSY_PERCENT = 10


def headings(found: Measured) -> list[str]:
    fixed = ["K", "V", "bytes/token", "of f16", "perplexity", "change", "same top token", "mean KL"]
    return [*fixed, *(work.label for work in found.works)]


def lines(found: Measured) -> list[list[str]]:
    return [_line(found, pair) for pair in found.pairs]


def _line(found: Measured, pair: Pair) -> list[str]:
    of, reference = found.pairs[pair], found.pairs[REFERENCE]
    cells = [
        pair.type_k,
        pair.type_v,
        f"{of.bytes_per_token:,}",
        f"{of.bytes_per_token / reference.bytes_per_token:.3f}",
    ]
    quality = of.quality
    if quality.positions:
        cells += [
            f"{quality.perplexity:.3f}",
            f"{100 * quality.perplexity_change:+.2f} %",
            f"{100 * quality.agreement:.1f} %",
            f"{quality.mean_divergence:.5f}",
        ]
    else:
        cells += [""] * 4
    return cells + [_speed(of, reference, work.key) for work in found.works]


def _speed(of: OfPair, reference: OfPair, work: str) -> str:
    speed, ratio = of.speed(work), ratios(of, reference, work)
    if speed is None:
        return ""
    return f"{number(speed)} tok/s" + (f" ({ratio:.2f}x)" if ratio is not None else "")


def ratios(of: OfPair, reference: OfPair, work: str) -> float | None:
    """How many times as fast as the reference, in the same repeats."""
    runs = [
        Run(side, repeat, {work: speed})
        for side, each in ((OURS, of), (str(REFERENCE), reference))
        for repeat, speed in each.speeds.get(work, {}).items()
    ]
    beside = summarise([Figure(work, work, "tok/s", "higher")], runs)[0].peers.get(str(REFERENCE))
    return beside.ratio.estimate if beside and beside.ratio else None


def verdicts(found: Measured) -> Iterator[Row]:
    """What q8_0 must reach beside f16."""
    judged, reference = found.pairs[JUDGED], found.pairs[REFERENCE]
    share = judged.bytes_per_token / reference.bytes_per_token
    yield from summarise(
        [Figure("bytes", f"{JUDGED}: bytes beside f16", "", "lower", own(MOST_BYTES))], [Run(OURS, 0, {"bytes": share})]
    )
    for work in found.works:
        if work.streams > 1:
            figure = Figure(work.key, f"{JUDGED}: {work.label}", "tok/s", "higher", times_the_peer(LEAST_SPEED))
            runs = [Run(OURS, repeat, {work.key: speed}) for repeat, speed in judged.speeds.get(work.key, {}).items()]
            runs += [
                Run(str(REFERENCE), repeat, {work.key: speed})
                for repeat, speed in reference.speeds.get(work.key, {}).items()
            ]
            yield from summarise([figure], runs)


def verdict_lines(found: Measured) -> list[str]:
    texts = []
    for row in verdicts(found):
        peer = str(REFERENCE) if str(REFERENCE) in row.peers else None
        beside = row.peers.get(str(REFERENCE))
        value = with_unit(beside.ratio, "x") if beside else with_unit(row.ours, row.figure.unit)
        verdict = row.verdict(peer)
        if verdict is not None:
            texts.append(f"{row.figure.label}: {value}, must be {row.figure.required(peer)}: {verdict}")
    return texts


def table(found: Measured) -> str:
    """In Markdown, aligned."""
    rows = [headings(found), *lines(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    shown.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join([title(found), "", *shown, "", *verdict_lines(found), *notes(found)])


def title(found: Measured) -> str:
    return f"{found.model}, {found.threads} threads, {found.instruction_set}: pairs of K and V types"


def notes(found: Measured) -> list[str]:
    positions = found.pairs[REFERENCE].quality.positions
    lines = [
        f"perplexity over {positions:,} positions; change, same top token and KL beside f16/f16; streams at a context: "
        "tokens/s of all together, medians, in brackets beside f16/f16 in the same repeat"
    ]
    lines += found.notes
    if found.busy_percent > MOST_BUSY_PERCENT:
        lines.append(f"the machine was up to {found.busy_percent:.0f} % busy at rest: speeds are doubtful")
    if found.interrupted:
        lines.append("interrupted: not all was measured")
    return lines


def save(file: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], found: Measured) -> None:
    content = {
        "machine": machine,
        "settings": settings,
        "model": found.model,
        "instruction_set": found.instruction_set,
        "threads": found.threads,
        "works": [asdict(work) for work in found.works],
        "pairs": [_pair_json(found, pair) for pair in found.pairs],
        "verdicts": verdict_lines(found),
        "notes": notes(found),
        "table": table(found).splitlines(),
    }
    write_json(file, content)


def _pair_json(found: Measured, pair: Pair) -> dict[str, Any]:
    of, reference = found.pairs[pair], found.pairs[REFERENCE]
    quality = of.quality
    known = {
        "perplexity": quality.perplexity,
        "perplexity_change": quality.perplexity_change,
        "same_top": quality.agreement,
        "mean_kl": quality.mean_divergence,
    }
    return {
        **asdict(pair),
        "bytes_per_token": of.bytes_per_token,
        "positions": quality.positions,
        **(known if quality.positions else {}),
        "tokens_per_s": {work: list(values.values()) for work, values in of.speeds.items()},
        "times_f16": {work: ratios(of, reference, work) for work in of.speeds},
    }
