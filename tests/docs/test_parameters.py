"""docs/parameters.md lists every parameter of every request, as what it is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cllm.server.app import REQUESTS
from cllm.server.schema.validation import A_HINT
from repository import ROOT

PAGE = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "parameter_table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/parameter_table.py"


SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)}


def listed(kind: str, text: str) -> set[str]:
    """The parameters that are honoured (rows of a table), hints or refused."""
    if kind == "honoured":
        return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    lines = re.findall(rf"^{kind}: (.*)$", text, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"`(\w+)`(?: \(but|, |\.$)", line)}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_parameter_is_listed(path: str) -> None:
    model = REQUESTS[path]
    (own,) = [text for title, text in SECTIONS.items() if f"`POST {path}`" in title]
    shared = re.findall(r"\[(.*?)\]", own.partition(", and:")[0]) if ", and:" in own else []
    text = "\n".join([own, *(SECTIONS[title] for title in shared)])
    hints = {name for name, field in model.model_fields.items() if field.description == A_HINT}
    assert listed("honoured", text) == set(model.model_fields) - hints
    assert listed("Hints", text) == hints | set(getattr(model, "hints", ()))
    assert listed("Refused", text) == set(getattr(model, "unsupported", ()))


def test_no_parameter_is_two_things() -> None:
    for model in REQUESTS.values():
        fields, hints, refused = (
            set(model.model_fields),
            set(getattr(model, "hints", ())),
            set(getattr(model, "unsupported", ())),
        )
        assert not fields & hints and not fields & refused and not hints & refused
