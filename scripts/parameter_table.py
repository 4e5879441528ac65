"""Write the tables of docs/parameters.md, between its two markers, from the schemas of the requests themselves.

    python scripts/parameter_table.py [--check]

With --check nothing is written, and the exit code is 1 if the tables are out of date.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from page_table import update_page

from cllm.server.anthropic.schema import MessagesInput
from cllm.server.app import REQUESTS
from cllm.server.ollama.schema import OllamaRequest
from cllm.server.openai.schema import OpenAIRequest
from cllm.server.schema.sampling import SamplingFields
from cllm.server.schema.validation import A_HINT, RequestModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parameters.md"
BEGIN = "<!-- parameters: written by scripts/parameter_table.py -->"
END = "<!-- end of parameters -->"

Model = type[RequestModel]
SHARED: dict[Model, str] = {
    SamplingFields: "Sampling and structure",
    OpenAIRequest: "Completions and chat",
    MessagesInput: "Anthropic's prompts",
    OllamaRequest: "Ollama's answers",
}
"""Parameters of several endpoints, which stand once, and the heading over them."""


def endpoints() -> dict[Model, list[str]]:
    """The bodies of requests, and who takes them."""
    found: dict[Any, list[str]] = {}
    for path, model in REQUESTS.items():
        found.setdefault(model, []).append(f"`POST {path}`")
    return found


BODIES = endpoints()


def inner_models(annotation: Any, in_list: bool = False) -> Iterator[tuple[Model, bool]]:
    """The objects within a parameter, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation, in_list
    inside = in_list or getattr(annotation, "__origin__", None) is list
    for each in get_args(annotation):
        yield from inner_models(each, inside)


def objects_apart() -> list[Model]:
    """The objects that are part of several others, or one of several that may stand in a place."""
    places: dict[Model, set[Any]] = {}

    def walk(model: Model) -> None:
        for name, field in model.model_fields.items():
            owner = next((base for base in SHARED if issubclass(model, base) and name in base.model_fields), model)
            inner = [each for each, _ in inner_models(field.annotation)]
            for each in inner:
                known = each in places
                places.setdefault(each, set()).update((owner, name, number) for number in range(len(inner)))
                if not known:
                    walk(each)

    for model in BODIES:
        walk(model)
    return [model for model, found in places.items() if len(found) > 1 and model.model_fields]


OBJECTS = objects_apart()
NAMES = Counter(model.__name__ for model in OBJECTS)


def heading(model: Model) -> str:
    """The name of an object, with its API where two have the same."""
    if NAMES[model.__name__] == 1:
        return model.__name__
    package = model.__module__.split(".")[-2]
    return f"{model.__name__} of {'chat' if package == 'schema' else package}"


def link(text: str) -> str:
    anchor = text.lower().replace(" ", "-").replace("'", "")
    return f"[{text}](#{anchor})"


class Table:
    """The parameters of one heading: what is honoured as rows, hints and what is refused as lists."""

    def __init__(self) -> None:
        self.honoured: dict[str, str] = {}
        self.hints: list[str] = []
        self.refused: dict[str, str] = {}

    def add(self, model: Model, prefix: str = "") -> None:
        for field_name, field in model.model_fields.items():
            name = prefix + (field.alias or field_name)
            text = (field.description or "").replace("|", r"\|")
            if text == A_HINT:
                self.hints.append(name)
                continue
            inner = dict(inner_models(field.annotation))
            objects = ", ".join(link(heading(each)) for each in inner if each in OBJECTS)
            needed = "Required." if field.is_required() else ""
            self.honoured[name] = " ".join(part for part in (needed, text, objects) if part)
            for each, in_list in inner.items():
                if each not in OBJECTS:
                    self.add(each, f"{name}{'[]' if in_list else ''}.")
        self.hints += [prefix + name for name in sorted(model.hints)]
        for name, harmless in model.unsupported.items():
            values = " or ".join(f"`{json.dumps(value)}`" for value in harmless)
            self.refused[prefix + name] = f"but for {values}" if values else ""

    def without(self, others: Iterable[Table]) -> Table:
        """What is in none of the others, or differs there."""
        rest = Table()
        rest.honoured, rest.hints, rest.refused = dict(self.honoured), list(self.hints), dict(self.refused)
        for other in others:
            rest.honoured = dict(rest.honoured.items() - other.honoured.items())
            rest.refused = dict(rest.refused.items() - other.refused.items())
            rest.hints = [name for name in rest.hints if name not in other.hints]
        rest.honoured = {name: text for name, text in self.honoured.items() if name in rest.honoured}
        rest.refused = {name: text for name, text in self.refused.items() if name in rest.refused}
        return rest

    def both(self, other: Table) -> Table:
        """What is the same in both."""
        return self.without([self.without([other])])

    def lines(self) -> Iterator[str]:
        if self.honoured:
            yield "| parameter | meaning |\n|---|---|\n"
            yield from (f"| `{name}` | {text} |\n" for name, text in self.honoured.items())
            yield "\n"
        if self.hints:
            yield f"Hints: {', '.join(f'`{name}`' for name in self.hints)}.\n\n"
        if self.refused:
            refused = (f"`{name}`" + (f" ({values})" if values else "") for name, values in self.refused.items())
            yield f"Refused: {', '.join(refused)}.\n\n"


def table_of(model: Model) -> Table:
    table = Table()
    table.add(model)
    return table


def shared_tables() -> dict[Model, Table]:
    """What all bodies of a kind have in common, and not already the kind above it."""
    found: dict[Model, Table] = {}
    for kind in SHARED:
        first, *others = (table_of(body) for body in BODIES if issubclass(body, kind))
        for other in others:
            first = first.both(other)
        found[kind] = first.without(found[above] for above in found if issubclass(kind, above))
    return found


def sections() -> Iterator[str]:
    shared = shared_tables()
    for model, paths in BODIES.items():
        kinds = [kind for kind in SHARED if issubclass(model, kind)]
        yield f"\n## {', '.join(paths)}\n\n"
        if kinds:
            yield f"Those of {', '.join(link(SHARED[kind]) for kind in reversed(kinds))}, and:\n\n"
        yield from table_of(model).without(shared[kind] for kind in kinds).lines()
    for kind, table in shared.items():
        yield f"\n## {SHARED[kind]}\n\n"
        yield from table.lines()
    for model in OBJECTS:
        yield f"\n## {heading(model)}\n\n"
        yield from table_of(model).lines()


def table() -> str:
    return "".join(sections()).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    raise SystemExit(update_page(PAGE, BEGIN, END, table(), __doc__))
