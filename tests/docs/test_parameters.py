"""docs/parameters.md lists every parameter of every request, as what it is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cllm.server.openapi import OF_SEVERAL, REQUESTS
from repository import ROOT

PAGE = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "parameter_table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/parameter_table.py"


@pytest.mark.parametrize("path", [*REQUESTS, *OF_SEVERAL])
def test_every_parameter_is_listed(path: str) -> None:
    model = (REQUESTS | OF_SEVERAL)[path]
    (section,) = [
        part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if f"`POST {path}`" in part.split("\n")[0]
    ]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", section, re.MULTILINE))
    hints = {name for name, field in model.model_fields.items() if (field.description or "").startswith("A hint: ")}
    assert {name for name, kind in listed.items() if "honoured" in kind} == set(model.model_fields) - hints
    assert {name for name, kind in listed.items() if kind == "hint"} == hints | set(getattr(model, "hints", ()))
    assert {name for name, kind in listed.items() if kind == "refused"} == set(getattr(model, "unsupported", ()))


def test_no_parameter_is_two_things() -> None:
    for model in (REQUESTS | OF_SEVERAL).values():
        fields, hints, refused = (
            set(model.model_fields),
            set(getattr(model, "hints", ())),
            set(getattr(model, "unsupported", ())),
        )
        assert not fields & hints and not fields & refused and not hints & refused
