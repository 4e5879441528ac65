"""The fake backend, as the settings want it."""

from __future__ import annotations

from cllm.backends.fake import CONTEXT, FakeBackend
from cllm.config import Config


def open_fake(config: Config) -> FakeBackend:
    """It has no model whose context could be too short: any that is asked for will do."""
    fake = config.backend.fake
    return FakeBackend(
        vocab_size=fake.vocab_size,
        latency_s=fake.latency_ms / 1000,
        context_length=max(config.resources.max_context_length or 0, CONTEXT),
        layout="slots" if fake.layout == "slots" else "blocks",
    )
