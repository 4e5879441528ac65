"""What a step costs: a handful of seconds-per-something, fitted from measured steps or written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cllm.errors import ConfigError


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


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step = the sum of its parts, each times its price."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    description: str
    step_s: Price
    """Every step, whatever is in it: above all reading the weights once."""
    row_s: Price
    context_s: Price
    chunk_s: Price
    prompt_token_s: Price
    attended_s: Price
    overhead_s: Price
    """Between two steps: scheduling, delivery."""
    overhead_row_s: Price
    """The same for each token that is chosen."""
    kv_bytes_per_token: Annotated[int, Field(gt=0)]
    """What stays as long as a sequence does."""
    window: Count = 0
    """Tokens that the layers with a window attend to, if they are kept apart; 0: there are none."""
    window_bytes_per_token: Count = 0
    """What a token inside the window takes beside that."""
    state_bytes: Count = 0
    """What layers that carry a state take for a sequence, however long it is."""

    def compute(self, work: StepWork) -> float:
        """Seconds in the backend."""
        rows, context, chunks, prompt_tokens, attended = work
        seconds = self.step_s + rows * self.row_s + context * self.context_s
        if chunks:
            seconds += chunks * self.chunk_s + prompt_tokens * self.prompt_token_s + attended * self.attended_s
        return seconds

    def prompt(self, tokens: int) -> float:
        """Seconds that computing so many tokens from the beginning adds to steps."""
        return tokens * self.prompt_token_s + tokens * (tokens - 1) // 2 * self.attended_s

    def overhead(self, rows: int) -> float:
        """Seconds around it; `rows` is the number of tokens chosen."""
        return self.overhead_s + rows * self.overhead_row_s

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


_COST = TypeAdapter(CostModel)


def load_cost(name: str) -> CostModel:
    """A cost model that comes with cLLM, by name, or a file."""
    built_in = resources.files("cllm_bench.simulate") / "costs" / f"{name}.json"
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
    folder = resources.files("cllm_bench.simulate") / "costs"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def parse_cost(text: str, source: str) -> CostModel:
    try:
        return _COST.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"]
        if name := ".".join(map(str, first["loc"])):
            given = "" if first["type"] == "missing" else f" is {first['input']!r}"
            reason = f"{name}{given}: {reason}"
        raise ConfigError(f"cost model {source}: {reason}") from None
