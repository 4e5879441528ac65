"""Write the table of docs/settings.md, between its two markers, from the settings' own descriptions.

    python scripts/config_table.py [--check]

With --check nothing is written, and the exit code is 1 if the table is out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from page_table import update_page
from pydantic.fields import FieldInfo

from cllm.config.errors import as_yaml
from cllm.config.keys import KEYS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
BEGIN = "<!-- settings: written by scripts/config_table.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    rows = [f"| `{key}` | `{as_yaml(field.default)}` | {_meaning(field)} |" for key, field in KEYS.items()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def _meaning(field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        meaning += f" ({', '.join(f'`{choice}`' for choice in get_args(field.annotation))})"
    return meaning


if __name__ == "__main__":
    raise SystemExit(update_page(PAGE, BEGIN, END, table(), __doc__))
