"""Write the tables of docs/parameters.md, between its two markers, from the schemas of the requests themselves.

    python scripts/parameter_table.py [--check]

With --check nothing is written, and the exit code is 1 if the tables are out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from page_table import update_page

from cllm.server.openapi import OF_SEVERAL, REQUESTS
from cllm.server.schema.validation import A_HINT, RequestModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parameters.md"
BEGIN = "<!-- parameters: written by scripts/parameter_table.py -->"
END = "<!-- end of parameters -->"


def table() -> str:
    return "".join(sections())


def sections() -> Iterator[str]:
    """A table for each kind of body, under the endpoints that take it."""
    endpoints: dict[type[Any], list[str]] = {}
    for path, model in (REQUESTS | OF_SEVERAL).items():
        endpoints.setdefault(model, []).append(f"`POST {path}`")
    for model, paths in endpoints.items():
        yield f"\n## {', '.join(paths)}\n\n| parameter | | meaning |\n|---|---|---|\n"
        yield from rows(model, "")
        yield "\n"


def rows(model: type[RequestModel], prefix: str) -> Iterator[str]:
    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        text = (field.description or "").replace("|", r"\|")
        kind = "hint" if text.startswith("A hint: ") else "honoured"
        needed = f"required, {kind}" if field.is_required() else kind
        yield f"| `{prefix}{name}` | {needed} | {'' if text == A_HINT else f'{text} '}|\n"
        for inner, in_list in inner_models(field.annotation):
            yield from rows(inner, f"{prefix}{name}{'[]' if in_list else ''}.")
    for name in sorted(model.hints):
        yield f"| `{prefix}{name}` | hint | |\n"
    for name, harmless in model.unsupported.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in harmless)
        yield f"| `{prefix}{name}` | refused | {f'but for {values}' if values else ''} |\n"


def inner_models(annotation: Any, in_list: bool = False) -> Iterator[tuple[type[RequestModel], bool]]:
    """The objects within a parameter, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation, in_list
    inside = in_list or getattr(annotation, "__origin__", None) is list
    for each in get_args(annotation):
        yield from inner_models(each, inside)


if __name__ == "__main__":
    raise SystemExit(update_page(PAGE, BEGIN, END, table(), __doc__))
