"""Answers by a JSON schema beside free ones: masks come from the host, and forced tokens are computed together."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median
from typing import Any

from cllm.structured.structure import Structure

from .work import Bench, Keep, Measures, Place, engine, greedy

STREAMS = 32


def _list_of(properties: dict[str, Any]) -> str:
    """Longer than any answer here."""
    record = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return json.dumps({"type": "array", "items": record, "minItems": 1000})


RECORDS = _list_of(
    {
        "name": {"type": "string", "maxLength": 20},
        "notes": {"type": "string", "maxLength": 60},
        "count": {"type": "integer"},
    }
)
LONG_KEYS = _list_of(
    {
        f"the_{what}_of_the_customer_as_written_in_the_order": {"type": "string", "maxLength": 12}
        for what in ("name", "street", "city", "number")
    }
)


async def _streams(bench: Bench, place: Place, schema: str | None) -> Measures:
    structure = None if schema is None else Structure("json_schema", schema)
    grammar = None if structure is None else await bench.llm.text.compile(structure)
    params = replace(greedy(place.sizes.stream_out), structured=structure)
    runs = []
    for repeat in range(place.sizes.repeats + 1):  # the first one warms up
        prompts = bench.prompts(STREAMS, place.sizes.stream_in, f"structured {schema} {repeat}")
        runs.append(await bench.ask(prompts, [params] * STREAMS, grammar))
    return {
        "tokens_per_s": median(run.rate for run in runs[1:]),
        "seconds": median(run.seconds for run in runs[1:]),
        "steps": len(bench.log.steps),
    }


async def structured(place: Place, keep: Keep) -> None:
    async with engine(place.settings_for("8B")) as bench:
        for name, schema in (("free", None), ("by a schema", RECORDS), ("long keys", LONG_KEYS)):
            keep(f"8B {STREAMS} streams {name}", await _streams(bench, place, schema))
