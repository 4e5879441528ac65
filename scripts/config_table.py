"""Write the table of all settings into README.md, between its two markers, from the settings' own descriptions.

    python scripts/config_table.py [--check]

With --check nothing is changed, and the exit code is 1 if the table is out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from markers import keep_in_step
from pydantic.fields import FieldInfo

from cllm.config.keys import KEYS
from cllm.config.problems import as_written

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: written by scripts/config_table.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    rows = [f"| `{key}` | `{as_written(field.default)}` | {_meaning(field)} |" for key, field in KEYS.items()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def _meaning(field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        meaning += f" ({', '.join(f'`{choice}`' for choice in get_args(field.annotation))})"
    return meaning


if __name__ == "__main__":
    raise SystemExit(keep_in_step(README, BEGIN, END, table(), __doc__))
