"""What to do when something broke, from the smallest harm to the largest.

    a step was lost               `rewind`        all in it go on as if it had not been planned
    a step failed                 `try_alone`     each computes its part alone; who cannot, fails, the others finish
    a sequence's memory failed    `set_back`      it is recomputed, or fails if that happened too often
    memory could not be given     `distrust`      nothing is decided now: before the next step, `raise_doubt` has the
    back, or holds what it should not             engine renew all memory
    all memory is lost            `preempt_all`   everything that ran is recomputed

Who fails does so alone, and with the reason.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable

from cllm.backends.base import StepResult
from cllm.engine.plan import Plan, drafted_in
from cllm.engine.request import FinishReason, Sequence
from cllm.engine.roster import Roster
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.manager import PositionMismatchError

log = logging.getLogger("cllm.engine")

MAX_RECOVERIES = 2
"""Times a sequence is recomputed after a fault before it fails."""


class Faults(Roster):
    position_mismatches = 0
    _doubt: Exception | None = None

    @abstractmethod
    def apply(self, plan: Plan, result: StepResult) -> None:
        """Take a step's result in."""

    # -- a step --------------------------------------------------------------------------------------------------

    def rewind(self, plan: Plan) -> None:
        """The step did not happen: forget what it may have written."""
        for index, sequence in enumerate(plan.sequences):
            if plan.lands(index):
                self.kv.rewind(sequence)
                if drafted_in(plan.chunks[index]):
                    # Its own token may be computed right away, alone; what only drafts took is given back.
                    self.kv.truncate(sequence, sequence.num_computed)
                    self.kv.grow(sequence, 1)

    def try_alone(self, plan: Plan, compute: Callable[[Plan], StepResult]) -> None:
        """The step failed and is rewound: find the sequence that cannot be computed, so that the others finish."""
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            alone = Plan.again(sequence, chunk)
            if alone is None:
                continue
            try:
                result = compute(alone)
            except StepAbortedError:
                # Somebody was cancelled; whoever was computed just then is not to blame.
                self.rewind(alone)
            except BackendError as error:
                if error.fatal:
                    raise
                self.rewind(alone)
                # It fails, unless its memory was wrong and can be redone.
                if self.verified(sequence):
                    self._end(sequence, FinishReason.ERROR, error=error)
            else:
                self.apply(alone, result)

    # -- a sequence's memory ---------------------------------------------------------------------------------------

    def verified(self, sequence: Sequence) -> bool:
        """Does the backend hold what it should for this sequence? If not, the sequence is recomputed."""
        try:
            self.kv.verify(sequence)
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
        self.set_back(sequence, error)
        if sequence.recoveries > 1:
            self.distrust(BackendError(f"positions were wrong twice for one request: {error}"))
        return False

    def set_back(self, sequence: Sequence, error: Exception) -> None:
        """The memory of a running sequence failed: it is recomputed, or fails if that happened too often."""
        sequence.recoveries += 1
        if sequence.recoveries > MAX_RECOVERIES:
            self._end(sequence, FinishReason.ERROR, error=error, keep=False)
        else:
            self._preempt(sequence, keep=False)

    # -- all memory ------------------------------------------------------------------------------------------------

    def distrust(self, error: Exception) -> None:
        """The cache, or the backend's memory, may not be what we think: before the next step it has to be renewed."""
        self._doubt = self._doubt or error

    def raise_doubt(self) -> None:
        """Raise what put the memory in doubt, if anything did."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            raise doubt

    def preempt_all(self, error: Exception) -> None:
        """All memory is lost: everything that ran is recomputed, or fails if that happened too often.

        The cache is not asked; it has to be reset.
        """
        self._doubt = None
        for sequence in list(self.running):
            self._stop_running(sequence)
            sequence.recoveries += 1
            if sequence.recoveries > MAX_RECOVERIES:
                self._end(sequence, FinishReason.ERROR, error=error)
            else:
                self._queue_again(sequence)
