"""The entries of `models`: what is wrong with them is found without opening a file."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.config import InvalidConfigError, load_config


def problems(*entries: Any, **flags: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(None, {"models": list(entries), **flags}, {})
    return caught.value.problems


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ({"name": "a", "aliases": ["x"]}, {"name": "b", "aliases": ["x"]}, "x"),
        ({"name": "a", "aliases": ["x", "y"]}, {"name": "b", "aliases": ["z", "y"]}, "y"),
        ({"name": "a", "aliases": ["x", "smollm2"]}, {"name": "smollm2"}, "smollm2"),
        ({"name": "/one/c.gguf"}, {"name": "/two/c.gguf"}, "c"),
        ({"name": "hf:org/c"}, {"name": "a", "aliases": ["c"]}, "c"),
        ({"name": "a"}, {"name": "a"}, "a"),
    ],
)
def test_no_two_have_one_name(first: dict[str, Any], second: dict[str, Any], name: str) -> None:
    assert problems(first, second) == (
        f"models[0] ({first['name']}) and models[1] ({second['name']}) have the same name {name!r}: give one of them "
        "another alias",
    )


def test_one_model_may_be_there_twice_under_names_of_its_own() -> None:
    entries = [{"name": "a", "aliases": ["x", "x"]}, {"name": "a", "aliases": ["y"]}, "a"]
    assert len(load_config(None, {"models": entries}, {}).config.models) == 3
    of_one_name = {"models": ["/one/c.gguf", "/two/c.gguf"], "backend.type": "fake"}
    assert len(load_config(None, of_one_name, {}).config.models) == 2


def test_an_empty_alias_is_named() -> None:
    assert problems({"name": "a", "aliases": ["x", ""]}) == (
        "models[0].aliases[1] is '' (flag): it must be a non-empty string",
    )


def test_what_all_models_have_in_common_is_none_s_own() -> None:
    common = {"resources.max_memory_mb": 100.0}
    entries: list[Any] = ["a", {"name": "b", "resources": {"max_memory_mb": 10, "max_context_length": 64}}]
    assert problems(*entries, **common) == (
        "models[1]: resources.max_memory_mb is 10 (b): it applies to all models, so set it outside of models",
    )
