"""Steps that are queued behind each other: with the device choosing tokens two steps ahead, answers are those of the
host choosing them one step at a time. f32, on the CPU, where plain torch stands for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cllm.backends.base import Bias, Chunk, Draw, Seen
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.batch import ROW_NUMBERS, Bounds, Tables, batch_on, make_batch, read_chunks, spread
from cllm.backends.torch.padded_step import PaddedStep
from cllm.backends.torch.sampling import choose, read_draws
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.request import FinishReason, Output
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.manager import PagedKVManager
from engine_kit import make_request
from sampling_kit import packed
from step_of import rows_of
from torch_kit import BLOCK, N_VOCAB, build, chunk, open_backend, random_tokens, save, table

BLOCKS = 64
BOUNDS = Bounds(N_VOCAB, 512, BLOCKS)
PROMPTS = [random_tokens(5 + 9 * seed, seed) for seed in range(6)]
BEST = Draw(0.0, 0, 1.0, 0.0, 0.0, None, None, None, None)
Answers = dict[tuple[str, int], list[Output]]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchBackend]:
    with open_backend(save(build("llama"), tmp_path_factory.mktemp("llama")), blocks=BLOCKS) as opened:
        assert opened.traits.depth == 1, "on a CPU there is nothing to compute ahead with"
        opened.traits = replace(opened.traits, depth=2)
        yield opened


class Run:
    """Requests through scheduler and stepper, without a thread."""

    def __init__(self, backend: TorchBackend, *, running: int = 8, step_tokens: int = 48) -> None:
        kv = PagedKVManager(backend.ops, BlockGeometry(BLOCKS, BLOCK), bytes_per_token=8)
        budget = StepBudget(inter_token_s=10.0, max_gap_s=10.0, prompt_only_s=10.0, max_tokens=step_tokens)
        self.scheduler = Scheduler(kv, budget, max_running=running)
        self.stepper = Stepper(backend, self.scheduler, timer=lambda: 0.0)
        self.answers: Answers = {}
        self.errors: list[Output] = []

    def add(self, name: str, prompt: list[int], **changes: Any) -> None:
        params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | changes))
        self.scheduler.requests.add(make_request(prompt, params, request_id=name))

    def advance(self) -> None:
        self.stepper.advance()
        self.scheduler.kv.check()
        for output in self.scheduler.requests.take_outputs():
            if output.token_id is not None:
                self.answers.setdefault((output[0], output[1]), []).append(output)
            if output.error is not None:
                self.errors.append(output)

    def finish(self) -> Answers:
        while self.scheduler.requests.has_work or self.stepper.under_way:
            self.advance()
        return self.answers


def tokens(answers: Answers) -> dict[tuple[str, int], list[int | None]]:
    return {key: [output.token_id for output in outputs] for key, outputs in answers.items()}


def both(backend: TorchBackend, *, running: int = 8, **changes: Any) -> tuple[Answers, Answers]:
    """All prompts, one step at a time and two ahead."""
    found = []
    for depth in (1, 2):
        backend.traits = replace(backend.traits, depth=depth)
        run = Run(backend, running=running)
        for number, prompt in enumerate(PROMPTS):
            run.add(f"r{number}", prompt, **changes)
        found.append(run.finish())
        assert not run.errors
    backend.traits = replace(backend.traits, depth=2)
    assert sum(map(len, found[0].values())) > 60
    return found[0], found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": False, "max_tokens": 30},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 4},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.2},
        {"temperature": 0.8, "frequency_penalty": 0.9, "seed": 5},
        {"temperature": 0, "logit_bias": {7: 1.0, 9: -100.0}, "min_tokens": 6, "ignore_eos": False},
        {"temperature": 0.9, "n": 3, "seed": 6, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "ends", "sampled", "truncated", "penalties", "sampled penalties", "bias", "several answers"],
)
def test_two_steps_ahead_equals_one_at_a_time(backend: TorchBackend, changes: dict[str, Any]) -> None:
    one, two = both(backend, **changes)
    assert tokens(one) == tokens(two)
    assert len({tuple(answer) for answer in tokens(one).values()}) > 4, "answers that are all alike would prove nothing"


def test_it_does_go_ahead(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []
    submit = backend.submit

    def noted(chunks: Any) -> Any:
        followed.extend(each.follows for each in chunks)
        return submit(chunks)

    monkeypatch.setattr(backend, "submit", noted)
    for changes in ({"temperature": 0.0}, {"temperature": 0.7, "repetition_penalty": 1.2}):
        followed.clear()
        run = Run(backend)
        run.add("r", PROMPTS[0], **changes)
        run.finish()
        assert followed.count(True) == 11, "all but the first token of twelve"


def test_log_probabilities_are_the_hosts(backend: TorchBackend) -> None:
    one, two = both(backend, temperature=0.8, seed=8, logprobs=5, repetition_penalty=1.3)
    for key, outputs in one.items():
        for host, device in zip(outputs, two[key], strict=True):
            assert host.token_id == device.token_id and host.logprob is not None and device.logprob is not None
            assert device.logprob.logprob == pytest.approx(host.logprob.logprob, abs=1e-5)
            assert [token for token, _ in device.logprob.top] == [token for token, _ in host.logprob.top]
            assert [each for _, each in device.logprob.top] == pytest.approx([x for _, x in host.logprob.top], abs=1e-5)


def test_few_places_preemption_and_cancelling(backend: TorchBackend) -> None:
    """Rows are handed on while steps with their old owners are under way."""
    expected = tokens(both(backend, temperature=0.0, max_tokens=20)[0])
    run = Run(backend, running=2)
    for number, prompt in enumerate(PROMPTS):
        run.add(f"r{number}", prompt, temperature=0.0, max_tokens=20)
        run.add(f"gone{number}", prompt, temperature=0.0, max_tokens=20)
    steps = 0
    while run.scheduler.requests.has_work or run.stepper.under_way:
        run.advance()
        steps += 1
        if steps % 5 == 0:
            gone = [request for name, request in run.scheduler.requests.by_id.items() if name.startswith("gone")]
            if gone:
                run.scheduler.requests.finish(gone[0], None, FinishReason.CANCELLED)
    found = tokens(run.answers)
    assert {key: answer for key, answer in found.items() if key[0].startswith("r")} == expected


# -- what goes wrong -----------------------------------------------------------------------------------------------


def failing_once(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int) -> None:
    model = backend._worker.context.model
    original, calls = model.forward, []

    def forward(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise error
        return original(*arguments)

    monkeypatch.setattr(model, "forward", forward)


@pytest.mark.parametrize("error", [StepAbortedError("the step was aborted"), torch.OutOfMemoryError("out of memory")])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_fails_once_changes_no_answer(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int
) -> None:
    changes = {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.4}
    expected = tokens(both(backend, **changes)[0])
    failing_once(backend, monkeypatch, error, at)
    run = Run(backend)
    for number, prompt in enumerate(PROMPTS):
        run.add(f"r{number}", prompt, **changes)
    assert tokens(run.finish()) == expected and not run.errors


def test_one_that_never_fits_fails_alone(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(both(backend, temperature=0.0)[0])
    model = backend._worker.context.model
    original = model.forward

    def forward(batch: Any, *arguments: Any) -> Any:
        ends = (batch.positions == len(PROMPTS[3]) - 1) & (batch.tokens == PROMPTS[3][-1])
        if ends.any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(batch, *arguments)

    monkeypatch.setattr(model, "forward", forward)
    run = Run(backend)
    for number, prompt in enumerate(PROMPTS):
        run.add(f"r{number}", prompt, temperature=0.0)
    found = tokens(run.finish())
    assert [output[0] for output in run.errors] == ["r3"]
    assert found == {key: answer for key, answer in expected.items() if key != ("r3", 0)}


def submitted(backend: TorchBackend, *chunks: Chunk) -> list[list[int]]:
    drawn = backend.collect(backend.submit(chunks)).drawn
    assert drawn is not None
    return [[each.token_id for each in draws] for draws in drawn]


def drawing(tokens: list[int], start: int, row: int, *draws: Draw, follows: bool = False) -> Chunk:
    made = chunk(tokens, start, table(40, 4 * row))
    made.row, made.draws, made.follows = row, draws, follows
    return made


def test_rows_that_are_not_numbers_draw_nothing_and_are_no_ones_token(backend: TorchBackend) -> None:
    model = backend._worker.context.model
    head = model.weights.head[5].clone()
    try:
        model.weights.head[5] = torch.nan
        first = backend.submit([drawing(PROMPTS[1], 0, 3, BEST)])
        second = backend.submit([drawing([0], len(PROMPTS[1]), 3, BEST, follows=True)])
        assert [backend.collect(ticket).drawn for ticket in (first, second)] == [[[(-1, 0.0, ())]]] * 2
    finally:
        model.weights.head[5] = head
    assert submitted(backend, drawing(PROMPTS[1], 0, 3, BEST))[0][0] >= 0


def test_what_a_step_needs_is_read_before_submit_returns(backend: TorchBackend) -> None:
    ids, counts = np.arange(N_VOCAB, dtype=np.int32), np.zeros(N_VOCAB, np.int32)
    draw = BEST._replace(penalties=Seen(ids, counts, 1.0, 50.0, 0.0))
    made = drawing(PROMPTS[1], 0, 3, draw)
    expected = submitted(backend, made)
    ticket = backend.submit([made])
    counts[expected[0][0]], ids[:], made.blocks[:], made.tokens[0] = 9, 0, [63] * len(made.blocks), 1
    drawn = backend.collect(ticket).drawn
    assert drawn is not None and [[each.token_id for each in draws] for draws in drawn] == expected


def test_masks_and_draws_of_many_kinds_in_one_step(backend: TorchBackend) -> None:
    prompt = PROMPTS[2]
    (row,) = rows_of(backend, [chunk(prompt, 0, table(40))])
    order = np.argsort(-row)
    mask = np.ones(N_VOCAB, np.bool_)
    mask[order[:3]] = False
    ban = Bias(order[:2].astype(np.int32), np.array([-np.inf, -np.inf]))
    told = BEST._replace(logprobs=2, mask=packed(mask))
    chunks = [
        drawing(prompt, 0, 0, BEST, told, BEST._replace(bias=ban)),
        drawing(prompt[:9], 0, 1),
        drawing(prompt, 0, 2, BEST._replace(bias=ban)),
    ]
    chunks[1].wanted_logits = 0
    drawn = backend.collect(backend.submit(chunks)).drawn
    assert drawn is not None
    assert [[each.token_id for each in draws] for draws in drawn] == [[order[0], order[3], order[2]], [order[2]]]
    assert [token for token, _ in drawn[0][1].top] == order[:2].tolist(), "the model's own, before the mask"
    following = drawing([0], len(prompt), 0, BEST, follows=True)
    known = drawing([int(order[0])], len(prompt), 2, BEST)
    assert submitted(backend, following) == submitted(backend, known)


@pytest.mark.parametrize(
    "wrong",
    [
        drawing([1], 0, ROW_NUMBERS, BEST),
        drawing([1], 0, -1, BEST, follows=True),
        drawing([1, 2], 0, 1, BEST, follows=True),
        drawing([1], 0, 0, BEST._replace(bias=Bias(np.array([N_VOCAB], np.int32), np.zeros(1)))),
        drawing([1], 0, 0, BEST._replace(penalties=Seen(*np.array([[-1], [1]], np.int32), 1.2, 0.0, 0.0))),
        drawing([1], 0, 0, BEST._replace(mask=np.ones(3, np.bool_))),
    ],
    ids=["row too large", "follows nobody", "two unknown", "bias", "penalty", "mask"],
)  # fmt: skip
def test_impossible_draws_are_errors(backend: TorchBackend, wrong: Chunk) -> None:
    with pytest.raises(BackendError) as caught:
        backend.submit([wrong])
    assert not caught.value.fatal and "\n" not in str(caught.value)


# -- steps of a fixed size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("kind", ["best", "without some", "too many biases", "drawn"])
def test_a_padded_step_is_the_step(backend: TorchBackend, rows: int, kind: str) -> None:
    """What CUDA graphs are made of, computed without one."""
    context, cpu = backend._worker.context, torch.device("cpu")
    model, sampler, size = context.model, backend._worker.sampler, BlockGeometry(BLOCKS, BLOCK)
    arena = Arena(model.spec, size, "f32", cpu, 1)
    last = torch.full((16,), 7, dtype=torch.int32)
    step = PaddedStep(model, arena, last, sampler, blocks_per_row=20, rows=8)
    starts = (0, 30, 17)
    for row, start in enumerate(starts):
        prompt = chunk(PROMPTS[5][: max(start, 1)], 0, table(40, 4 * row))
        model.forward(make_batch([prompt], BLOCK, cpu), arena)
    bias = Bias(np.arange(60, 60 + (99 if kind == "too many biases" else 2), dtype=np.int32), np.full(99, 2.0))
    draw = {"best": BEST, "drawn": BEST._replace(temperature=1.0, uniform=0.4)}.get(
        kind, BEST._replace(bias=Bias(bias.ids, bias.values[: len(bias.ids)]))
    )
    chunks = [drawing([9], start, row, draw, follows=row == 1) for row, start in enumerate(starts)]
    host, draws = read_chunks(chunks, BLOCK, BOUNDS), read_draws(chunks, N_VOCAB)
    with torch.inference_mode():
        batch, parts = batch_on(host, cpu, last, sampler.prepare, draws.parts())
        assert batch.tokens.tolist() == [9, 7, 9]
        expected = model.forward(batch, arena)
        step.load_nothing(rows)
        step.compute(rows, 320)
        assert last.tolist() == [7] * 16
        moved, chooses, partly = step.load(host, draws, rows)
        assert partly is None
        logits, tokens = step.compute(rows, 320)
        kept = logits[:3].clone()
        wanted = choose(expected.clone(), draws, parts, sampler, torch.zeros_like(last)).read()
        assert chooses == (kind in ("best", "without some"))
        if chooses:
            assert [[token] for token in tokens[:3].tolist()] == [[each.token_id for each in row] for row in wanted]
            assert last[:3].tolist() == tokens[:3].tolist()
        else:
            assert torch.allclose(kept, expected, atol=1e-4) and last.tolist() == [7] * 16
            assert choose(kept, draws, moved, sampler, last).read() == wanted


@pytest.mark.parametrize("drawn", [False, True])
def test_short_chunks_are_rows_of_a_padded_step(backend: TorchBackend, drawn: bool) -> None:
    """Each row reads what those before it write in the same step."""
    context, cpu = backend._worker.context, torch.device("cpu")
    model, sampler, size = context.model, backend._worker.sampler, BlockGeometry(BLOCKS, BLOCK)
    draw = (
        BEST._replace(temperature=1.0, uniform=0.4, mask=packed([n % 3 == 0 for n in range(N_VOCAB)]))
        if drawn
        else BEST
    )
    unfinished = chunk(PROMPTS[4][:6], 14, table(40, 8))
    unfinished.wanted_logits = 0
    chunks = [drawing([9], 30, 0, draw), drawing(PROMPTS[2][:5], 13, 1, draw), unfinished, drawing([5, 6], 0, 3, draw)]
    draws = read_draws(chunks, N_VOCAB)
    rows = spread(chunks, 16, 1000)
    assert [(len(each.tokens), each.wanted_logits) for each in rows] == [(1, n) for n in (1, *[0] * 4, 1, *[0] * 7, 1)]
    found = []
    with torch.inference_mode():
        for asked in (chunks, rows):
            arena = Arena(model.spec, size, "f32", cpu, 1)
            arena_step = PaddedStep(model, arena, context.last, sampler, blocks_per_row=20, rows=16)
            for prompt in (PROMPTS[5][:30], PROMPTS[3][:13], PROMPTS[1][:14]):
                before = chunk(prompt, 0, table(40, {30: 0, 13: 4, 14: 8}[len(prompt)]))
                model.forward(make_batch([before], BLOCK, cpu), arena)
            host = read_chunks(asked, BLOCK, BOUNDS)
            if asked is chunks:
                batch, moved = batch_on(host, cpu, context.last, sampler.prepare, draws.parts())
                logits = model.forward(batch, arena)
            else:
                assert host.decodes and not host.wants_all
                moved, chooses, wanted = arena_step.load(host, draws, 16)
                assert not chooses and wanted is not None
                logits = arena_step.compute(16, 320)[0][wanted.long()]
            found.append((logits.clone(), choose(logits, draws, moved, sampler, context.last).read(), arena))
    (expected, tokens_of, of_chunks), (logits, tokens_of_rows, of_rows) = found
    assert torch.allclose(logits, expected, atol=1e-4) and tokens_of_rows == tokens_of
    assert torch.allclose(of_rows.data[:BLOCKS], of_chunks.data[:BLOCKS], atol=1e-4)


def test_long_chunks_are_not_spread() -> None:
    chunks = [chunk([7], 33, [9, 8, 7]), chunk(range(20), 100, list(range(8)))]
    assert len(spread(chunks, 21, 2400)) == 21
    assert spread(chunks, 20, 2400) is chunks
    assert spread(chunks, 21, 2399) is chunks


# -- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 50])
def test_tables_follow_their_lists(limit: int | None) -> None:
    tables, chance = Tables(limit), np.random.default_rng(0)
    lists = {row: [1] for row in range(-1, 4)}
    for _ in range(600):
        blocks = lists[int(chance.integers(-1, 4))]
        change = chance.integers(6)
        if change == 0:
            blocks += chance.integers(0, 99, int(chance.integers(0, 30))).tolist()
        elif change == 1:
            blocks[int(chance.integers(len(blocks)))] = int(chance.integers(99))
        elif change == 2:
            del blocks[max(1, int(chance.integers(len(blocks) + 1))) :]
        some = (chance.permutation(5)[: chance.integers(1, 5)] - 1).tolist()
        rows = tuple(range(4)) if chance.random() < 0.7 else tuple(some)
        table, firsts = tables.of_all(rows, tuple(lists[row] for row in rows), 100)
        parts = [table[first:end].tolist() for first, end in pairwise(firsts)]
        assert parts == [lists[row][:limit] for row in rows]


def test_a_block_that_is_not_there_is_refused_every_time() -> None:
    tables = Tables()
    for _ in range(2):
        with pytest.raises(BackendError, match="block 7"):
            tables.of_all((0, 1), ([1, 2], [7]), 7)


def test_slots_lie_in_their_blocks() -> None:
    chunks = [chunk([7], 33, [9, 8, 7]), chunk(range(20), 5, [4, 6]), chunk([3], 0, [2])]
    found = read_chunks(chunks, BLOCK, Bounds(100, 100, 10))
    assert found.slots.tolist() == [7 * 16 + 1, 2 * 16, *range(4 * 16 + 5, 5 * 16), *range(6 * 16, 6 * 16 + 9)]
    assert found.firsts.tolist() == [0, 3, 4, 6] and found.table.tolist() == [9, 8, 7, 2, 4, 6]
    assert found.wanted.tolist() == [0, 21, 1] and not found.decodes
