"""The fake backend, as the settings want it."""

from __future__ import annotations

from cllm.backends import fake
from cllm.config import Config


def open_fake(config: Config) -> fake.FakeBackend:
    """It has no model whose context could be too short: any that is asked for will do."""
    settings = config.backend.fake
    return fake.FakeBackend(
        vocab_size=settings.vocab_size,
        latency_s=settings.latency_ms / 1000,
        context_length=max(config.resources.max_context_length or 0, fake.CONTEXT),
        layout="slots" if settings.layout == "slots" else "blocks",
        window=settings.window,
        states=settings.states,
    )
