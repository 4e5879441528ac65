"""Requests on their way through replicas, and the router, without a cluster: what is told to them is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve._private.request_router.common import PendingRequest

from cllm.cluster.dispatcher import Dispatcher
from cllm.cluster.messages import Accepted, Ended, Refusal, ReplicaJob, ReplicaProgress, Route
from cllm.cluster.peers import Peer
from cllm.cluster.router import PrefixRouter
from cllm.cluster.routing_view import RoutingView, share_view
from cllm.engine.observer import Observers
from cllm.engine.params import SamplingParams
from cllm.engine.request import NO_HIT, FinishReason, Output, Request
from cllm.errors import BackendError, ModelUnavailableError, OverloadedError, ShuttingDownError
from cllm.generation import Generation
from cllm.observe.router_metrics import RouterMetrics
from cllm.text.tokenizer import ByteTokenizer
from engine_kit import make_request

BUSY = OverloadedError("the queue is full")


class _Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Replicas:
    """Ray Serve's handle. Each of `script` is what happens to a job: a refusal, or what a replica does with it."""

    def __init__(self, script: list[Refusal | Callable[[ReplicaJob, Peer], None]], names: str = "ab") -> None:
        self.view = RoutingView(16)
        for name in names:
            self.view.add(name, "weights", tells_cache=True)
        self.outputs: list[Output] = []
        self.jobs: list[ReplicaJob] = []
        self.candidates = set(names)
        self.dies_then = False
        self._script = iter(script)
        self.dispatcher = Dispatcher(
            "ingress",
            self,  # type: ignore[arg-type]
            self.view,
            self.outputs.extend,
            Observers(),
            RouterMetrics("cllm", replicas=dict, index_blocks=int, streams=int),
            weights="weights",
            silence_s=5.0,
            wait_s=60.0,
            max_sends=3,
        )

    @property
    def run(self) -> Any:
        return SimpleNamespace(remote=self._remote)

    def _remote(self, job: ReplicaJob) -> Any:
        assert job.route is not None
        chosen = self.view.choose(job.route, self.candidates)
        self.jobs.append(job)
        response: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        step = next(self._script)
        if step == self.fails_at_once:
            response.set_exception(RuntimeError("no replica"))
        elif isinstance(step, Refusal):
            response.set_result(step._replace(replica=str(chosen)))
        else:
            peer = cast(Peer, SimpleNamespace(name=chosen, link=_Link(), draining=False))
            asyncio.get_running_loop().call_soon(step, job, peer)
        return response

    async def answer(self, *, until: FinishReason | None = None, **options: Any) -> Output:
        """The last output of a request, or the first with a certain reason."""
        request = make_request("Where do trains go?", **options)
        request.__class__ = Request  # it lets its sequences go when it ends
        self.dispatcher.start(request)

        async def ended() -> Output:
            while not self.outputs or self.outputs[-1].reason is None or until not in (None, self.outputs[-1].reason):
                await asyncio.sleep(0.01)
            return self.outputs[-1]

        return await asyncio.wait_for(ended(), 60)

    # -- what a replica does -----------------------------------------------------------------------------------

    def begins_and_dies(self, job: ReplicaJob, peer: Peer) -> None:
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        self.dispatcher.on_output(peer, Output(job.name, 0, 97, None, None, None, None, NO_HIT))
        self.dispatcher.on_lost(peer)

    def ends_one_and_dies(self, job: ReplicaJob, peer: Peer) -> None:
        """The first of two answers."""
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        if job.submission.generated is None:
            self.dispatcher.on_output(peer, Output(job.name, 0, 97, None, FinishReason.LENGTH, None, None, NO_HIT))
        self.dispatcher.on_lost(peer)

    def fails(self, job: ReplicaJob, peer: Peer) -> None:
        """As a whole, which is told with the first answer."""
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        error = BackendError("tokens are lost")
        self.dispatcher.on_output(peer, Output(job.name, 0, None, None, FinishReason.ERROR, None, error, NO_HIT))

    def goes_on_with_one(self, job: ReplicaJob, peer: Peer) -> None:
        """The other of two answers is cancelled, which the replica does."""
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        self.dispatcher.cancel(job.name.partition("~")[0], 0, FinishReason.CANCELLED)
        for answer, reason in ((0, FinishReason.CANCELLED), (1, None), (1, FinishReason.LENGTH)):
            self.dispatcher.on_output(
                peer, Output(job.name, answer, None if not answer else 98, None, reason, None, None, NO_HIT)
            )

    def begins_and_drains(self, job: ReplicaJob, peer: Peer) -> None:
        peer.draining = True
        self.begins_and_dies(job, peer)

    def is_stopped(self, job: ReplicaJob, peer: Peer) -> None:
        """By a stop string, which the ingress finds: it cancels the answer, and the replica ends it."""
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        self.dispatcher.on_output(peer, Output(job.name, 0, 97, None, None, None, None, NO_HIT))
        self.dispatcher.cancel(job.name.partition("~")[0], 0, FinishReason.STOP)
        if not self.dies_then:
            self.dispatcher.on_output(peer, Output(job.name, 0, None, None, FinishReason.STOP, None, None, NO_HIT))
            self.dispatcher.on_ended(peer, Ended(job.name, []))
        self.dispatcher.on_lost(peer)

    def reports_late(self, job: ReplicaJob, peer: Peer) -> None:
        """How far the prompt is, when nobody wants it any more."""
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        self.dispatcher.cancel(job.name.partition("~")[0], None, FinishReason.CANCELLED)
        self.dispatcher.on_progress(peer, ReplicaProgress(job.name, 3, 0))
        self.outputs.append(
            Output(job.name.partition("~")[0], 0, None, None, FinishReason.CANCELLED, None, None, NO_HIT)
        )

    def fails_at_once(self, job: ReplicaJob, peer: Peer) -> None:
        """The call itself does."""

    def finishes(self, job: ReplicaJob, peer: Peer) -> None:
        self.dispatcher.on_accepted(peer, Accepted(job.name))
        self.dispatcher.on_output(peer, Output(job.name, 0, 98, None, FinishReason.LENGTH, None, None, NO_HIT))


def replicas(*steps: str | Refusal, names: str = "ab") -> Replicas:
    script: list[Any] = []
    found = Replicas(script, names)
    found._script = iter([step if isinstance(step, Refusal) else getattr(found, step) for step in steps])
    return found


def refusal(error: Exception) -> Refusal:
    return Refusal("", error, elsewhere=True)


async def test_what_was_accepted_is_not_refused_later() -> None:
    """Its replica dies while the others are busy: it waits for them."""
    found = replicas("begins_and_dies", *[refusal(BUSY)] * 3, "finishes")
    last = await found.answer()
    assert last.reason is FinishReason.LENGTH
    assert [output.token_id for output in found.outputs] == [97, 98]
    assert [job.submission.generated for job in found.jobs] == [None, *[[[97]]] * 4]


async def test_refused_when_everyone_has_refused() -> None:
    found = replicas(refusal(BUSY), refusal(BUSY), refusal(BUSY))
    last = await found.answer()
    assert last.error is BUSY and len(found.jobs) == 2


async def test_one_that_drains_is_not_waited_for() -> None:
    """The ingress still has a link to it, but Ray does not offer it any more."""
    found = replicas(refusal(BUSY), refusal(BUSY), refusal(BUSY), names="abc")
    found.candidates = {"a", "b"}
    last = await found.answer()
    assert last.error is BUSY and len(found.jobs) == 2


async def test_everyone_is_about_to_stop() -> None:
    found = replicas(*[refusal(ShuttingDownError("it stops"))] * 4, "finishes")
    assert (await found.answer()).reason is FinishReason.LENGTH


@pytest.mark.parametrize("dies_then", [False, True])
async def test_an_answer_that_is_stopped_by_the_ingress(dies_then: bool) -> None:
    """There is nothing left to do, whatever becomes of its replica."""
    found = replicas("is_stopped")
    found.dies_then = dies_then
    request = make_request("Where do trains go?")
    found.dispatcher.start(request)
    await asyncio.wait_for(until_done(lambda: found.dispatcher.streams == 0), 60)
    assert request.reason is FinishReason.STOP and len(found.jobs) == 1


async def until_done(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_progress_of_a_request_that_was_cancelled_is_ignored() -> None:
    last = await replicas("reports_late").answer()
    assert last.reason is FinishReason.CANCELLED


async def test_a_request_that_nobody_survives() -> None:
    found = replicas(*["begins_and_dies"] * 3)
    last = await found.answer()
    assert isinstance(last.error, BackendError)
    assert str(last.error) == "3 replicas were lost while they worked on this request"
    assert len(found.jobs) == 3


@pytest.mark.parametrize("steps", [["ends_one_and_dies"] * 3, ["ends_one_and_dies", "fails"]])
async def test_an_answer_that_has_ended_does_not_hide_that_the_others_fail(steps: list[str]) -> None:
    found = replicas(*steps)
    request = make_request("Where do trains go?", SamplingParams(n=2, seed=1, max_tokens=8))
    generation = Generation(request, ByteTokenizer(), lambda *_: None)
    found.dispatcher.start(request)
    await asyncio.wait_for(until_done(lambda: found.dispatcher.streams == 0), 60)
    for output in found.outputs:
        generation.take(output, 0.0)
    assert isinstance(generation.error, BackendError)


async def test_one_answer_is_cancelled_and_the_other_goes_on() -> None:
    found = replicas("goes_on_with_one")
    last = await found.answer(params=SamplingParams(n=2, seed=1, max_tokens=8), until=FinishReason.LENGTH)
    assert (last.answer, last.token_id, len(found.outputs)) == (1, 98, 3)


async def test_being_moved_is_not_being_lost() -> None:
    found = replicas(*["begins_and_drains"] * 7, "finishes")
    assert (await found.answer()).reason is FinishReason.LENGTH
    assert len(found.jobs) == 8


async def test_when_there_is_nobody_a_request_waits_and_then_fails() -> None:
    """Ray fails each call at once when there is no replica; that is not the request's fault."""
    found = replicas(*["fails_at_once"] * 100)
    found.candidates = set()
    found.dispatcher._wait_s = 0.5
    last = await found.answer()
    assert isinstance(last.error, ModelUnavailableError)
    assert str(last.error) == "no replica is available; try again later"
    assert 2 < len(found.jobs) < 10


@pytest.mark.parametrize("linked", [False, True])
async def test_the_router_lets_others_run(linked: bool) -> None:
    """A replica that Ray knows and the ingress does not yet: Ray must pause before it asks again."""
    view = RoutingView(16)
    share_view("a model", view)
    if linked:
        view.add("a", "weights", tells_cache=True)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(model="a model")
    job = ReplicaJob.__new__(ReplicaJob)
    job.route = Route([], 5, weights="weights")
    pending = PendingRequest(args=[job], kwargs={}, metadata=cast(Any, None))
    candidate = cast(Any, SimpleNamespace(replica_id=SimpleNamespace(unique_id="a")))
    chosen = await router.choose_replicas([candidate], pending)
    assert chosen == ([[candidate]] if linked else [])
    assert pending.routing_context.should_backoff
