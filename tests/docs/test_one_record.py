"""A request is one record from the server to the engine, and objects are made of parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module

import pytest

from cllm.engine.submission import Submission
from repository import ROOT

SOURCE = ROOT / "src" / "cllm"
FACTS = {field.name for field in fields(Submission)}
MOST_PARAMETERS = 2
"""A prompt and its parameters, say."""
MOST_PARENTS = 2
MAKERS = {"engine/submission.py", "server/inference/streams.py", "cluster/dispatcher.py"}
"""Its definition, where the server says whose a request is, and where a replica gets what is left of one."""


def found() -> Iterator[tuple[str, ast.AST]]:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield file.relative_to(SOURCE).as_posix(), node


def test_no_function_takes_the_facts_of_a_request_one_by_one() -> None:
    for file, node in found():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = node.args
            names = {each.arg for each in [*every.posonlyargs, *every.args, *every.kwonlyargs]} & FACTS
            assert len(names) <= MOST_PARAMETERS, f"{file}: {node.name} takes {sorted(names)}"


def test_no_other_record_has_the_facts_of_a_request() -> None:
    for file, node in found():
        if isinstance(node, ast.ClassDef) and file not in MAKERS:
            names = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            assert len(names & FACTS) <= MOST_PARAMETERS + 1, f"{file}: {node.name} has {sorted(names & FACTS)}"


def test_a_request_is_spelled_out_where_it_is_made() -> None:
    spelled = {
        file
        for file, node in found()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Submission", "replace")
        and len({each.arg for each in node.keywords} & FACTS) > MOST_PARAMETERS + 1
    }
    assert spelled <= MAKERS


@pytest.mark.parametrize("place", ["engine", "llm.py", "executor.py", "generation.py", "loading"])
def test_objects_are_made_of_parts_and_not_of_parents(place: str) -> None:
    for file in [SOURCE / place] if place.endswith(".py") else (SOURCE / place).rglob("*.py"):
        module = import_module(".".join(["cllm", *file.relative_to(SOURCE).with_suffix("").parts]))
        for name, found in vars(module).items():
            if isinstance(found, type) and found.__module__ == module.__name__:
                chain = [each.__name__ for each in found.__mro__[1:] if each.__module__.startswith("cllm.")]
                assert len(chain) <= MOST_PARENTS or issubclass(found, Exception), f"{name} has the parents {chain}"
