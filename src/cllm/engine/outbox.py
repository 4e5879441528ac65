"""Outputs on their way to whoever asked for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.engine.request import Output

log = logging.getLogger("cllm.engine")

Deliver = Callable[[list[Output]], None]

ATTEMPTS = 3
"""Times that the same outputs are offered."""


class Outbox:
    """Hands outputs over in one call and in order. What is not taken is kept, and offered again before anything new."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._kept: list[Output] = []
        self._failures = 0

    @property
    def waiting(self) -> bool:
        """Whether there is something that was not taken."""
        return bool(self._kept)

    def send(self, outputs: list[Output]) -> set[str]:
        """Deliver. Returns the requests whose outputs are given up, so that nobody goes on with a hole in an answer."""
        if self._kept:
            outputs = self._kept + outputs
            self._kept = []
        if not outputs:
            return set()
        try:
            self._deliver(outputs)
        except Exception:
            return self._keep(outputs)
        self._failures = 0
        return set()

    def _keep(self, outputs: list[Output]) -> set[str]:
        self._failures += 1
        if self._failures < ATTEMPTS:
            log.exception("%d outputs could not be delivered; they are offered again", len(outputs))
            self._kept = outputs
            return set()
        log.critical("%d outputs could not be delivered and are lost", len(outputs), exc_info=True)
        self._failures = 0
        return {output.request_id for output in outputs}
