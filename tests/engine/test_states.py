"""Layers that carry a state: prompts are computed once, from the place where they part from what is cached."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.request import Request
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.kv.paged.state_tables import MOST_STATES
from cllm.kv.pins import PinMark
from engine_kit import make_request, reference
from kv_kit import assert_states, paged

BLOCK = 16
CELLS = 8
LAYERS = pytest.mark.parametrize("window", [0, 40])


class Server:
    """A scheduler whose steps are counted."""

    def __init__(
        self, blocks: int = 4000, *, window: int = 0, max_tokens: int = 256, running: int = 32, threshold: float = 1.0
    ) -> None:
        self.backend, self.kv = paged(
            blocks, BLOCK, window=window, ahead=max_tokens, states=CELLS, eviction_threshold=threshold
        )
        budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=max_tokens)
        self.scheduler = Scheduler(self.kv, budget, max_running=running)
        self.stepper = Stepper(self.backend, self.scheduler, timer=lambda: 0.0)

    def add(self, tokens: list[int], count: int = 8) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        request = make_request(tokens, params, max_context=4096)
        self.scheduler.requests.add(request)
        return request

    def run(self) -> None:
        requests = self.scheduler.requests
        while requests.has_work:
            self.stepper.advance()
            assert self.stepper.steps < 2000
            self.kv.check()
            assert self.kv.usage().groups[-1].used <= MOST_STATES * len(requests.running) + self.kv.usage().pins
        assert_states(self.backend, self.kv)

    def ask(self, tokens: list[int], count: int = 8) -> tuple[list[int], int]:
        """An answer, and how many tokens were computed for it."""
        before, request = self.backend.computed_tokens, self.add(tokens, count)
        self.run()
        answer = request.sequences[0].tokens[len(tokens) :].tolist()
        assert answer == reference(request)
        return answer, self.backend.computed_tokens - before


_random = np.random.default_rng(5)


def message(length: int) -> list[int]:
    return [*_random.integers(0, 250, length - 1).tolist(), END_TOKEN]


def joined(messages: list[list[int]]) -> list[int]:
    return [token for each in messages for token in each]


def chat(turns: int, size: int = 40) -> list[list[int]]:
    return [message(100), *(message(size) for _ in range(2 * turns)), message(size)]


@LAYERS
def test_the_next_turn_computes_what_is_new(window: int) -> None:
    server, messages = Server(window=window), chat(12)
    prompt = joined(messages)
    answer, computed = server.ask(prompt, 50)
    assert computed == len(prompt) + len(answer) - 1
    new = message(150)
    _, computed = server.ask([*prompt, *answer, *new], 1)
    assert computed <= len(new) + BLOCK


@LAYERS
def test_a_chat_whose_reasoning_is_stripped_computes_what_follows_it(window: int) -> None:
    server, prompt = Server(window=window), joined(chat(12))
    answer, _ = server.ask(prompt, 100)
    new = [*answer[60:], END_TOKEN, *message(30)]
    _, computed = server.ask([*prompt, *new], 1)
    assert computed <= len(new) + BLOCK


@LAYERS
@pytest.mark.parametrize("back", [1, 2, 3, 4])
def test_a_chat_with_an_edited_message_computes_what_follows_the_one_before(window: int, back: int) -> None:
    server, messages = Server(window=window), chat(20)
    server.ask(joined(messages))
    messages[-back] = message(44)
    _, computed = server.ask(joined(messages), 1)
    assert computed <= sum(map(len, messages[-back:])) + BLOCK


@LAYERS
def test_users_of_one_system_prompt_compute_it_once(window: int) -> None:
    server, system = Server(window=window), message(2000)
    prompts = [[*system, *message(40 + i)] for i in range(20)]
    requests = [server.add(prompt, 4) for prompt in prompts]
    server.run()
    own = sum(len(prompt) - len(system) for prompt in prompts)
    assert server.backend.computed_tokens <= len(system) + own + 20 * (BLOCK + 4)
    assert all(
        request.sequences[0].tokens[len(request.prompt) :].tolist() == reference(request) for request in requests
    )


@pytest.mark.parametrize("max_tokens", [9, 15, 21, 28, 35, 100])
def test_who_waits_for_a_prefix_waits_until_it_can_be_gone_on_from(max_tokens: int) -> None:
    """However close to it the other one already is."""
    server, system = Server(max_tokens=max_tokens), message(500)
    for i in range(3):
        server.add([*system, *message(40 + i)], 2)
    server.run()
    assert server.backend.computed_tokens <= len(system) + 3 * (42 + BLOCK + 2)


def test_a_prefix_that_was_never_a_place_is_one_from_the_second_sighting_on() -> None:
    server, shared = Server(), message(1501)[:-1]
    found = [server.ask([*shared, *message(700)], 1)[1] - 700 for _ in range(3)]
    assert found[0] == 1500 and found[1] <= 1100 and found[2] <= BLOCK


@LAYERS
def test_a_prompt_beyond_the_threshold_of_eviction_leaves_a_place_to_go_on_from(window: int) -> None:
    server, prompt = Server(400, window=window, threshold=0.4), message(2500)
    answer, _ = server.ask(prompt)
    while server.kv.maintain(1.0):
        server.kv.check()
    _, computed = server.ask([*prompt, *answer, *message(40)], 1)
    assert computed <= len(prompt) / 2


@pytest.mark.parametrize("parts", [100, 300, 700, 1300, 1900])
def test_what_differs_near_the_end_computes_little_before_it(parts: int) -> None:
    """At most twice as much again, or as much as is between two places at least."""
    server, prompt = Server(), message(2000)[:-1]
    server.ask(prompt, 1)
    _, computed = server.ask([*prompt[:-parts], *message(50)], 1)
    assert computed - 50 <= max(2 * parts, 2 * 32 * BLOCK) + BLOCK


@LAYERS
def test_who_is_preempted_computes_no_more_than_a_block_again(window: int) -> None:
    server = Server(window=window)
    request = server.add(message(300), 200)
    for _ in range(105):
        server.stepper.advance()
    for _ in range(3):
        server.scheduler.requests.preempt(request.sequences[0])
        for _ in range(5):
            server.stepper.advance()
    server.run()
    sequence = request.sequences[0]
    assert sequence.tokens[300:].tolist() == reference(request) and request.preemptions == 3
    assert server.backend.computed_tokens <= len(sequence.tokens) + 3 * BLOCK


def test_answers_outgrow_the_memory_and_are_what_they_are_alone() -> None:
    """With room for hardly more than one of them."""
    server = Server(blocks=20 + 2 * MOST_STATES * CELLS, running=4)
    prompts = [message(60 + i) for i in range(4)]
    requests = [server.add(prompt, 120) for prompt in prompts]
    server.run()
    assert server.scheduler.requests.preemptions > 0
    for request in requests:
        assert request.sequences[0].tokens[len(request.prompt) :].tolist() == reference(request)


def test_a_long_answer_is_gone_on_from_in_its_middle() -> None:
    """By one that parts from it there, for example after it was edited."""
    server, prompt = Server(), message(100)
    answer, _ = server.ask(prompt, 1500)
    _, computed = server.ask([*prompt, *answer[:1400], *message(20)], 1)
    assert computed - 20 <= max(1500 // 4, 32 * BLOCK) + BLOCK


def test_what_an_answer_ends_with_can_be_pinned() -> None:
    server, mark = Server(), PinMark(100)
    request = make_request(message(70), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), pins=[mark])
    server.scheduler.requests.add(request)
    server.run()
    assert mark.refusal is not None  # nothing was kept there
    at_end = PinMark(128)
    again = make_request(message(70), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), pins=[at_end])
    server.scheduler.requests.add(again)
    server.run()
    assert at_end.refusal is None and at_end.pinned_tokens == 128
    assert server.kv.usage().pinned == 128 // BLOCK + CELLS == server.kv.usage().referenced
    assert server.kv.unpin(next(iter(server.kv.pins.all.by_id))) and server.kv.usage().referenced == 0


def test_twins_share_a_state_until_they_part() -> None:
    server = Server()
    request = make_request(message(100), SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=5), max_context=4096)
    server.scheduler.requests.add(request)
    server.run()
    for index, sequence in enumerate(request.sequences):
        assert sequence.tokens[100:].tolist() == reference(request, index)
    assert server.backend.computed_tokens <= 100 + 5 * 40


def test_there_are_no_drafts_and_no_windows() -> None:
    traits = FakeBackend(states=1).traits
    assert traits.most_drafts == 0 and traits.no_window is not None
