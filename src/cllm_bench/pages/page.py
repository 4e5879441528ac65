"""A page in one file that needs nothing else: sections of text, tables and plots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from cllm.errors import CLLMError
from cllm_bench.pages.plots import DARK, LIGHT, Plot

FILE = "index.html"
_NUMBER = re.compile(r"([<>]=)? ?[-+]?[\d.]|-$")


@dataclass(frozen=True)
class Table:
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings; without them the first cell of each row is its heading."""

    @property
    def numbers(self) -> list[bool]:
        """Which columns hold numbers; they are aligned to the right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        cells = [[cell for cell in column if cell] for column in columns]
        return [bool(self.columns and column and all(map(_NUMBER.match, column))) for column in cells]


@dataclass(frozen=True)
class Section:
    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]
    warnings: Sequence[str] = ()


def without_empty_columns(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> Table:
    kept = [number for number, cells in enumerate(zip(*rows, strict=True)) if any(cells)] or range(len(columns))
    return Table([[row[number] for number in kept] for row in rows], [columns[number] for number in kept])


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Names and values, without those that are empty or off; a zero is neither."""
    given = {name: value for name, value in facts.items() if value or (value == 0 and value is not False)}
    return Table([[name, _text(value)] for name, value in given.items()])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def write_page(page: Page, directory: Path) -> Path:
    file = directory / FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise CLLMError(f"cannot write {file}: {error.strerror or error}") from error
    return file


def render(page: Page) -> str:
    return _template().render(page=page, light=LIGHT, dark=DARK)


@lru_cache(maxsize=1)
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2")
