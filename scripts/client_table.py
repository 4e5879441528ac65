"""Write the table of docs/clients.md, between its two markers, from the tests of the clients.

    python scripts/client_table.py [--check]

With --check nothing is written, and the exit code is 1 if the table is out of date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from page_table import update_page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "clients.md"
TESTS = ROOT / "tests" / "clients"
ORDER = (
    "openai",
    "openai_npm",
    "openai_agents",
    "anthropic",
    "ollama",
    "langchain",
    "langchain_anthropic",
    "llama_index",
    "litellm",
    "instructor",
    "pydantic_ai",
    "load_testers",
)
BEGIN = "<!-- clients: written by scripts/client_table.py -->"
END = "<!-- end of clients -->"


def table() -> str:
    rows = "".join(row for name in ORDER for row in rows_of(TESTS / f"test_{name}.py"))
    return f"| client | feature | works |\n|---|---|---|\n{rows}"


def rows_of(file: Path) -> Iterator[str]:
    """A row for each test: its module names the client, and its docstring the feature."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    client = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CLIENT"
    )
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            feature = ast.get_docstring(node)
            if not feature:
                raise SystemExit(f"{file.name}::{node.name} needs a docstring that names the feature")
            yield f"| {client} | {feature} | yes: `clients/{file.name}::{node.name}` |\n"


if __name__ == "__main__":
    raise SystemExit(update_page(PAGE, BEGIN, END, table(), __doc__))
