"""The shape of the source, counted, so that it stays: its size, how deep classes inherit, names and docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from repository import ROOT

SRC = ROOT / "src"
MOST_LINES = {"cllm": 66_000, "cllm_bench": 12_350}
"""Lines of Python in the product and in the laboratory."""
MOST_PARENTS = 2
SHALLOW = ("kv", "engine", "llm.py")
"""Parts of the product whose classes have no more of the product's classes above them."""
MOST_WORDS = {"docs/architecture.md": 3_000, "docs": 50_000}
FIRST_WORDS = re.compile(r'^ *r?"""((?:Of|Those|That|Whose|Who)\b.*)', re.MULTILINE)
"""A docstring that begins so means nothing without the line above it."""
DEFINED = re.compile(r"^(?:class ([A-Z]\w*)\b|([A-Z]\w*) = )", re.MULTILINE)
"""A class, or a type that was given a name."""
GENERIC = {
    *("memory.py", "util.py", "utils.py", "helpers.py", "common.py", "misc.py", "types.py"),
    *("Kind", "Plan", "Progress", "State", "Status", "Context", "Info", "Data", "Item", "Entry", "Record", "Report"),
    *("Result", "Source", "Options", "Setup", "Task", "Job", "Load", "Node", "Reader", "Writer", "Worker", "Faults"),
}
"""Modules and classes whose names do not say which is meant, if there are several."""


@cache
def texts() -> Mapping[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}


@pytest.mark.parametrize("package", MOST_LINES)
def test_lines(package: str) -> None:
    lines = sum(text.count("\n") for path, text in texts().items() if path.is_relative_to(SRC / package))
    most = MOST_LINES[package]
    assert lines <= most, f"src/{package} has {lines:,} lines, more than {most:,}: what can go, or be said in fewer?"


@pytest.mark.parametrize("place", MOST_WORDS)
def test_words(place: str) -> None:
    pages = [ROOT / place] if place.endswith(".md") else sorted((ROOT / place).rglob("*.md"))
    words, most = sum(len(page.read_text(encoding="utf-8").split()) for page in pages), MOST_WORDS[place]
    assert words <= most, f"{place} has {words:,} words, more than {most:,}: move what is beside the code to its README"


def test_docstrings_stand_by_themselves() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found[1][:80]}"
        for path, text in texts().items()
        for found in FIRST_WORDS.finditer(text)
    ]
    assert not wrong, "\n".join(["these mean nothing without the line above; say what it is:", *wrong])


def test_generic_names_stand_for_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in texts().items():
        if path.is_relative_to(SRC / "cllm"):
            for name in (path.name, *(found[1] or found[2] for found in DEFINED.finditer(text))):
                places[name].append(str(path.relative_to(SRC)))
    several = [f"{name}: {', '.join(places[name])}" for name in sorted(GENERIC) if len(places[name]) > 1]
    assert not several, "\n".join(["these names do not say which of them is meant:", *several])


# -- parents -----------------------------------------------------------------------------------------------------------


class Class(NamedTuple):
    name: str
    module: str
    bases: tuple[str, ...]


@cache
def tree_of(module: str) -> ast.Module | None:
    """None: not in this repository."""
    base = SRC / module.replace(".", "/")
    text = texts().get(base.with_suffix(".py")) or texts().get(base / "__init__.py")
    return None if text is None else ast.parse(text)


def find_class(module: str, name: str) -> Class | None:
    """A class by the name that it has in a module, where it may have been imported; None: it is not ours."""
    tree = tree_of(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            return Class(name, module, tuple(map(ast.unparse, bases)))
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return find_class(node.module, alias.name)
    return None


def longest_chain(each: Class) -> list[str]:
    """Its name, and those of the longest line of classes above it."""
    parents = (find_class(each.module, base) for base in each.bases)
    return [each.name, *max((longest_chain(parent) for parent in parents if parent), key=len, default=[])]


def classes_in(part: str) -> Iterator[Class]:
    """All but exceptions: those are sorted by who catches them."""
    for path in texts():
        if path.is_relative_to(SRC / "cllm" / part):
            module = ".".join(path.relative_to(SRC).with_suffix("").parts)
            tree = tree_of(module)
            for name in (node.name for node in tree.body if isinstance(node, ast.ClassDef)) if tree else ():
                if not name.endswith("Error") and (found := find_class(module, name)) is not None:
                    yield found


@pytest.mark.parametrize("part", SHALLOW)
def test_classes_have_parts_and_few_parents(part: str) -> None:
    chains = [longest_chain(each) for each in classes_in(part)]
    deep = sorted(" < ".join(chain) for chain in chains if len(chain) - 1 > MOST_PARENTS)
    assert chains, f"there are no classes in src/cllm/{part}"
    assert not deep, "\n".join([f"more than {MOST_PARENTS} parents; what are the parts that own their state?", *deep])
