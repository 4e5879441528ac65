"""Log lines: readable or JSON, one per request, and one about the cache when something happened."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from cllm.config import LogConfig
from cllm.engine.observer import EngineObserver, RequestRecord
from cllm.engine.stats import EngineSnapshot
from cllm.kv.usage import KVUsage
from cllm.observe.log import EfficiencyLog, RequestLog, setup_logging, stop_logging, tokens_per_second

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_logging_left_behind() -> Iterator[None]:
    yield
    stop_logging()
    logging.getLogger("cllm").setLevel(logging.NOTSET)


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": "req-1",
        "reason": "stop",
        "error": None,
        "prompt_tokens": 330,
        "cached_tokens": 256,
        "known_tokens": 256,
        "generated_tokens": 65,
        "queued_s": 0.0123,
        "ttft_s": 0.25,
        "prefill_s": 0.24,
        "decode_s": 2.0,
        "total_s": 2.25,
        "inter_token_s": array("d", [2.0 / 64] * 64),
        "preemptions": 0,
    }
    return RequestRecord(**{**values, **changes})


def snapshot(
    steps: int = 1, queries: int = 0, hits: int = 0, evictions: int = 0, finished: dict[str, int] | None = None
) -> EngineSnapshot:
    kv = KVUsage(
        layout="paged",
        unit_tokens=16,
        bytes_per_unit=MIB,
        total=60,
        free=30,
        evictable=20,
        referenced=10,
        peak=40,
        sequences_running=2,
        sequences_held=5,
        free_segments=1,
        largest_free_span=30,
        evictions=evictions,
        allocation_failures=0,
        compactions=0,
        moved_bytes=0,
        query_tokens=queries,
        hit_tokens=hits,
    )
    numbers = dict.fromkeys(EngineSnapshot._fields, 0)
    return EngineSnapshot(
        **{**numbers, "kv": kv, "running": 2, "waiting": 3, "steps": steps, "finished": finished or {}}  # type: ignore[arg-type]
    )


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    stop_logging()
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_request_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    observer: EngineObserver = RequestLog()
    observer.on_finished(record())
    (line,) = written(capsys)
    assert line.endswith(
        "info    req-1 stop: prompt 330 (256 cached), generated 65, queue 0.012 s, first token 0.250 s, 32.0 tok/s"
    )


def test_a_request_that_computed_what_was_known_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    RequestLog().on_finished(record(known_tokens=304))
    (line,) = written(capsys)
    assert "prompt 330 (256 cached of 304 known), " in line


def test_a_text_to_embed_has_a_line_only_if_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    RequestLog().on_finished(record(embeds=True))
    RequestLog().on_finished(record(embeds=True, reason="error", error="it broke"))
    (line,) = written(capsys)
    assert "it broke" in line


def test_a_request_that_failed_before_its_first_token_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(level="warning"))
    RequestLog().on_finished(record())
    failed = record(reason="error", error="no room", generated_tokens=0, ttft_s=None, decode_s=0.0, preemptions=2)
    RequestLog().on_finished(failed)
    (line,) = written(capsys)
    assert line.endswith(
        "warning req-1 error: prompt 330 (256 cached), generated 0, queue 0.012 s, preempted 2x, no room"
    )


def test_json_lines_carry_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(format="json"))
    RequestLog().on_finished(record())
    (line,) = map(json.loads, written(capsys))
    assert line.pop("time").endswith("+00:00")
    assert line.pop("message").startswith("req-1 stop: ")
    assert line == {
        "level": "info",
        "logger": "cllm",
        "request_id": "req-1",
        "reason": "stop",
        "error": None,
        "prompt_tokens": 330,
        "cached_tokens": 256,
        "known_tokens": 256,
        "generated_tokens": 65,
        "queue_s": 0.0123,
        "ttft_s": 0.25,
        "total_s": 2.25,
        "tokens_per_second": 32.0,
        "preemptions": 0,
    }


def test_what_a_client_sends_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    RequestLog().on_finished(record(request_id="a\nb\x1b[2J\x85"))
    (line,) = written(capsys)
    assert "a\\x0ab\\x1b[2J\\x85 stop" in line


def test_tracebacks_follow_their_line_in_text_and_stay_inside_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("text", "json"):
        setup_logging(LogConfig.model_validate({"format": kind}))
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("cllm.engine").exception("it failed")
        lines = written(capsys)
        if kind == "text":
            assert lines[0].endswith("error   it failed")
            assert lines[-1] == "ValueError: broken"
        else:
            assert json.loads(lines[0])["exception"].endswith("ValueError: broken")
            assert len(lines) == 1


def test_levels_bind_us_and_only_warnings_of_others_show(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(level="debug"))
    logging.getLogger("cllm.kv").debug("ours")
    logging.getLogger("another.library").info("chatter")
    logging.getLogger("another.library").warning("theirs")
    assert [line.split()[-1] for line in written(capsys)] == ["ours", "theirs"]


def test_setting_up_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    setup_logging(LogConfig())
    logging.getLogger("cllm").info("once")
    assert len(written(capsys)) == 1


def test_speed_needs_a_second_token() -> None:
    assert tokens_per_second(1, 0.0) is None
    assert tokens_per_second(2, 0.5) == 2.0


def test_efficiency_lines_tell_what_happened_since_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig())
    snapshots = iter(
        [
            snapshot(steps=0),
            snapshot(steps=4, queries=1000, hits=250),
            snapshot(steps=4, queries=1000, hits=250),
            snapshot(steps=5, queries=1100, hits=340, evictions=7),
            snapshot(steps=5, queries=1100, hits=340, evictions=7, finished={"cancelled": 1}),
        ]
    )
    log = EfficiencyLog(lambda: next(snapshots), interval_s=60)
    for _ in range(5):
        log.tick()
    memory = "10.0 MiB used, 20.0 MiB cached, 30.0 MiB free"
    assert [line.partition("cache: ")[2] for line in written(capsys)] == [
        f"saved 25% of 1000 prompt tokens; {memory}; 0 evicted; 2 running, 3 waiting",
        f"saved 90% of 100 prompt tokens; {memory}; 7 evicted; 2 running, 3 waiting",
        f"no new prompts; {memory}; 0 evicted; 2 running, 3 waiting",
    ]


def test_efficiency_fields_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(format="json"))
    EfficiencyLog(lambda: snapshot(queries=8, hits=2), interval_s=60).tick()
    line = json.loads(written(capsys)[0])
    assert line["hit_rate"] == 0.25
    assert (line["used_bytes"], line["cached_bytes"], line["free_bytes"]) == (10 * MIB, 20 * MIB, 30 * MIB)
    assert (line["query_tokens"], line["hit_tokens"], line["evictions"]) == (8, 2, 0)
    assert (line["running"], line["waiting"]) == (2, 3)


async def test_efficiency_log_runs_until_cancelled() -> None:
    steps = 0
    third = asyncio.Event()

    def take() -> EngineSnapshot:
        nonlocal steps
        steps += 1
        if steps == 3:
            third.set()
        return snapshot(steps=steps)

    task = asyncio.create_task(EfficiencyLog(take, interval_s=0.001).run())
    await third.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_interval_of_zero_means_never() -> None:
    await EfficiencyLog(lambda: pytest.fail("was read"), interval_s=0).run()
