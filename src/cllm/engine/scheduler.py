"""What a step's result means: positions checked, blocks committed, tokens taken, ends noticed."""

from __future__ import annotations

import logging

from cllm.backends.base import StepResult
from cllm.engine.planner import Plan, Planner
from cllm.engine.request import FinishReason, Output, Sequence
from cllm.engine.sampling import Choice, TokenLogprob, choose
from cllm.errors import BackendError, describe
from cllm.kv.manager import PositionMismatchError

log = logging.getLogger("cllm.engine")


class Scheduler(Planner):
    """Plans steps and takes their results in; what it stands on knows who is here."""

    position_mismatches = 0

    # -- after a step ------------------------------------------------------------------------------------------

    def apply(self, plan: Plan, result: StepResult) -> None:
        """Take the step's result in. Sequences that ended while it ran are passed over.

        What is raised is raised before any token is chosen, so that the same ones can be computed again.
        """
        kv = self.kv
        wanted: list[tuple[int, int, Sequence]] = []  # row, number of the draw, who takes it
        row = 0
        for index, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            if sequence.running and (plan.stays is None or self._land(plan, index)):
                sequence.num_computed += len(chunk.tokens)
                if self._verified(sequence):
                    kv.commit(sequence)
                    if chunk.wants_logits:
                        wanted.append((row, 0, sequence))
                        if sequence.twins:
                            wanted += [(row, place, twin) for place, twin in self._fork_twins(sequence)]
            row += chunk.wants_logits
        now = self._clock()
        for (_, _, sequence), choice in zip(wanted, _choices(result, wanted), strict=True):
            if choice is None:
                error = BackendError("the model gave no usable probabilities for the next token")
                self._end(sequence, FinishReason.ERROR, error=error)
            elif isinstance(choice, Exception):
                log.error("request %s: no token can be chosen", sequence.request.id, exc_info=choice)
                self._end(sequence, FinishReason.ERROR, error=BackendError(describe(choice)))
            else:
                self._take_token(sequence, choice.token_id, choice.logprob, now)

    def _land(self, plan: Plan, index: int) -> bool:
        """A chunk is no longer under way. False: its sequence has no use for it any more."""
        sequence, chunk = plan.sequences[index], plan.chunks[index]
        assert plan.stays is not None
        if sequence.stay != plan.stays[index]:
            return False
        sequence.submitted -= len(chunk.tokens)
        sequence.promised -= chunk.wants_logits
        return True

    def _verified(self, sequence: Sequence) -> bool:
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
        self._set_back(sequence, error)
        if sequence.recoveries > 1:
            self.distrust(BackendError(f"positions were wrong twice for one request: {error}"))
        return False

    def _take_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        request = sequence.request
        sequence.append(token)
        self.generated_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = now
        elif request.last_token_at is not None and len(request.sequences) == 1:
            request.gaps.append(now - request.last_token_at)
        request.last_token_at = now
        if token in request.end_ids:
            self._end(sequence, FinishReason.STOP, token, logprob)
        elif len(sequence.tokens) >= sequence.max_length:
            self._end(sequence, FinishReason.LENGTH, token, logprob)
        else:
            self._outputs.append(
                Output(request.id, sequence.index, token, logprob, None, None, None, request.cached_tokens)
            )

    def _fork_twins(self, sequence: Sequence) -> list[tuple[int, Sequence]]:
        """The prompt is computed: its other answers begin here, as far as there is room; the rest queue up. Those that
        began, with their number among all answers that begin here."""
        started: list[tuple[int, Sequence]] = []
        place = 0
        while sequence.twins:
            place += 1
            twin = sequence.twins[0]
            if not twin.ended:
                self.waiting.rank(twin)
                if len(self.running) < self._max_running and self._forked(sequence, twin):
                    self._start(twin, twin.num_computed)
                    started.append((place, twin))
                else:
                    self.waiting.push(twin)
            del sequence.twins[0]  # only now: a twin that could not be dealt with is dealt with next time
        return started

    def _forked(self, sequence: Sequence, twin: Sequence) -> bool:
        try:
            return self.kv.fork(sequence, twin)
        except BackendError as error:
            if error.fatal or twin.admitted:
                raise
            log.error("request %s: an answer cannot begin where another one is: %s", sequence.request.id, error)
            return False

    # -- faults ------------------------------------------------------------------------------------------------

    def rewind(self, plan: Plan) -> None:
        """The step did not happen: forget what it may have written."""
        for index, sequence in enumerate(plan.sequences):
            if sequence.running and (plan.stays is None or self._land(plan, index)):
                self.kv.rewind(sequence)
        plan.stays = None

    def blame(self, sequence: Sequence, error: BackendError) -> None:
        """A sequence could not be computed, not even alone: it fails, unless its memory was wrong and can be redone."""
        if self._verified(sequence):
            self._end(sequence, FinishReason.ERROR, error=error)


def _choices(result: StepResult, wanted: list[tuple[int, int, Sequence]]) -> list[Choice | Exception | None]:
    """The tokens that the backend chose, or those that the host chooses now."""
    if result.drawn is None:
        assert result.logits is not None
        return choose(result.logits, [(row, sequence.chooser) for row, _, sequence in wanted])
    return [sequence.chooser.take(result.drawn[row][place]) for row, place, sequence in wanted]
