"""What `generate` and `chat` share: the configuration of a model in this process, and how its answers are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cllm.cli.options import check_device, load_settings
from cllm.observe.log import setup_logging, tokens_per_second

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.generation import Completion


def prepare(
    file: Path | None, assignments: Sequence[str] | None, model: str | None, backend: str | None, device: str | None
) -> Config:
    """The configuration, with its model on disk; of several, the first one. Only warnings are logged, unless a level
    was asked for."""
    from cllm.config import config_of

    flags = {"model.name": model, "backend.type": backend, "backend.torch.device": device}
    loaded = load_settings(file, assignments, flags)
    config = loaded.config
    check_device(config, device)
    if config.models and model is None:
        config = config_of(config, config.models[0])
    quiet = loaded.sources["log.level"] == "default"
    setup_logging(config.log.model_copy(update={"level": "warning"}) if quiet else config.log)
    if config.backend.type != "fake":
        from cllm.models.registry import resolve

        resolve(config.model.name)
    return config


def statistics(completion: Completion) -> str:
    """One line for the person at the terminal."""
    rate = tokens_per_second(completion.completion_tokens, completion.timings.decode_s)
    speed = f", {rate:.1f} tok/s" if rate is not None else ""
    return (
        f"[{completion.prompt_tokens} tokens in, {completion.cached_tokens} cached; {completion.completion_tokens} out "
        f"({completion.finish_reason}); first after {completion.timings.ttft_s:.2f} s{speed}]"
    )


def as_json(completion: Completion) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "completion_tokens": completion.completion_tokens,
        "timings": asdict(completion.timings),
    }
    if completion.reasoning:
        shown["reasoning"] = completion.reasoning
    if completion.tool_calls:
        shown["calls"] = [asdict(call) for call in completion.tool_calls]
    return {**shown, "tokens_per_second": tokens_per_second(completion.completion_tokens, completion.timings.decode_s)}
