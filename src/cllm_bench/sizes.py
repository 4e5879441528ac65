"""`--size clients=1,8,32`: any field of a workload from the command line, and every combination of several values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, fields, replace
from itertools import product
from typing import Any, cast

from cllm_bench.errors import BenchError
from cllm_bench.workloads.base import Workload


def resize(workloads: Sequence[Workload], assignments: Sequence[str]) -> list[Workload]:
    """The workloads with every combination of the given sizes, none of them twice."""
    if not assignments:
        return list(workloads)
    sizes = {name: values for name, _, values in (text.partition("=") for text in assignments)}
    resized: dict[Workload, None] = {}
    for workload in workloads:
        known = {field.name: field for field in sizes_of(workload)}
        for name in sizes:
            if name not in known:
                raise BenchError(f"{workload.name} has no size {name!r}; it has {describe(workload)}")
        values = [[_parse(known[name], text) for text in texts.split(",")] for name, texts in sizes.items()]
        for combination in product(*values):
            changed = replace(cast(Any, workload), **dict(zip(sizes, combination, strict=True)))
            resized[changed] = None
    return list(resized)


def sizes_of(workload: Workload) -> list[Field[Any]]:
    """The fields that are plain numbers."""
    return [field for field in fields(cast(Any, workload)) if type(getattr(workload, field.name)) in (int, float)]


def describe(workload: Workload) -> str:
    return ", ".join(f"{field.name} ({getattr(workload, field.name):g})" for field in sizes_of(workload)) or "none"


def _parse(field: Field[Any], text: str) -> float:
    whole = field.type in ("int", int)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf") or (value == 0 and not _may_be_zero(field)):
        least = "0 or more" if _may_be_zero(field) else "1 or more" if whole else "more than 0"
        raise BenchError(f"--size {field.name} is {text!r}; it must be a {'whole ' if whole else ''}number, {least}")
    return value


def _may_be_zero(field: Field[Any]) -> bool:
    """Waits, shares and spreads may be; without users, requests or tokens there is nothing to measure."""
    return field.default == 0 or field.name.endswith(("_s", "_share", "_spread"))
