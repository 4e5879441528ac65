"""The rolling window of a request: its own or the configured one, rounded to what the model's memory allows."""

from __future__ import annotations

from cllm.config.kv import WindowConfig
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.errors import ConfigError, InvalidRequestError
from cllm.kv.window import Window
from cllm.loading.facts import ModelFacts


class Windows:
    """Raises `ConfigError` if the configured window is not possible."""

    def __init__(self, configured: WindowConfig, facts: ModelFacts) -> None:
        self._unsupported = facts.traits.no_window
        self._unit = facts.unit_tokens
        self._max_context = facts.max_context
        self._default: Window | None = None
        if configured.recent is not None:
            try:
                self._default = self._fit(configured.keep, configured.recent)
            except InvalidRequestError as error:
                raise ConfigError(f"kv.window: {error}") from error

    def of(self, params: SamplingParams | None) -> Window | None:
        """The window of a request with these parameters; without parameters, the configured one."""
        asked = "configured" if params is None else params.context_window
        if isinstance(asked, ContextWindow):
            return self._fit(asked.keep, asked.recent)
        return None if asked is None else self._default

    def _fit(self, keep: int, recent: int) -> Window:
        if self._unsupported is not None:
            raise InvalidRequestError(f"rolling windows are not available: {self._unsupported}", "context_window")
        window = Window.fit(keep, recent, self._unit)
        if window.capacity > self._max_context:
            raise InvalidRequestError(
                f"a window of {keep} kept and {recent} recent tokens needs memory for {window.capacity} "
                f"({window.keep} + {window.recent}, and {window.step} between two drops), but the context is "
                f"{self._max_context}; lower keep or recent",
                "context_window",
            )
        return window
