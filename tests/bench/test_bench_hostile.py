"""Does the benchmark of unkind clients see what they do?"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench_kit import bench, make_answer
from cllm_bench.attacks import ATTACKS, ask
from cllm_bench.workloads.hostile import Hostile, worst_gap
from thorough import slow

SMALL = Hostile(
    header_mb=0.5,
    connections=3,
    hold_s=0.1,
    token_ids=100,
    biases=30,
    prompts=20,
    keys=10,
    answers=2,
    answer_tokens=3,
    digits=50,
    at_once=2,
    source_mb=0.01,
    inputs=5,
    tools=3,
)


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    """A listener that answers everyone the same once something has come, and keeps what that was."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(1 << 20))
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname(), heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_every_attack_sends_what_its_name_says() -> None:
    bodies = {attack.key: attack.prepare(SMALL) for attack in ATTACKS}
    contents = {key: json.loads(raw.rpartition(b"\r\n\r\n")[2]) for key, raw in bodies.items() if raw}
    assert len(contents["stop_ids"]["stop_token_ids"]) == 100
    assert len(contents["bias"]["logit_bias"]) == 30
    assert len(contents["echo"]["prompt"]) == 100 and contents["echo"]["echo"] is True
    assert len(contents["prompts"]["prompt"]) == 20
    assert len(contents["keys"]) == 11
    assert contents["logprobs"]["top_logprobs"] == 20 and contents["logprobs"]["n"] == 2
    assert contents["digits"]["prompt"].isdigit() and len(contents["digits"]["prompt"]) == 50
    assert bodies["gone"].count(b"POST /v1/completions") == 2


def test_bodies_at_full_size_are_within_the_limit_of_the_server() -> None:
    for attack in ATTACKS:
        assert len(attack.prepare(Hostile())) < 4_194_304, attack.key


def test_the_status_is_read_and_a_closed_connection_is_none() -> None:
    with answering(b"HTTP/1.1 431 Too Large\r\n\r\n") as (place, heard):
        assert ask(place, b"GET / HTTP/1.1\r\n\r\n") == 431
        assert heard == [b"GET / HTTP/1.1\r\n\r\n"]
    with answering(b"") as (place, _):
        assert ask(place, b"x") == 0


def test_only_gaps_after_the_attack_began_count() -> None:
    one = make_answer(0.0, 1.0, 5.0, 5.1, 6.0, tokens=4)
    other = make_answer(0.0, 5.2, 5.3, tokens=2)
    assert worst_gap([one, other], 5.05, 10.0) == pytest.approx(0.9)
    assert worst_gap([one, other], 4.0, 10.0) == pytest.approx(4.0)  # it had not ended by then
    other.finished = None  # still running, and silent since 5.3
    assert worst_gap([one, other], 5.05, 10.0) == pytest.approx(4.7)
    assert worst_gap([], 0.0, 10.0) == 0.0


@slow
def test_all_attacks_run_beside_streams_and_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "hostile.json"
    options = ["--backend", "fake", "--quick", "--set", "backend.fake.latency_ms=2", "--json", str(file)]
    assert bench("hostile", *options, "--size", "streams=2", "--size", "settle_s=0") == 0
    content = json.loads(file.read_text())
    assert content["failures"] == {}
    found = {row["key"]: row["ours"]["median"] for row in content["workloads"][0]["rows"] if row["ours"]}
    for attack in ATTACKS:
        assert found[f"{attack.key}_gap_ms"] > 0
        assert found[f"{attack.key}_grown_mb"] >= 0 and found[f"{attack.key}_kept_mb"] >= 0
    assert found["headers_status"] == 431 and found["silent_status"] == found["trickle_status"] == 200
    assert found["keys_status"] == found["prompts_status"] == found["digits_status"] == 400
    assert found["worst_gap_ms"] == max(found[f"{attack.key}_gap_ms"] for attack in ATTACKS)
