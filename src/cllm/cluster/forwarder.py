"""A job on its replica: passes the engine's outputs on to the ingress."""

from __future__ import annotations

import asyncio

from cllm.cluster.link import Link
from cllm.cluster.messages import ENDS_ALL, Ended, ReplicaProgress, portable
from cllm.engine.request import NO_HIT, FinishReason, Output, Request


class Forwarder:
    """A `Sink` of the engine's outputs. `ended` is done after the last one, or when nobody waits for more."""

    def __init__(self, link: Link, request: Request) -> None:
        self.request = request
        self.link = link
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = request.unfinished
        self._reported = -1

    @property
    def done(self) -> bool:
        return self.ended.done()

    def take(self, output: Output, now: float) -> None:
        if output.error is not None:
            output = output._replace(error=portable(output.error))
        self.link.send(output)
        if output.reason is None and output.error is None:
            return
        self._unfinished -= 1
        if self._unfinished <= 0 or output.error is not None or output.reason in ENDS_ALL:
            self._end()

    def fail(self, error: Exception) -> None:
        """End all answers with an error."""
        if not self.done:
            self.link.send(Output(self.request.id, 0, None, None, FinishReason.ERROR, None, portable(error), NO_HIT))
            self._end()

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if not self.done:
            self.ended.set_result(None)

    def tell_progress(self) -> None:
        """While the prompt is being computed."""
        computed = self.request.computed
        if not self.request.generated and computed != self._reported:
            self._reported = computed
            self.link.send(ReplicaProgress(self.request.id, computed, self.request.hit))

    def _end(self) -> None:
        if not self.done:
            self.link.send(Ended(self.request.id, self.request.submission.pins))
            self.ended.set_result(None)
