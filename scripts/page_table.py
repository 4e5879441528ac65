"""Shared by the scripts that write tables into pages: replace what is between two markers, or `--check` it."""

from __future__ import annotations

import argparse
from pathlib import Path


def replace_between(text: str, begin: str, end: str, content: str) -> str:
    """`text` with `content` between the two markers."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"the markers {begin} and {end} are missing")
    return f"{before}{begin}\n{content}{end}{after}"


def update_page(page: Path, begin: str, end: str, content: str, description: str | None) -> int:
    """Rewrite the page, or with --check only report whether it is up to date (exit code 1 if not)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report whether the page is up to date")
    check: bool = parser.parse_args().check
    text = page.read_text(encoding="utf-8")
    wanted = replace_between(text, begin, end, content)
    if check and text != wanted:
        print(f"{page.name} is out of date; run the script without --check")
    if not check:
        page.write_text(wanted, encoding="utf-8")
    return int(check and text != wanted)
