"""A cluster in this process, without Ray: real ingresses and replicas, with real links over localhost.

    async with LocalCluster(config, replicas=2) as llm: ...

`llm` is the model of an ingress. Only what Ray does is imitated: it finds replicas, takes jobs to them by the
ingress's own routing view, and says when a replica is dead.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from cllm.cluster.messages import Refusal, ReplicaJob, Report
from cllm.cluster.remote import RemoteExecutor
from cllm.cluster.replica_core import ReplicaCore
from cllm.cluster.routing_view import Address, shared_view
from cllm.config import Config
from cllm.llm import AsyncLLM
from scripted_llm import Scripted

LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""
PACE = {"EVENTS_S": 0.01, "LOAD_S": 0.01, "REPORT_S": 0.01}
"""How often replicas tell things here: tests wait for them."""
_names = itertools.count(1)


class ReplicaDiedError(Exception):
    """As Ray's ActorDiedError."""


class _Replica:
    def __init__(self, core: ReplicaCore, llm: AsyncLLM) -> None:
        self.core = core
        self.llm = llm
        self.jobs: set[asyncio.Task[Any]] = set()
        self.listed = True
        """Whether Ray knows it."""


class _Response:
    """As Serve's DeploymentResponse."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class _Method:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> _Response:
        return _Response(asyncio.ensure_future(self._call(*arguments)))  # type: ignore[arg-type]


class LocalReplicas:
    """Serve's handle of a deployment of replicas. `make` gives a replica its model."""

    def __init__(self, make: Callable[[Config], AsyncLLM] = AsyncLLM) -> None:
        self._make = make
        self._model = ""
        self.members: dict[str, _Replica] = {}
        self.run = _Method(self._run)
        self.facts = _Method(self._facts)

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def llm_of(self, name: str) -> AsyncLLM:
        return self.members[name].llm

    async def add(self, config: Config) -> str:
        """Start a replica. Ingresses find it at once."""
        self._model = config.model.name
        llm = self._make(config)
        core = ReplicaCore(llm, f"replica{next(_names)}")
        await core.start()
        self.members[core.name] = _Replica(core, llm)
        self.announce()
        return core.name

    async def drain(self, name: str) -> None:
        """No new jobs; those it has may end. Then it is gone."""
        member = self.members[name]
        member.listed = False
        self.announce()
        await asyncio.gather(*member.jobs, return_exceptions=True)
        await self._close(name)

    async def kill(self, name: str) -> None:
        """As kill -9: its links break, and calls to it fail."""
        self._cut(self.members[name])
        await self._close(name)

    async def close(self) -> None:
        for name in self.names:
            await self.kill(name)

    def announce(self) -> None:
        """As Ray's controller tells routers which replicas there are."""
        view = shared_view(self._model)
        if view is not None:
            found = {name: member.core for name, member in self.members.items() if member.listed}
            view.tell({name: Address("127.0.0.1", core.port, core.secret) for name, core in found.items()})

    def _cut(self, member: _Replica) -> None:
        for task in member.jobs:
            task.cancel()

    async def _close(self, name: str) -> None:
        member = self.members.pop(name)
        self.announce()
        await member.core.close()

    async def _facts(self) -> Any:
        return pickle.loads(pickle.dumps(next(iter(self.members.values())).core.facts))

    async def _run(self, job: ReplicaJob) -> Refusal | None:
        member = await self._choose(job)
        task = asyncio.ensure_future(member.core.run(pickle.loads(pickle.dumps(job))))
        member.jobs.add(task)
        task.add_done_callback(member.jobs.discard)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ReplicaDiedError(member.core.name) from None
            task.cancel()
            raise
        answer: Refusal | None = pickle.loads(pickle.dumps(result))
        return answer

    async def _choose(self, job: ReplicaJob) -> _Replica:
        """As Serve's router, which asks again while there is no replica."""
        assert job.route is not None
        while True:
            view = shared_view(self._model)
            listed = [name for name, member in self.members.items() if member.listed]
            chosen = None if view is None else view.choose(job.route, listed)
            if chosen is not None:
                return self.members[chosen]
            await asyncio.sleep(0.01)


class LocalCluster(AsyncLLM):
    """An ingress's model; its replicas start and end with it."""

    def __init__(
        self, config: Config, *, replicas: int = 1, make: Callable[[Config], AsyncLLM] = AsyncLLM, **_: Any
    ) -> None:
        self.local = LocalReplicas(make)
        self._count = replicas
        self._patches = ExitStack()
        self.remote = RemoteExecutor(config, self.local)
        super().__init__(config, executor=self.remote)

    async def start(self) -> None:
        self._patches.enter_context(mock.patch.multiple("cllm.cluster.link_server", **PACE))
        for _ in range(self._count):
            await self.local.add(self.config)
        await super().start()
        self.local.announce()
        await self.settled()

    async def shutdown(self, grace_s: float | None = None) -> None:
        await super().shutdown(grace_s)
        await self.local.close()
        self._patches.close()

    async def add_replica(self) -> str:
        name = await self.local.add(self.config)
        await self.settled()
        return name

    async def settled(self) -> None:
        """Wait until the ingress has heard everything of exactly the replicas that there are."""

        def is_settled() -> bool:
            reported = {peer.name for peer in self.remote.peers if peer.report is not None}
            return reported == {peer.name for peer in self.remote.peers} == set(self.local.members)

        await until(is_settled)

    async def caught_up(self) -> None:
        """Wait until each replica has told everything that has happened up to now."""
        for _ in range(2):  # the next report may have been made before this call
            seen = {peer.name: peer.report for peer in self.remote.peers}
            await until(partial(self._has_newer, seen))

    def _has_newer(self, seen: Mapping[str, Report | None]) -> bool:
        return all(peer.report is not seen.get(peer.name) for peer in self.remote.peers)


class ScriptedCluster(Scripted, LocalCluster):
    """An ingress whose replicas all say what the test says."""

    @property
    def engines(self) -> Sequence[AsyncLLM]:
        return [member.llm for member in self.local.members.values()]

    def _say_starved(self) -> None:
        """Once everything that was computed has arrived."""
        here = sum(request.generated for request in self.requests())
        there = sum(request.generated for llm in self.engines for request in llm.requests())
        if here < there:
            asyncio.get_running_loop().call_later(0.001, self._say_starved)
        else:
            super()._say_starved()


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)
