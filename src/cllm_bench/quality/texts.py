"""A text in tokens of a model, in parts that are read as one context each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cllm.models.gguf import GGUFModel
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.errors import BenchError

TEXT = Path(__file__).with_name("text.txt")
LONGEST = 1024
"""Tokens of a part."""
FEWEST = 64
QUICK_TOKENS = 128


def read_texts(model: GGUFModel, text: Path, quick: bool) -> list[Sequence[int]]:
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read {text}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"{text} is not UTF-8: {error}") from error
    tokens = load_tokenizer(model).encode(content)
    if len(tokens) < FEWEST:
        raise BenchError(f"{text} is {len(tokens)} tokens long; give a text of at least {FEWEST}")
    return parts_of(tokens, min(model.spec.context_length, QUICK_TOKENS if quick else LONGEST), 1 if quick else None)


def parts_of(tokens: Sequence[int], longest: int, most: int | None = None) -> list[Sequence[int]]:
    """Texts of `longest` tokens each; a shorter one only where there is no other."""
    whole = [tokens[begin : begin + longest] for begin in range(0, len(tokens) - longest + 1, longest)]
    return (whole or [tokens])[:most]
