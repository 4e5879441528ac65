"""Applies a step's result: checks positions, commits blocks, takes tokens, keeps the right drafts, ends answers."""

from __future__ import annotations

import logging

from cllm.backends.base import Chunk, Drawn, Hidden, Logits, PromptScores, StepResult
from cllm.engine.draw import masks_for
from cllm.engine.faults import Faults
from cllm.engine.plan import StepPlan, drafted_in
from cllm.engine.request import FinishReason, Output, Sequence, token_output
from cllm.engine.requests import MemoryDoubt, Requests
from cllm.engine.sampling import Choice, TokenChooser, TokenLogprob, choose
from cllm.errors import BackendError, StructureError, describe
from cllm.kv.manager import KVManager

log = logging.getLogger("cllm.engine")


Wanted = tuple[int, int, Sequence]
"""The row of the result, the number of the draw, the sequence that takes it."""

Drafted = tuple[int, Sequence, Chunk]
"""The first row of the result, the sequence, and its chunk with the drafts."""


class Results:
    def __init__(
        self, kv: KVManager, requests: Requests, faults: Faults, doubt: MemoryDoubt, *, max_running: int
    ) -> None:
        self._kv = kv
        self._requests = requests
        self._faults = faults
        self._doubt = doubt
        self._max_running = max_running

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Apply a step's result. Sequences that ended while it ran are skipped.

        Anything raised is raised before a token is chosen, so that the step can be computed again.
        """
        wanted, drafted = self._computed(plan, result)
        now = self._requests.clock()
        for (_, _, sequence), choice in zip(wanted, _choices(result, wanted), strict=True):
            self._take_choice(sequence, choice, now)
        for row, sequence, chunk in drafted:
            self._take_drafted(sequence, chunk, result, row, now)

    def _computed(self, plan: StepPlan, result: StepResult) -> tuple[list[Wanted], list[Drafted]]:
        """All tokens of the step are in memory. Which sequences take a token now, and which have drafts to verify."""
        kv, epochs = self._kv, plan.epochs
        verifies, unit = kv.verifies, 1 if kv.commits_each_step else kv.unit_tokens
        wanted: list[Wanted] = []
        drafted: list[Drafted] = []
        next_row = 0
        for index, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            count, wants = len(chunk.tokens), chunk.wanted_logits
            row = next_row
            next_row += wants
            if not sequence.running:
                continue
            if epochs is not None:  # as `StepPlan.settle`, without the call
                if sequence.epoch != epochs[index]:
                    continue
                sequence.submitted -= count
                sequence.promised -= wants
            sequence.num_computed += count
            if verifies and not self._faults.verified(sequence):
                continue
            if wants > 1:
                sequence.num_computed -= drafted_in(chunk)
                drafted.append((row, sequence, chunk))
                continue
            # A single token completes something to share only at the end of a unit.
            if count > 1 or sequence.num_computed % unit == 0:
                kv.commit(sequence)
            if sequence.reading is not None and not self._read(sequence, chunk, result.read.get(index)):
                continue
            if wants:
                wanted.append((row, 0, sequence))
                if sequence.twins:
                    wanted += [(row, place, twin) for place, twin in self._fork_twins(sequence)]
            elif not sequence.generates and sequence.num_computed == len(sequence.tokens):
                self._requests.end(sequence, FinishReason.LENGTH)
        return wanted, drafted

    def _read(self, sequence: Sequence, chunk: Chunk, read: PromptScores | Hidden | None) -> bool:
        """Take what was read off a part of the prompt, and output it after the last part. False if it is not usable and
        the sequence has ended."""
        reading = sequence.reading
        assert reading is not None
        try:
            if read is not None:
                reading.take(chunk.start, read)
            if sequence.num_computed < len(sequence.tokens):
                return True
            result = reading.result()
        except Exception as error:
            if not isinstance(error, BackendError):
                log.exception("request %s: scoring or pooling its prompt failed", sequence.request.id)
            failure = error if isinstance(error, BackendError) else BackendError(describe(error))
            self._requests.end(sequence, FinishReason.ERROR, error=failure)
            return False
        sequence.reading = None
        request = sequence.request
        self._requests.outputs.append(Output(request.id, 0, None, None, None, None, None, request.hit, result))
        return True

    def _take_choice(self, sequence: Sequence, choice: Choice | Exception | None, now: float) -> None:
        if choice is None:
            error = BackendError("the model gave no usable probabilities for the next token")
            self._requests.end(sequence, FinishReason.ERROR, error=error)
        elif isinstance(choice, Exception):
            self._fail(sequence, choice)
        else:
            self._take_token(sequence, choice.token_id, choice.logprob, now)
            if sequence.chooser.constraint is not None:
                self._take_forced(sequence, now)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """No token can be chosen: only this sequence fails."""
        if isinstance(error, StructureError):
            log.warning("request %s: %s", sequence.request.id, error)
            self._requests.end(sequence, FinishReason.ERROR, error=error)
        else:
            log.error("request %s: no token can be chosen", sequence.request.id, exc_info=error)
            self._requests.end(sequence, FinishReason.ERROR, error=BackendError(describe(error)))

    def _take_forced(self, sequence: Sequence, now: float) -> None:
        """Tokens that must follow are part of the answer at once, and computed with the next step. If logprobs are
        requested, each waits for its own row and is chosen from that."""
        chooser = sequence.chooser
        sequence.forced = 0
        if chooser.params.logprobs is not None:
            return
        while not sequence.ended and (token := chooser.forced) is not None:
            try:
                chooser.observe(token)
            except Exception as error:  # noqa: PERF203 - it ends the answer, and so the loop
                self._fail(sequence, error)
            else:
                sequence.forced += 1
                self._take_token(sequence, token, None, now)

    def _take_drafted(self, sequence: Sequence, chunk: Chunk, result: StepResult, row: int, now: float) -> None:
        """Choose token after token, as long as each is as drafted, so that the next row was computed for it."""
        assert result.logits is not None
        drafted, accepted = drafted_in(chunk), 0
        draft, ends = chunk.tokens[-drafted:], sequence.request.end_ids
        while True:
            choice = _choose(result.logits, [(row + accepted, sequence.chooser)])[0]
            if accepted == drafted or not isinstance(choice, Choice):
                break
            token = choice.token_id
            if token != draft[accepted] or token in ends:
                break
            accepted += 1
            self._take_token(sequence, token, choice.logprob, now)
        self._keep_accepted(sequence, drafted, accepted)
        self._take_choice(sequence, choice, now)

    def _keep_accepted(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Keep the memory of accepted drafts and drop the rest. The tokens stand, whatever is raised."""
        sequence.num_computed += accepted
        self._requests.drafted_tokens += drafted
        self._requests.accepted_drafts += accepted
        try:
            if accepted < drafted:
                self._kv.truncate(sequence, sequence.num_computed)
            self._kv.commit(sequence)
        except Exception as error:
            self._doubt.note(error)

    def _take_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        requests, request = self._requests, sequence.request
        sequence.append(token)
        requests.generated_tokens += 1
        before, request.last_token_at = request.last_token_at, now
        if before is None:
            request.first_token_at = now
        elif len(request.sequences) == 1:
            request.gaps.append(now - before)
        if token in request.end_ids:
            requests.end(sequence, FinishReason.STOP, token, logprob)
        elif len(sequence.tokens) >= sequence.max_length:
            requests.end(sequence, FinishReason.LENGTH, token, logprob)
        else:
            requests.outputs.append(token_output(request, sequence.index, token, logprob))

    def _fork_twins(self, sequence: Sequence) -> list[tuple[int, Sequence]]:
        """The prompt is computed: fork its other answers, as far as there is room, and queue the rest. Those that were
        forked, with their number among all answers."""
        started: list[tuple[int, Sequence]] = []
        place = 0
        while sequence.twins:
            place += 1
            twin = sequence.twins[0]
            if not twin.ended:
                self._requests.waiting.rank(twin)
                if len(self._requests.running) < self._max_running and self._forked(sequence, twin):
                    self._requests.start(twin, twin.num_computed)
                    started.append((place, twin))
                else:
                    self._requests.waiting.push(twin)
            del sequence.twins[0]  # only now: if something was raised, it is tried again next time
        return started

    def _forked(self, sequence: Sequence, twin: Sequence) -> bool:
        try:
            return self._kv.fork(sequence, twin)
        except BackendError as error:
            if error.fatal or twin.admitted:
                raise
            log.error("request %s: forking an answer failed: %s", sequence.request.id, error)
            return False


def _choices(result: StepResult, wanted: list[Wanted]) -> list[Choice | Exception | None]:
    """Tokens that the backend chose, or that the host chooses now."""
    if result.drawn is None:
        assert result.logits is not None
        return _choose(result.logits, [(row, sequence.chooser) for row, _, sequence in wanted])
    return [_taken(sequence.chooser, result.drawn[row][place]) for row, place, sequence in wanted]


def _choose(logits: Logits, wanted: list[tuple[int, TokenChooser]]) -> list[Choice | Exception | None]:
    return choose(logits, wanted, masks_for([chooser.constraint for _, chooser in wanted]))


def _taken(chooser: TokenChooser, drawn: Drawn) -> Choice | Exception | None:
    try:
        return chooser.take(drawn)
    except Exception as error:
        return error
