"""What a step costs: a handful of seconds-per-something, fitted from measured steps or written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from cllm.errors import ConfigError

DEFAULT_COST = "smollm2"


class StepWork(NamedTuple):
    """What one step computes, as far as its cost depends on it."""

    rows: int
    """Answers that get one token each."""
    context: int
    """Cached tokens those rows read, all together."""
    chunks: int
    """Prompts that are part of the step."""
    prompt_tokens: int
    attended: int
    """Cached tokens read by prompt tokens, all together: a token at position p reads p of them."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step = the sum of its parts, each times its price. No price is negative."""

    name: str
    description: str
    step_s: float
    """Every step, whatever is in it: above all reading the weights once."""
    row_s: float
    context_s: float
    chunk_s: float
    prompt_token_s: float
    attended_s: float
    overhead_s: float
    """Between two steps: scheduling, delivery."""
    overhead_row_s: float
    """The same for each token that is chosen."""
    move_bytes_per_s: float
    """How fast K/V is copied when memory is defragmented."""
    kv_bytes_per_token: int

    def compute(self, work: StepWork) -> float:
        """Seconds in the backend."""
        rows, context, chunks, prompt_tokens, attended = work
        seconds = self.without_context(rows) + context * self.context_s
        if chunks:
            seconds += chunks * self.chunk_s + prompt_tokens * self.prompt_token_s + attended * self.attended_s
        return seconds

    def without_context(self, rows: int) -> float:
        """Seconds of a step of so many rows that read nothing."""
        return self.step_s + rows * self.row_s

    def overhead(self, rows: int) -> float:
        """Seconds around it; `rows` is the number of tokens chosen."""
        return self.overhead_s + rows * self.overhead_row_s

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def load_cost(name: str) -> CostModel:
    """A cost model that comes with cLLM, by name, or a file."""
    built_in = resources.files("cllm.simulate") / "costs" / f"{name}.json"
    if built_in.is_file():
        return parse_cost(built_in.read_text(encoding="utf-8"), name)
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(built_in_costs())
        raise ConfigError(f"--cost {name}: cannot be read ({error}); give a file, or one of: {known}") from error
    return parse_cost(text, str(path))


def built_in_costs() -> list[str]:
    folder = resources.files("cllm.simulate") / "costs"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def parse_cost(text: str, source: str) -> CostModel:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"cost model {source} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cost model {source} must be a JSON object")
    known = {field.name: str(field.type) for field in fields(CostModel)}
    for problem, names in (
        ("lacks", known.keys() - content.keys()),
        ("has unknown", content.keys() - known.keys()),
    ):
        if names:
            raise ConfigError(f"cost model {source} {problem} {', '.join(sorted(names))}")
    for name, kind in known.items():
        _check_value(source, name, kind, content[name])
    return CostModel(**content)


def _check_value(source: str, name: str, kind: str, value: Any) -> None:
    if kind == "str":
        valid = isinstance(value, str)
        wanted = "a text"
    else:
        positive = name in ("move_bytes_per_s", "kv_bytes_per_token")
        types = (int,) if kind == "int" else (int, float)
        valid = isinstance(value, types) and not isinstance(value, bool) and 0 <= value < float("inf")
        valid = valid and (value > 0 or not positive)
        wanted = f"a number {'above' if positive else 'of at least'} 0"
    if not valid:
        raise ConfigError(f"cost model {source}: {name} is {value!r}; it must be {wanted}")
