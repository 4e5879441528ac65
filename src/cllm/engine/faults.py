"""What to do when something broke, from the smallest harm to the largest.

    a step was lost               `rewind`              its sequences go on as if it had not been planned
    a step failed                 `try_alone`           each sequence is computed alone; those that fail end, the
                                                        others go on
    a sequence's memory failed    `recompute_or_fail`   it is recomputed, or fails if that happened too often
    memory could not be freed,    `MemoryDoubt`         nothing yet: before the next step the engine rebuilds all
    or holds what it should not                         memory
    all memory is lost            `preempt_all`         everything that ran is recomputed

A request that fails does so alone, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.backends.base import StepResult
from cllm.engine.plan import StepPlan, drafted_in
from cllm.engine.request import FinishReason, Sequence
from cllm.engine.requests import MemoryDoubt, Requests
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.manager import KVManager, PositionMismatchError

log = logging.getLogger("cllm.engine")

MAX_RECOVERIES = 2
"""Times a sequence is recomputed after a fault before it fails."""


class Faults:
    def __init__(self, kv: KVManager, requests: Requests, doubt: MemoryDoubt) -> None:
        self.position_mismatches = 0
        self._kv = kv
        self._requests = requests
        self._doubt = doubt

    # -- a step --------------------------------------------------------------------------------------------------

    def rewind(self, plan: StepPlan) -> None:
        """The step did not happen: forget what it may have written."""
        for index, sequence in enumerate(plan.sequences):
            if plan.settle(index):
                computed, reading = sequence.num_computed, sequence.reading
                self._kv.rewind(sequence)
                if sequence.num_computed < computed and reading is not None and reading.in_order:
                    self._kv.truncate(sequence, 0)  # what was read of tokens that are computed again counts already
                if drafted_in(plan.chunks[index]):
                    # Only the drafts' memory is freed: the sequence's own token may be computed right away, alone.
                    self._kv.truncate(sequence, sequence.num_computed)
                    self._kv.grow(sequence, 1)

    def try_alone(
        self, plan: StepPlan, compute: Callable[[StepPlan], StepResult], apply: Callable[[StepPlan, StepResult], None]
    ) -> None:
        """The step failed and was rewound: compute each sequence alone, so that only the faulty one fails."""
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            alone = StepPlan.again(sequence, chunk)
            if alone is None:
                continue
            try:
                result = compute(alone)
            except StepAbortedError:
                # Another request was cancelled; this sequence is not to blame.
                self.rewind(alone)
            except BackendError as error:
                if error.fatal:
                    raise
                self.rewind(alone)
                # It fails, unless its memory was wrong and can be recomputed.
                if self.verified(sequence):
                    self._requests.end(sequence, FinishReason.ERROR, error=error)
            else:
                apply(alone, result)

    # -- a sequence's memory ---------------------------------------------------------------------------------------

    def verified(self, sequence: Sequence) -> bool:
        """Whether the backend holds the right positions for this sequence. If not, the sequence is recomputed."""
        try:
            self._kv.verify(sequence)
        except PositionMismatchError as mismatch:
            self.position_mismatches += 1
            error = BackendError(str(mismatch))
        except BackendError as failure:
            if failure.fatal:
                raise
            error = failure
        else:
            return True
        log.error("request %s: %s; its KV is dropped and recomputed", sequence.request.id, error)
        self.recompute_or_fail(sequence, error)
        if sequence.recoveries > 1:
            self._doubt.note(BackendError(f"positions were wrong twice for one request: {error}"))
        return False

    def recompute_or_fail(self, sequence: Sequence, error: Exception) -> None:
        """The memory of a running sequence failed: it is recomputed, or fails if that happened too often."""
        sequence.recoveries += 1
        if sequence.recoveries > MAX_RECOVERIES:
            self._requests.end(sequence, FinishReason.ERROR, error=error, keep=False)
        else:
            self._requests.preempt(sequence, keep=False)

    # -- all memory ------------------------------------------------------------------------------------------------

    def preempt_all(self, error: Exception) -> None:
        """All memory is lost: everything that ran is recomputed, or fails if that happened too often.

        Does not touch the cache, which has to be reset.
        """
        self._doubt.clear()
        requests = self._requests
        for sequence in list(requests.running):
            requests.stop_running(sequence)
            sequence.recoveries += 1
            if sequence.recoveries > MAX_RECOVERIES:
                requests.end(sequence, FinishReason.ERROR, error=error)
            else:
                requests.queue_again(sequence)
