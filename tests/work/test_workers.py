"""Worker processes: limits, ends, and what becomes of the server when they misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from cllm.config.server import WorkConfig
from cllm.errors import (
    BackendError,
    InvalidRequestError,
    ModelUnavailableError,
    OverloadedError,
    RequestCancelledError,
    ShuttingDownError,
)
from cllm.work.parents import FIRST
from cllm.work.pool import Job, Workers, blocking_workers
from cllm.work.turns import OWNER, Owner, while_wanted
from cllm.work.worker import MOST_RESULT, ExceededError, Limits, RefusedError

WAIT_S = 60.0
"""A guard against hanging, not a demand on speed."""
SMALL = Limits(0.3, 64 << 20)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers(WorkConfig(processes=2, max_cpu_s=30.0), ["hostile_jobs"])
    made.open()
    yield made
    made.close()


def job(name: str, *arguments: Any, limits: Limits | None = None, recipe: Any = None) -> Job:
    return Job("test", f"hostile_jobs:{name}", arguments, recipe, limits)


async def until(what: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_job_is_done_and_its_worker_does_the_next(workers: Workers) -> None:
    assert await workers.run(job("add", 2, 3)) == 5
    assert await workers.run(job("pid")) == await workers.run(job("pid")) != os.getpid()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
async def test_arguments_and_results_of_any_size(workers: Workers, size: int) -> None:
    data = os.urandom(size)
    assert await workers.run(job("echo", data)) == data


async def test_errors_come_as_they_are(workers: Workers) -> None:
    with pytest.raises(RefusedError, match="makes no sense"):
        await workers.run(job("refuse"))
    with pytest.raises(InvalidRequestError) as caught:
        await workers.run(job("refuse_by_name"))
    assert (caught.value.param, caught.value.code) == ("x", "code_x")
    for name in ("fail", "no_json"):
        with pytest.raises(BackendError, match="internal error"):
            await workers.run(job(name))
    with pytest.raises(RefusedError, match="recursion"):
        await workers.run(job("recurse"))


@pytest.mark.parametrize("name", ["double", "die", "spin", "allocate"])
async def test_what_takes_too_much_is_ended_and_the_next_is_served(workers: Workers, name: str) -> None:
    given = {"spin": [60.0], "allocate": [1 << 30]}.get(name, [])
    with pytest.raises(ExceededError, match="CPU time, or more than 64 MiB"):
        await asyncio.wait_for(workers.run(job(name, *given, limits=SMALL)), WAIT_S)
    assert await workers.run(job("add", 1, 1, limits=SMALL)) == 2
    assert workers.running == 0


async def test_limits_are_those_of_one_job(workers: Workers) -> None:
    for _ in range(4):
        await workers.run(job("spin", 0.15, limits=SMALL))
        await workers.run(job("allocate", 40 << 20, limits=SMALL))
    assert workers.seconds["test"] >= 0.5


async def test_a_worker_that_keeps_memory_is_replaced(workers: Workers) -> None:
    first = await workers.run(job("keep", 100 << 20))
    assert await workers.run(job("pid")) != first
    await until(lambda: not alive(first))


async def test_a_job_ends_with_its_request(workers: Workers) -> None:
    gone = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        OWNER.set(Owner("key", ended=gone))
        await workers.run(job("spin", 60.0))

    asked = [asyncio.ensure_future(ask()) for _ in range(5)]
    await until(lambda: len(workers._busy) == 2 and all(each._process for each in workers._busy))
    pids = [each._process._pid for each in workers._busy if each._process is not None]
    gone.set_result(None)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, RequestCancelledError) for each in results)
    await until(lambda: not any(map(alive, pids)))
    assert workers.running == workers.waiting == 0
    assert await workers.run(job("add", 1, 1)) == 2


async def test_a_worker_that_somebody_kills_is_replaced_and_its_job_done_again(workers: Workers) -> None:
    task = asyncio.ensure_future(workers.run(job("spin", 0.5)))
    await until(lambda: any(each._process for each in workers._busy))
    (pid,) = [each._process._pid for each in workers._busy if each._process is not None]
    os.kill(pid, signal.SIGKILL)
    assert await task is None and workers.jobs["test", "done"] == 1


async def test_the_end_of_one_parent_is_nobody_else_s(workers: Workers) -> None:
    recipe = ("hostile_jobs:load", ("this",))
    _, parent = await workers.run(job("loaded", recipe=recipe))
    other = asyncio.ensure_future(workers.run(job("spin", 0.5)))
    await until(lambda: any(each._process for each in workers._busy))
    os.kill(parent, signal.SIGKILL)
    await until(lambda: not alive(parent))
    assert (await workers.run(job("loaded", recipe=recipe)))[0] == "loaded this"
    assert await other is None


async def test_workers_know_no_keys(monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    FIRST.close()
    monkeypatch.setenv("CLLM_SERVER__API_KEY", "secret")
    monkeypatch.setenv("CLLM_CACHE_DIR", "somewhere")
    names = await workers.run(job("variables"))
    assert "CLLM_SERVER__API_KEY" not in names and "CLLM_CACHE_DIR" in names
    FIRST.close()


async def test_a_result_that_is_too_large_is_none(workers: Workers) -> None:
    with pytest.raises(ExceededError):
        await workers.run(job("large", MOST_RESULT + 1))
    assert len(await workers.run(job("large", 1 << 20))) == 1 << 20


async def test_an_owner_that_ends_with_the_work_cancels_nothing_later() -> None:
    ended = asyncio.get_running_loop().create_future()

    async def work() -> int:
        asyncio.get_running_loop().call_soon(ended.set_result, None)
        return 5

    assert await while_wanted(Owner(ended=ended), work()) == 5
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(RequestCancelledError):
        await while_wanted(Owner(ended=ended), work())
    await asyncio.sleep(0)


async def test_a_task_that_is_cancelled_ends_its_job(workers: Workers) -> None:
    task = asyncio.ensure_future(workers.run(job("spin", 60.0)))
    await until(lambda: any(each._process for each in workers._busy))
    (pid,) = [each._process._pid for each in workers._busy if each._process is not None]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not alive(pid))


async def test_more_jobs_of_a_key_than_may_wait_are_refused() -> None:
    workers = Workers(WorkConfig(processes=1, max_waiting=2), ["hostile_jobs"])
    asked = [asyncio.ensure_future(workers.run(job("sleep", 0.05))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=r"work\.max_waiting"):
        await workers.run(job("pid"))
    await asyncio.gather(*asked)
    workers.close()


async def test_what_a_recipe_loads_is_loaded_once_and_found_by_its_workers(workers: Workers) -> None:
    recipe = ("hostile_jobs:load", ("this",))
    found = await asyncio.gather(*(workers.run(job("loaded", recipe=recipe)) for _ in range(4)))
    assert {text for text, _ in found} == {"loaded this"} and len({parent for _, parent in found}) == 1
    other = await workers.run(job("loaded", recipe=("hostile_jobs:load", ("that",))))
    assert other[0] == "loaded that" and (await workers.run(job("loaded")))[0] is None
    workers.forget(recipe)
    await until(lambda: not alive(found[0][1]))
    assert (await workers.run(job("loaded", recipe=recipe)))[0] == "loaded this"


async def test_what_cannot_be_loaded_is_said(workers: Workers) -> None:
    for _ in range(2):
        with pytest.raises(ModelUnavailableError, match="OSError: no such file"):
            await workers.run(job("pid", recipe=("hostile_jobs:load", ("broken",))))


async def test_a_parent_that_was_killed_is_replaced(workers: Workers) -> None:
    assert await workers.run(job("add", 1, 1)) == 2
    assert FIRST._parent is not None and FIRST._parent._process is not None
    os.kill(FIRST._parent._process.pid, signal.SIGKILL)
    await until(lambda: FIRST._parent is None or FIRST._parent._process.poll() is not None)  # type: ignore[union-attr]
    (idle,) = workers._kinds[None].idle
    await until(lambda: idle.has_ended)
    assert await workers.run(job("add", 1, 2)) == 3


async def test_closing_ends_what_runs_and_what_waits(workers: Workers) -> None:
    asked = [asyncio.ensure_future(workers.run(job("spin", 60.0))) for _ in range(4)]
    await until(lambda: len(workers._busy) == 2 and all(each._process for each in workers._busy))
    pids = [each._process._pid for each in workers._busy if each._process is not None]
    workers.close()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, ShuttingDownError) for each in results), results
    await until(lambda: not any(map(alive, pids)))


def test_a_program_without_a_loop() -> None:
    with blocking_workers(WorkConfig(), ["hostile_jobs"]) as workers:
        assert workers.run_blocking(job("add", 4, 5)) == 9


_PROGRAM = """
import asyncio, os, sys
from cllm.config.server import WorkConfig
from cllm.work.parents import FIRST
from cllm.work.pool import Job, Workers
async def main():
    workers = Workers(WorkConfig(), ["hostile_jobs"])
    pid = await workers.run(Job("test", "hostile_jobs:pid", ()))
    spinning = asyncio.ensure_future(workers.run(Job("test", "hostile_jobs:spin", (60.0,))))
    while not all(each._process for each in workers._busy) or not workers._busy:
        await asyncio.sleep(0.01)
    print(FIRST._parent._process.pid, *[each._process._pid for each in workers._busy], flush=True)
    await asyncio.sleep(0.1)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent on Linux")
@pytest.mark.parametrize("end", ["killed", "returns"])
def test_no_process_outlives_the_program(end: str) -> None:
    kits = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", _PROGRAM, end], env=kits, capture_output=True, text=True, timeout=120)
    pids = [*map(int, done.stdout.split())]
    assert len(pids) >= 2, done.stderr
    until_s = time.monotonic() + WAIT_S
    while any(map(alive, pids)):
        assert time.monotonic() < until_s
        time.sleep(0.01)
