"""A replica that says what it does, and that breaks on request. Ray's workers import it.

A folder is all that tests and replicas share (`FOLDER_VARIABLE`):

    journal         a line for each job
    states/REPLICA  what the replica is doing, written anew all the time
    faults/NAME     a fault of all replicas, faults/NAME.REPLICA of one: the file's existence is what counts
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from cllm.cluster.link import Link
from cllm.cluster.messages import Refusal, ReplicaJob
from cllm.cluster.replica import Replica
from cllm.engine.resuming import Generated
from cllm.kv.events import Listener

FOLDER_VARIABLE = "TEST_CLUSTER_FOLDER"
JOURNAL, STATES, FAULTS = "journal", "states", "faults"
STATE_S = 0.1
POISON = "kills its replica"
"""A prompt with these words does."""

LOSE_EVENTS = "lose-events"
"""Events of the prefix cache are not sent, and nothing says so."""
DELAY_EVENTS = "delay-events"
"""They are kept back, and sent when the fault is gone."""
NO_CONTENT = "no-content"
"""What the cache holds is not told either."""
TELL_CONTENT = "tell-content"
"""What it holds is told again, for as long as the fault is there."""


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


class BreakableReplica(Replica):
    async def __init__(self, *arguments: Any) -> None:  # type: ignore[misc]
        await super().__init__(*arguments)
        self._name = self._core.name
        self._tells = self._core._links
        self._tell_events, self._tell_content = self._tells._tell_events, self._tells._tell_content
        self._tells._tell_events = self._events
        self._tells._tell_content = self._content
        self._telling_state = asyncio.create_task(self._tell_state())

    async def run(self, job: ReplicaJob) -> Refusal | None:
        self._note(job)
        if POISON.encode() in bytes(token for token in job.submission.prompt if token < 256):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(job)

    def _note(self, job: ReplicaJob) -> None:
        given = _lengths(job.submission.generated)
        entry: dict[str, Any] = {
            "replica": self._name,
            "request": job.name.partition("~")[0],
            "tokens": len(job.submission.prompt),
            "priority": job.submission.priority,
            "generated": given,
        }
        with (folder() / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(entry) + "\n")

    async def _tell_state(self) -> None:
        path = folder() / STATES / self._name
        while self._llm.ready:
            kv = self._llm.executor.kv()
            state = {
                "at": time.time(),
                "ingresses": sorted(self._tells.links),
                "requests": [request.id for request in self._llm.requests()],
                "referenced": kv["referenced"],
                "disk_bytes": kv["disk"]["written_bytes"],
            }
            path.with_suffix(".new").write_text(json.dumps(state), encoding="utf-8")
            path.with_suffix(".new").replace(path)
            await asyncio.sleep(STATE_S)

    # -- faults --------------------------------------------------------------------------------------------------

    def _has(self, fault: str) -> bool:
        faults = folder() / FAULTS
        return (faults / fault).exists() or (faults / f"{fault}.{self._name}").exists()

    async def _events(self, link: Link, listener: Listener) -> None:
        if self._has(TELL_CONTENT):
            await self._tell_content(link)
        if self._has(LOSE_EVENTS):
            listener.take()
        elif not self._has(DELAY_EVENTS):
            await self._tell_events(link, listener)

    async def _content(self, link: Link) -> None:
        if not self._has(NO_CONTENT):
            await self._tell_content(link)


def _lengths(generated: Generated | None) -> list[int | None] | None:
    return None if generated is None else [None if each is None else len(each) for each in generated]
