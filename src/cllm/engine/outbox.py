"""Delivers the engine's outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.engine.request import Output

log = logging.getLogger("cllm.engine")

Deliver = Callable[[list[Output]], None]

ATTEMPTS = 3
"""Attempts to deliver the same outputs."""


class Outbox:
    """Delivers outputs in one call and in order. After a failure they are kept, and delivered again before new ones."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._kept: list[Output] = []
        self._failures = 0

    @property
    def waiting(self) -> bool:
        """Whether there are outputs that could not be delivered."""
        return bool(self._kept)

    def send(self, outputs: list[Output]) -> set[str]:
        """Returns the requests whose outputs are lost: they must end, since their answers would have a hole."""
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
            log.exception("%d outputs could not be delivered; trying again", len(outputs))
            self._kept = outputs
            return set()
        log.critical("%d outputs could not be delivered and are lost", len(outputs), exc_info=True)
        self._failures = 0
        return {output.request_id for output in outputs}
