"""What `generate` and `chat` share: a model in this process, and one streamed answer from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cllm.cli.options import load_settings
from cllm.observe.log import setup_logging, tokens_per_second

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.engine.params import SamplingParams
    from cllm.generation import Timings
    from cllm.llm import AsyncLLM


def prepare(
    file: Path | None,
    assignments: Sequence[str] | None,
    model: str | None,
    backend: str | None,
    device: str | None,
) -> Config:
    """The configuration, with its model on disk; of several, the first one. Only warnings are logged, unless a level
    was asked for."""
    from cllm.config import config_of

    flags = {"model.name": model, "backend.type": backend, "backend.torch.device": device}
    loaded = load_settings(file, assignments, flags)
    config = loaded.config
    if config.models and model is None:
        config = config_of(config, config.models[0])
    quiet = loaded.sources["log.level"] == "default"
    setup_logging(config.log.model_copy(update={"level": "warning"}) if quiet else config.log)
    if config.backend.type != "fake":
        from cllm.models.registry import resolve

        resolve(config.model.name)
    return config


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings

    @property
    def tokens_per_second(self) -> float | None:
        return tokens_per_second(self.completion_tokens, self.timings.decode_s)

    def statistics(self) -> str:
        """One line for the person at the terminal."""
        speed = f", {self.tokens_per_second:.1f} tok/s" if self.tokens_per_second is not None else ""
        return (
            f"[{self.prompt_tokens} tokens in, {self.cached_tokens} cached; {self.completion_tokens} out "
            f"({self.finish_reason}); first after {self.timings.ttft_s:.2f} s{speed}]"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


async def stream_answer(
    llm: AsyncLLM, prompt: str | Sequence[int], params: SamplingParams, write: Callable[[str], object]
) -> Answer:
    """Hand each piece to `write` as it comes; cancelling this cancels the generation."""
    pieces = []
    finish_reason = None
    async with llm.submit(prompt, params) as generation:
        async for delta in generation:
            pieces.append(delta.text)
            write(delta.text)
            finish_reason = delta.finish_reason or finish_reason
    return Answer(
        text="".join(pieces),
        finish_reason=finish_reason,
        prompt_tokens=len(generation.prompt_ids),
        cached_tokens=generation.cached_tokens,
        completion_tokens=generation.completion_tokens,
        timings=generation.timings,
    )
