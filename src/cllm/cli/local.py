"""What `generate` and `chat` share: a model in this process, and one streamed answer from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cllm.cli.options import load_settings
from cllm.dialect.answer import ChatAnswer, ToolCall
from cllm.dialect.pieces import ChatEnd
from cllm.observe.log import setup_logging, tokens_per_second

if TYPE_CHECKING:
    from cllm.asking import Question
    from cllm.config import Config
    from cllm.dialect.pieces import Piece
    from cllm.engine.params import SamplingParams
    from cllm.generation import Generation, Timings
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
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    """Whole if the answer's finish_reason is tool_calls, otherwise the last one is cut off."""

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
        told = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return {name: value for name, value in told.items() if name not in ("reasoning", "calls") or value}


async def stream_answer(
    llm: AsyncLLM, prompt: str | Sequence[int], params: SamplingParams, write: Callable[[str], object]
) -> Answer:
    """Hand each piece to `write` as it comes; cancelling this cancels the generation."""
    whole = ChatAnswer()
    async with llm.submit(prompt, params) as generation:
        async for delta in generation:
            whole.texts.append(delta.text)
            write(delta.text)
            whole.finish_reason = delta.finish_reason or whole.finish_reason
    return _answer(whole, generation)


async def stream_message(question: Question, write: Callable[[Piece], object]) -> Answer:
    """The same for the next message of a conversation, which may have reasoning and call tools."""
    whole, reader = ChatAnswer(), question.reader

    def take(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            whole.add(piece)
            write(piece)

    async with question.submit() as generation:
        async for delta in generation:
            take(reader.push(delta.text))
            if delta.finish_reason is not None:
                take(reader.finish())
                take([ChatEnd(0, reader.finish_reason(delta.finish_reason), delta.stop_reason)])
    return _answer(whole, generation)


def _answer(whole: ChatAnswer, generation: Generation) -> Answer:
    return Answer(
        text=whole.text,
        finish_reason=whole.finish_reason,
        prompt_tokens=len(generation.prompt_ids),
        cached_tokens=generation.cached_tokens,
        completion_tokens=generation.completion_tokens,
        timings=generation.timings,
        reasoning=whole.reasoning,
        calls=whole.calls,
    )
