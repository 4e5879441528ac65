"""Write the table of all settings into README.md, between its two markers, from the settings' own descriptions.

    python scripts/config_table.py [--check]

With --check nothing is changed, and the exit code is 1 if the table is out of date.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from cllm.config.keys import KEYS
from cllm.config.problems import as_written

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: written by scripts/config_table.py -->"
END = "<!-- end of settings -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    check: bool = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    wanted = with_table(text)
    if check:
        if text != wanted:
            print("README.md: the table of settings is out of date; run scripts/config_table.py")
        return int(text != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


def with_table(text: str) -> str:
    """`text` with the table of today between the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md: the markers {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    rows = [f"| `{key}` | `{as_written(field.default)}` | {_meaning(field)} |" for key, field in KEYS.items()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _meaning(field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        meaning += f" ({', '.join(f'`{choice}`' for choice in get_args(field.annotation))})"
    return meaning


if __name__ == "__main__":
    raise SystemExit(main())
