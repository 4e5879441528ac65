"""A replica that keeps a journal of its jobs, and that breaks on request. Ray's workers import it.

A folder is all that tests and replicas share (`FOLDER_VARIABLE`). It has the journal, a line for each job, and the
faults: files whose existence is what counts, `NAME` for all replicas or `NAME.REPLICA` for one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from cllm.cluster.link import Link
from cllm.cluster.messages import Job, Refusal
from cllm.cluster.replica import Replica
from cllm.config import Config
from cllm.kv.events import Listener

FOLDER_VARIABLE = "CLLM_TEST_CLUSTER"
JOURNAL = "journal"
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
REFUSE_LINKS = "refuse-links"
"""No ingress gets through to it."""


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


class BreakableReplica(Replica):
    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        await super().__init__(config)
        links = self._links
        self._tell_events, self._tell_content = links._tell_events, links._tell_content
        links._tell_events = self._events  # type: ignore[method-assign]
        links._tell_content = self._content  # type: ignore[method-assign]

    def _breaks(self, fault: str) -> bool:
        return (folder() / fault).exists() or (folder() / f"{fault}.{self.id}").exists()

    async def run(self, job: Job) -> Refusal | None:
        self._note(job)
        if POISON.encode() in bytes(token for token in job.prompt if token < 256):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(job)

    def _note(self, job: Job) -> None:
        given = None if job.generated is None else [None if each is None else len(each) for each in job.generated]
        entry: dict[str, Any] = {
            "replica": self.id,
            "pid": os.getpid(),
            "request": job.request_id,
            "tokens": len(job.prompt),
            "priority": job.priority,
            "generated": given,
        }
        with (folder() / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(entry) + "\n")

    async def _events(self, link: Link, listener: Listener) -> None:
        if self._breaks(TELL_CONTENT):
            await self._tell_content(link)
        if self._breaks(LOSE_EVENTS):
            listener.take()
        elif self._breaks(DELAY_EVENTS):
            await asyncio.sleep(0)
        else:
            await self._tell_events(link, listener)

    async def _content(self, link: Link) -> None:
        if not self._breaks(NO_CONTENT):
            await self._tell_content(link)
